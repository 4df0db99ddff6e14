"""Parameters whose memory is a chunk: a ``Parameter`` subclass that says when it is used.

The user's ``Parameter`` objects stay the objects they are; only their class changes (as PyTorch's lazy modules do it),
and changes back when the engine is closed. Every torch function that gets such a parameter, or a view of one, passes
through ``__torch_function__`` here, which tells the observer *before* the operation that the memory is needed, and
after it which node of the autograd graph will need it again. So uses are observed, not assumed: functional weight
tying, a module that reads another's weights, an expert that is used now and then, a user who prints a weight between
two steps.

[Note: writes] An in-place operation on a parameter (``p.mul_``, ``nn.init.normal_(p)``, ``p.data = ...``) is carried
out on its float32 value and written back there, so nothing is lost when the compute copy is derived again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from patrickstar import _C

if TYPE_CHECKING:
    from patrickstar.observer import Observer

_DisableTorchFunction = torch._C.DisableTorchFunctionSubclass
_GRAD_GET = torch.Tensor.grad.__get__
_GRAD_SET = torch.Tensor.grad.__set__
_DATA_GET = torch.Tensor.data.__get__
_DATA_SET = torch.Tensor.data.__set__


@dataclasses.dataclass(eq=False, slots=True)
class ParamHandle:
    """What a chunked parameter knows about itself."""

    id: int
    """Its id in the core: the index in registration order among chunked parameters."""
    name: str
    """Its name in the user's module."""
    chunk: int
    """The chunk it lies in."""
    storage: int
    """Address of the chunk's storage object; all parameters and views of the chunk share it."""
    shape: torch.Size
    """Its shape."""
    stride: tuple[int, ...]
    """Its strides in elements; dense, in the memory order the user gave it."""
    offset: int
    """Its offset in the chunk in elements."""
    trainable: bool
    """Whether it required a gradient when the engine was built."""
    original_dtype: torch.dtype
    """The dtype the user's module had it in."""
    original_device: torch.device
    """The device the user's module had it on."""
    observer: Observer
    """Who is told about uses, and reads and writes values."""
    uses: _C.UseObserver
    """The observer's."""


def _names_of(attributes: Iterable[str]) -> set[Callable[..., Any]]:
    functions: set[Callable[..., Any]] = set()
    for name in attributes:
        attribute = getattr(torch.Tensor, name, None)
        if attribute is None:
            continue
        if hasattr(attribute, "__get__") and hasattr(attribute, "__set__"):
            functions |= {attribute.__get__, attribute.__set__}
        else:
            functions.add(attribute)
    return functions


# Functions that look at a tensor without reading its memory.
_METADATA_NAMES = """
    shape dtype device requires_grad is_leaf grad_fn grad layout ndim names is_cuda is_cpu is_sparse is_sparse_csr
    is_quantized is_meta is_nested is_mkldnn is_mps is_xpu is_xla is_hpu is_ipu is_mtia is_maia is_vulkan is_ort
    itemsize nbytes output_nr _version _backward_hooks _post_accumulate_grad_hooks _base _grad _grad_fn name
    retains_grad imag_ volatile size dim ndimension stride numel nelement element_size storage_offset is_contiguous
    is_floating_point is_complex is_signed is_inference get_device register_hook register_post_accumulate_grad_hook
    retain_grad requires_grad_ has_names is_same_size is_set_to _is_view is_pinned is_shared _is_all_true __hash__
    __len__ __dir__ dim_order is_coalesced new_empty new_zeros new_ones new_full new_empty_strided
"""
_METADATA = _names_of(_METADATA_NAMES.split()) | {
    torch.is_floating_point,
    torch.is_complex,
    torch.is_signed,
    torch.is_inference,
    torch.numel,
    torch.is_same_size,
    torch.empty_like,
    torch.zeros_like,
    torch.ones_like,
    torch.full_like,
    torch.rand_like,
    torch.randn_like,
    torch.result_type,
}
# Functions whose backward needs the result's shape only.
_NO_VALUE_IN_BACKWARD = {torch.nn.functional.embedding, torch.embedding}
# Functions whose result shares the parameter's memory without being a view in autograd's sense.
_ALIASING = {
    _DATA_GET,
    torch.Tensor.detach,
    torch.detach,
    torch.Tensor.alias if hasattr(torch.Tensor, "alias") else torch.detach,
}
_UNSUPPORTED_IN_PLACE = {
    "set_",
    "resize_",
    "resize_as_",
    "share_memory_",
    "as_strided_",
    "detach_",
    "rename_",
    "swap_tensors",
}
_IN_PLACE_OPERATORS = {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
}
_IN_PLACE_OPERATORS.add("__setitem__")


def _is_chunked(value: Any) -> bool:
    return isinstance(value, (ChunkedParameter, ChunkedView))


@functools.lru_cache(maxsize=4096)
def _way_of(func: Callable[..., Any]) -> _C.Way:
    """What ``func`` does with a parameter's memory; see csrc/bind/torch_function.h."""
    if func in _METADATA:
        return _C.Way.LOOK
    if func in _ALIASING:
        return _C.Way.ALIAS
    if _may_write(func):
        return _C.Way.MAY_WRITE
    return _C.Way.READ_ONCE if func in _NO_VALUE_IN_BACKWARD else _C.Way.READ


def _write(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carries out what writes a parameter; ``NotImplemented`` when ``func`` writes none."""
    with _DisableTorchFunction():
        target = _in_place_target(func, args, kwargs)
        return NotImplemented if target is None else _write_through(target, func, args, kwargs)


def _as_view(result: Any, func: Callable[..., Any], handles: list[ParamHandle]) -> Any:
    """Results that share a chunk's memory must say when they are used, as the parameter does."""
    if type(result) is torch.Tensor:
        if not (result._is_view() or func in _ALIASING or torch.is_inference_mode_enabled()):
            return result
        storage = result.untyped_storage()._cdata
        for handle in handles:
            if handle.storage == storage:
                view = result.as_subclass(ChunkedView)
                view._patrickstar = handle
                return view
        return result
    if isinstance(result, (list, tuple)) and any(type(item) is torch.Tensor for item in result):
        items = [_as_view(item, func, handles) for item in result]
        if all(new is old for new, old in zip(items, result, strict=True)):
            return result
        return type(result)(items) if type(result) in (list, tuple) else type(result)(tuple(items))
    return result


def _may_write(func: Callable[..., Any]) -> bool:
    """Whether ``func`` writes its first argument, by its name."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_OPERATORS or func == _DATA_SET


def _in_place_target(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = kwargs.get("out")
    if out is not None and _is_chunked(out):
        return out
    if not _may_write(func):
        return None
    first = args[0] if args else next(iter(kwargs.values()), None)  # torch.nn.init passes its tensor by keyword
    return first if _is_chunked(first) else None


def _write_through(target: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carries out an in-place operation on the float32 value; see [Note: writes]."""
    handle: ParamHandle = target._patrickstar
    name = getattr(func, "__name__", "")
    if name in _UNSUPPORTED_IN_PLACE:
        raise RuntimeError(
            f"{handle.name}: {name} would take the parameter out of its chunk; copy the values instead (param.copy_)"
        )
    by_init = getattr(func, "__module__", None) == "torch.nn.init"  # switches gradients off itself, later
    if (
        torch.is_grad_enabled()
        and func != _DATA_SET
        and not by_init
        and (target.requires_grad or target.grad_fn is not None)
    ):
        raise RuntimeError(
            f"{handle.name}: a leaf parameter that requires grad is used in an in-place operation; use torch.no_grad()"
        )
    values = handle.observer.read_values(handle, _C.ArrayKind.MASTER).to(target.device)
    place = (
        values
        if isinstance(target, ChunkedParameter)
        else values.as_strided(target.shape, target.stride(), target.storage_offset() - handle.offset)
    )

    def replaced(value: Any) -> Any:
        if value is target:
            return place
        if isinstance(value, ChunkedParameter):
            other = value._patrickstar
            return other.observer.read_values(other, _C.ArrayKind.MASTER).to(target.device)
        if isinstance(value, ChunkedView):
            value._patrickstar.uses.touch([value._patrickstar.id])
        return type(value)(replaced(item) for item in value) if isinstance(value, (list, tuple)) else value

    with torch.no_grad():
        if func == _DATA_SET:
            if args[1].shape != target.shape:
                raise RuntimeError(
                    f"{handle.name}.data has shape {tuple(target.shape)}, the new tensor {tuple(args[1].shape)}; "
                    "they must agree"
                )
            place.copy_(replaced(args[1]))
        else:
            func(*[replaced(value) for value in args], **{key: replaced(value) for key, value in kwargs.items()})
        handle.observer.write_values(handle, _C.ArrayKind.MASTER, values)
    return None if func == _DATA_SET or name == "__setitem__" else target


class ChunkedParameter(nn.Parameter):
    """A parameter whose memory is in a chunk. Made by changing the class of the user's parameter, never constructed."""

    _patrickstar: ParamHandle

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, while autograd holds it; folded gradients cannot be read here.

        Raises:
            RuntimeError: the gradient was folded into its chunk.
        """
        with _DisableTorchFunction():
            grad = _GRAD_GET(self)
        handle = self.__dict__.get("_patrickstar")
        if grad is None and handle is not None and handle.observer.has_gradient(handle):
            raise RuntimeError(
                f"the gradient of {handle.name} is in PatrickStar's chunks, not in .grad; the global norm is "
                "model.report()['grad_norm'] "
                "after step(), clipping is the config key 'gradient_clipping', and optimizer.zero_grad() forgets "
                "gradients"
            )
        return grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        handle = self.__dict__.get("_patrickstar")
        if handle is not None and value is not None:
            raise RuntimeError(
                f"the gradient of {handle.name} belongs to PatrickStar; it cannot be set, only dropped (grad = None)"
            )
        if handle is not None:
            handle.observer.clear_gradient(handle)
        with _DisableTorchFunction():
            _GRAD_SET(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy is an ordinary parameter."""
        if id(self) not in memo:
            with _C.HostAllocations():
                data = self.detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(data.as_subclass(torch.Tensor), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: int) -> Any:
        """Pickles as an ordinary parameter with the compute value."""
        return nn.Parameter(self.detach().clone().as_subclass(torch.Tensor), self.requires_grad).__reduce_ex__(protocol)


class ChunkedView(torch.Tensor):
    """A view of a chunked parameter: same memory, same need to say when it is used."""

    _patrickstar: ParamHandle

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A copy is an ordinary tensor."""
        return memo.setdefault(id(self), self.detach().clone().as_subclass(torch.Tensor))

    def __reduce_ex__(self, protocol: int) -> Any:
        """Pickles as an ordinary tensor."""
        return self.detach().clone().as_subclass(torch.Tensor).__reduce_ex__(protocol)


_torch_function = _C.torch_function(
    types=(ChunkedParameter, ChunkedView), way_of=_way_of, write=_write, as_view=_as_view
)
ChunkedParameter.__torch_function__ = ChunkedView.__torch_function__ = _torch_function


def folded_gradient(param: nn.Parameter) -> torch.Tensor | None:
    """Takes ``param``'s gradient away from autograd."""
    with _DisableTorchFunction():
        grad = _GRAD_GET(param)
        _GRAD_SET(param, None)
    return grad


def make_gradient_hook(param: nn.Parameter, runtime: _C.Runtime) -> _C.GradientHook:
    """Called when autograd has finished the gradient of ``param``, it folds that into the parameter's chunk."""
    handle = param._patrickstar
    return _C.GradientHook(
        runtime=runtime, param=handle.id, strides=handle.stride, take=folded_gradient, rearrange=_rearrange
    )


def _rearrange(grad: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    """The gradient with the parameter's strides."""
    handle = param._patrickstar
    grad = grad.to_dense() if grad.is_sparse else grad
    return torch.empty_strided(handle.shape, handle.stride, dtype=grad.dtype, device=grad.device).copy_(grad)
