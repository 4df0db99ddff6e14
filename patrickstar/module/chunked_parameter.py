"""``ChunkedParameter``: a ``Parameter`` subclass whose memory is in a chunk and which reports its uses.

The user's ``Parameter`` objects keep their identity. Only their class changes, as with PyTorch's lazy modules, and
changes back when the engine is closed. Every torch function that gets such a parameter, or a view of one, goes through
``__torch_function__``. It tells the observer *before* the operation that the memory is needed, and afterwards which
autograd node will need it again. Thus uses are observed: functional weight tying, modules that read each other's
weights, experts that are used now and then, a user who prints a weight between two steps.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.module.param_handle import ParamHandle
from patrickstar.module.parameter_writes import carry_out_write, may_write

_DisableTorchFunction = torch._C.DisableTorchFunctionSubclass
_GRAD_GET = torch.Tensor.grad.__get__
_GRAD_SET = torch.Tensor.grad.__set__
_DATA_GET = torch.Tensor.data.__get__


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


# Functions that inspect a tensor without reading its memory.
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
# Functions whose backward needs only the result's shape.
_NO_VALUE_IN_BACKWARD = {torch.nn.functional.embedding, torch.embedding}
# Functions whose result shares the parameter's memory without being a view in autograd's sense.
_ALIASING = {
    _DATA_GET,
    torch.Tensor.detach,
    torch.detach,
    torch.Tensor.alias if hasattr(torch.Tensor, "alias") else torch.detach,
}


@functools.lru_cache(maxsize=4096)
def _dispatch_way(func: Callable[..., Any]) -> _C.Way:
    """How ``func`` uses a parameter's memory; see csrc/bind/torch_function.h."""
    if func in _METADATA:
        return _C.Way.LOOK
    if func in _ALIASING:
        return _C.Way.ALIAS
    if may_write(func):
        return _C.Way.MAY_WRITE
    return _C.Way.READ_ONCE if func in _NO_VALUE_IN_BACKWARD else _C.Way.READ


def _refuse(func: Callable[..., Any], handle: ParamHandle) -> None:
    """Raises the error for ``func``, which wrote the compute copy of a parameter without reporting it."""
    if handle.trainable:  # the compute copy is derived again from the unchanged float32 master
        values = handle.observer.read_values(handle, _C.ArrayKind.MASTER)
        handle.observer.write_values(handle, _C.ArrayKind.MASTER, values)
    raise RuntimeError(
        f"{handle.name}: {getattr(func, '__name__', func)} writes the parameter in a way that cannot be carried out on "
        "its float32 value; write it with an in-place method (param.copy_, param.mul_ …)"
    )


def _as_view(result: Any, func: Callable[..., Any], handles: list[ParamHandle]) -> Any:
    """Makes results that share a chunk's memory ``ChunkedView``s, which report their uses as parameters do."""
    if type(result) is torch.Tensor:
        if not (result._is_view() or func in _ALIASING or torch.is_inference_mode_enabled()):
            return result
        storage = result.untyped_storage()._cdata
        for handle in handles:
            if handle.storage == storage:
                become_view(result, handle)
                if result.grad_fn is None and not torch.compiler.is_compiling():
                    handle.views[id(result)] = result
        return result
    if isinstance(result, (list, tuple)) and any(type(item) is torch.Tensor for item in result):
        items = [_as_view(item, func, handles) for item in result]
        if all(new is old for new, old in zip(items, result, strict=True)):
            return result
        return type(result)(items) if type(result) in (list, tuple) else type(result)(tuple(items))
    return result


class ChunkedParameter(nn.Parameter):
    """A parameter whose memory is in a chunk; made by :func:`become_chunked`, never constructed."""

    _patrickstar: ParamHandle
    _patrickstar_impl: int
    """Address of its TensorImpl (csrc/bind/torch_function.h)."""
    _patrickstar_pin: weakref.ref[ChunkedParameter]
    """A weak reference keeps torch.utils.swap_tensors from swapping the parameter: no torch function would report it.
    """

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient that autograd holds, or else a copy of the gradient in the chunk (``GradientReads`` in
        session/gradient_reads.py).

        Raises:
            RuntimeError: the gradient cannot be read now.
        """
        with _DisableTorchFunction():
            grad = _GRAD_GET(self)
        handle = self.__dict__.get("_patrickstar")
        if grad is not None or handle is None or is_tied(self):
            return grad
        return handle.observer.gradients.read(handle)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        handle = self.__dict__.get("_patrickstar")
        if handle is not None and value is not None:
            raise RuntimeError(
                f"the gradient of {handle.name} belongs to PatrickStar; it cannot be set here, only dropped "
                "(grad = None). Set it by patrickstar.utils.safe_set_full_grad(param, value), between backward and step"
            )
        if handle is not None and not is_tied(self):
            handle.observer.clear_gradient(handle)
            handle.observer.gradients.drop(handle)
        with _DisableTorchFunction():
            _GRAD_SET(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def set_(self, *args: Any, **options: Any) -> ChunkedParameter:
        """``set_(values)`` acts as ``.data = values``; torch.nn.utils.parametrize uses it. PyTorch does not report the
        function to ``__torch_function__``.

        Raises:
            RuntimeError: autograd is on, or it would do more than take other values.
        """
        if torch.is_grad_enabled() or options or len(args) != 1 or not isinstance(args[0], torch.Tensor):
            return carry_out_write(torch.Tensor.set_, (self, *args), options)
        self.data = args[0]
        return self

    def retain_grad(self) -> None:
        """Makes ``.grad`` readable after each step, until ``zero_grad`` or the next forward."""
        self._patrickstar.observer.gradients.retain(self._patrickstar)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copies to an ordinary parameter of the user's dtype, with the float32 value if that is as wide."""
        if id(self) not in memo:
            memo[id(self)] = self._ordinary_copy()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: int) -> Any:
        """Pickles as the ordinary parameter that ``copy.deepcopy`` makes."""
        return self._ordinary_copy().__reduce_ex__(protocol)

    def _ordinary_copy(self) -> nn.Parameter:
        handle = self._patrickstar
        with _C.HostAllocations(), torch.no_grad():
            if handle.original_dtype.itemsize > handle.dtype.itemsize:  # an average needs more than compute values
                values = handle.observer.read_values(handle, _C.ArrayKind.MASTER)
                data = values.to(self.device, handle.original_dtype)
            else:
                data = self.detach().clone(memory_format=torch.preserve_format).as_subclass(torch.Tensor)
        return nn.Parameter(data, self.requires_grad)


class ChunkedView(torch.Tensor):
    """A view of a chunked parameter; it reports its uses as the parameter does."""

    _patrickstar: ParamHandle
    _patrickstar_impl: int

    def set_(self, *args: Any, **options: Any) -> torch.Tensor:
        """Refused: the view would leave its chunk.

        Raises:
            RuntimeError: always.
        """
        return carry_out_write(torch.Tensor.set_, (self, *args), options)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copies to an ordinary tensor."""
        return memo.setdefault(id(self), self.detach().clone().as_subclass(torch.Tensor))

    def __reduce_ex__(self, protocol: int) -> Any:
        """Pickles as an ordinary tensor."""
        return self.detach().clone().as_subclass(torch.Tensor).__reduce_ex__(protocol)


_torch_function = _C.torch_function(
    types=(ChunkedParameter, ChunkedView), way_of=_dispatch_way, write=carry_out_write, refuse=_refuse, as_view=_as_view
)
ChunkedParameter.__torch_function__ = ChunkedView.__torch_function__ = _torch_function


def become_chunked(param: nn.Parameter, view: torch.Tensor, handle: ParamHandle) -> None:
    """Turns ``param``, the user's object, into a ``ChunkedParameter`` with the memory of ``view``."""
    with _DisableTorchFunction():
        impl = param._cdata
        param.data = view
    param.__class__ = ChunkedParameter
    param._patrickstar = handle
    param._patrickstar_impl = impl
    param._patrickstar_pin = weakref.ref(param)


def whole_shape(tensor: torch.Tensor) -> torch.Size:
    """The tensor's shape; of a parameter that ranks have parts of, the whole one's."""
    return tensor._patrickstar.whole_shape if isinstance(tensor, ChunkedParameter) else tensor.shape


def become_tied(param: nn.Parameter, view: torch.Tensor, handle: ParamHandle) -> None:
    """Gives the frozen ``param`` the memory of ``handle``'s parameter; it gets no gradient."""
    become_chunked(param, view, handle)
    param._patrickstar_tied = True


def is_tied(param: nn.Parameter) -> bool:
    """Tests whether :func:`become_tied` made the parameter."""
    return "_patrickstar_tied" in param.__dict__


def become_view(tensor: torch.Tensor, handle: ParamHandle) -> None:
    """Turns ``tensor``, which shares the parameter's memory, into a ``ChunkedView``."""
    with _DisableTorchFunction():
        tensor._patrickstar, tensor._patrickstar_impl = handle, tensor._cdata
    tensor.__class__ = ChunkedView  # last: Dynamo, where it traces this, goes on with a whole view


def become_ordinary(param: nn.Parameter, values: torch.Tensor) -> None:
    """Turns ``param`` back into an ordinary parameter with the memory of ``values``."""
    del param._patrickstar, param._patrickstar_impl, param._patrickstar_pin
    param.__dict__.pop("_patrickstar_tied", None)
    param.__class__ = nn.Parameter
    param.data = values


def accumulated_gradient(param: nn.Parameter) -> torch.Tensor | None:
    """Takes ``param``'s gradient away from autograd."""
    with _DisableTorchFunction():
        grad = _GRAD_GET(param)
        _GRAD_SET(param, None)
    return grad


def drop_gradient(param: nn.Parameter) -> None:
    """Deletes the gradient that autograd holds for ``param``, if any."""
    with _DisableTorchFunction():
        if _GRAD_GET(param) is not None:
            _GRAD_SET(param, None)


def make_gradient_hook(param: nn.Parameter, runtime: _C.Runtime) -> _C.GradientHook:
    """A hook that accumulates the finished gradient of ``param`` into its chunk."""
    handle = param._patrickstar
    return _C.GradientHook(
        runtime=runtime, param=handle.id, strides=handle.stride, take=accumulated_gradient, rearrange=_rearrange
    )


def _rearrange(grad: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    """The gradient, dense, with the parameter's strides."""
    handle = param._patrickstar
    grad = grad.to_dense() if grad.is_sparse else grad
    return torch.empty_strided(handle.shape, handle.stride, dtype=grad.dtype, device=grad.device).copy_(grad)
