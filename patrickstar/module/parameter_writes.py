"""Operations that write chunked parameters.

A write (``p.mul_``, ``nn.init.normal_(p)``, ``p.data = ...``, ``torch._foreach_mul_(params, 0.5)``, ``torch.add(a, b,
out=p)``) runs on float32 copies of the masters, which then become the masters. So nothing is lost when the compute copy
is derived again. The operation's schema, or else its name, says which arguments it writes. Writes that cannot be
recognised are refused (csrc/bind/torch_function.h).

``p.data = values`` gives ``p`` other memory in PyTorch, and the engine copies instead. So tensors that ``p.data`` gave
before become ordinary ones, with the former values, and the memory of another chunked parameter is refused.

An operation that copies values also preserves masters ([Note: put back], overwritten_masters.py). If a parameter is
copied into a float32 tensor, or averaged with one (``lerp_``), its float32 master is used. Averages that are swapped
with parameters thus keep their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from patrickstar import _C

if TYPE_CHECKING:
    from patrickstar.module.param_handle import ParamHandle

_DATA_SET = torch.Tensor.data.__set__

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
_MIXING = {"copy_", "_foreach_copy_", "lerp_", "_foreach_lerp_"}
"""The first argument is written, the second read."""
_COPYING = {"copy_", "_foreach_copy_", "index_copy_", "index_put_", "masked_scatter_", "put_", "scatter_"}


def carry_out_write(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs operations that write parameters, or copy them into float32 tensors; ``NotImplemented`` for all others."""
    with torch._C.DisableTorchFunctionSubclass():
        if func == _DATA_SET:
            _prepare_other_memory(*args)
        written = written_tensors(func, args, kwargs)
        if any(map(_is_chunked, written)):
            return _write_through(written, func, args, kwargs)
        return _copy_masters(func, args, kwargs)


def may_write(func: Callable[..., Any]) -> bool:
    """True if ``func`` writes some of its arguments other than ``out``."""
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.is_mutable
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_OPERATORS or func == _DATA_SET


def _is_chunked(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and "_patrickstar" in value.__dict__


def written_tensors(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that ``func`` writes, as far as chunked ones can be among them."""
    places = [kwargs["out"]] if "out" in kwargs else []
    if isinstance(func, torch._ops.OpOverload):
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name != "out":
                places.append(args[index] if index < len(args) else kwargs.get(argument.name))
    elif may_write(func):  # torch.nn.init passes its tensor by keyword; torch._foreach_mul_ takes a list
        places.append(args[0] if args else next(iter(kwargs.values()), None))
    return [item for place in places for item in (place if isinstance(place, (list, tuple)) else [place])]


def _write_through(written: list[Any], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation that writes parameters on float32 copies of their masters; see the module's docstring."""
    targets = [target for target in written if _is_chunked(target)]
    name = getattr(func, "__name__", "").partition(".")[0]
    for target in targets:
        _check_may_be_written(target, func, name)
    copies = _Float32Copies()
    places = {id(target): copies.place_of(target) for target in targets}
    narrow = {target.dtype for target in targets}
    as_they_are = {id(value) for value in written}

    def replaced(value: Any) -> Any:
        if id(value) in places:
            return places[id(value)]
        if not _is_chunked(value):
            is_narrow = isinstance(value, torch.Tensor) and value.dtype in narrow and id(value) not in as_they_are
            if is_narrow and "out" not in kwargs:  # some functions require one dtype
                return value.float()
            return _map_items(value, replaced)
        if value.dtype == value._patrickstar.dtype:
            return copies.place_of(value)
        value._patrickstar.uses.touch([value._patrickstar.id])
        return value

    with torch.no_grad():
        if func == _DATA_SET:
            _check_same_shape(targets[0], args[1])
            places[id(targets[0])].copy_(replaced(args[1]))
            result = None
        else:
            arguments = [replaced(value) for value in args]
            keywords = {key: replaced(value) for key, value in kwargs.items()}
            if "out" in keywords:  # in the result's dtype
                keywords["out"] = _map_tensors(keywords["out"], lambda out: _out_like(out, places, targets))
            result = func(*arguments, **keywords)
            if "out" in keywords:
                _copy_out(keywords["out"], kwargs["out"], places)
        if _copies_values(func, args, kwargs, name):
            copies.put_back()
        copies.write_back(dict.fromkeys(target._patrickstar for target in targets))
    if func != _DATA_SET:
        for target in targets:  # a backward that needs the old values raises
            increment_version(target)
    if func == _DATA_SET or name == "__setitem__" or result is None:
        return None
    return kwargs["out"] if "out" in kwargs else targets[0]


def _prepare_other_memory(target: Any, values: Any) -> None:
    """See the module's docstring.

    Raises:
        RuntimeError: ``values`` is memory of another parameter.
    """
    handle: ParamHandle = target._patrickstar
    if _is_chunked(values):
        if values._patrickstar is not handle:
            raise RuntimeError(
                f"{handle.name}.data would be the memory of {values._patrickstar.name}, whose chunk cannot be "
                "shared. Copy the values (p.data.copy_(q)); to tie two weights assign the parameter (p = q)"
            )
        return
    views = list(handle.views.values())
    if views:
        handle.uses.touch([handle.id])
        handle.views.clear()
    for view in views:
        former = view.clone()
        del view._patrickstar, view._patrickstar_impl
        view.__class__ = torch.Tensor
        view.data = former


def _copies_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> bool:
    """True if ``func`` copies existing values rather than computing new ones."""
    if name == "__setitem__":
        return isinstance(args[2], torch.Tensor)
    return func == _DATA_SET or "out" in kwargs or name in _COPYING


def _copy_masters(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies float32 masters of 16-bit parameters into float32 tensors between module calls, or averages them with
    these. Returns ``NotImplemented`` for other operations.
    """
    name = getattr(func, "__name__", "").partition(".")[0]
    if name not in _MIXING or len(args) < 2:
        return NotImplemented
    are_read = False

    def replaced(to: Any, source: Any) -> Any:
        nonlocal are_read
        if isinstance(to, (list, tuple)) and isinstance(source, (list, tuple)) and len(to) == len(source):
            return [replaced(*pair) for pair in zip(to, source, strict=True)]
        if not _takes_masters(to, source):
            return source
        are_read = True
        handle: ParamHandle = source._patrickstar
        return _part(handle.observer.read_values(handle, _C.ArrayKind.MASTER), source).to(to.device)

    source = replaced(args[0], args[1])
    return func(args[0], source, *args[2:], **kwargs) if are_read else NotImplemented


def _takes_masters(to: Any, source: Any) -> bool:
    if not _is_chunked(source) or not isinstance(to, torch.Tensor) or to.dtype not in (torch.float32, torch.float64):
        return False
    handle: ParamHandle = source._patrickstar
    autograd_sees = torch.is_grad_enabled() and (to.requires_grad or source.requires_grad)
    return handle.uses.is_between_calls and source.dtype == handle.dtype and not autograd_sees


class _Float32Copies:
    """Float32 copies of the parameters that one operation reads and writes, one per parameter."""

    def __init__(self) -> None:
        self._values: dict[ParamHandle, torch.Tensor] = {}
        self._before: dict[ParamHandle, torch.Tensor] = {}
        """Copies from before the operation, on the CPU: of parameters that the user has read, or that a module's call
        writes.
        """

    def place_of(self, target: Any) -> torch.Tensor:
        """The float32 values that correspond to ``target``, a parameter or a view of one, on its device."""
        handle: ParamHandle = target._patrickstar
        if target.dtype != handle.dtype:
            raise RuntimeError(
                f"{handle.name}: a view of its memory as {target.dtype} cannot be carried over to its float32 value; "
                "read or write the parameter itself"
            )
        if handle not in self._values:
            values = handle.observer.read_values(handle, _C.ArrayKind.MASTER)
            in_call = handle.observer.forward_writes.is_on or not handle.uses.is_between_calls
            if (in_call or handle.uses.was_read(handle.id)) and not target.is_meta:
                with _C.HostAllocations():
                    self._before[handle] = values if target.device.type != "cpu" else values.clone()
            self._values[handle] = values.to(target.device)
        return _part(self._values[handle], target)

    def put_back(self) -> None:
        """Restores masters after an operation that copied values; see [Note: put back]."""
        for handle, before in self._before.items():
            self._values[handle] = self._values[handle].cpu()
            handle.observer.overwritten.put_back(handle, before, self._values[handle])

    def write_back(self, handles: Iterable[ParamHandle]) -> None:
        """Writes the float32 copies to the masters of ``handles``."""
        for handle in handles:
            values, before = self._values[handle], self._before.get(handle)
            if before is not None:
                if torch.equal(values.cpu().view(torch.int32), before.view(torch.int32)):
                    continue
                handle.observer.overwritten.keep(handle, before)
                handle.observer.forward_writes.note(handle, before)
            handle.observer.write_values(handle, _C.ArrayKind.MASTER, values)


def _part(values: torch.Tensor, target: Any) -> torch.Tensor:
    """The part of a parameter's values that ``target`` shows, the parameter or a view of it."""
    if isinstance(target, nn.Parameter):
        return values
    return values.as_strided(target.shape, target.stride(), target.storage_offset() - target._patrickstar.offset)


def _check_may_be_written(target: Any, func: Callable[..., Any], name: str) -> None:
    handle: ParamHandle = target._patrickstar
    if name in _UNSUPPORTED_IN_PLACE:
        raise RuntimeError(
            f"{handle.name}: {name} would take the parameter out of its chunk; copy the values instead (param.copy_)"
        )
    by_init = getattr(func, "__module__", None) == "torch.nn.init"  # torch.nn.init switches gradients off itself, later
    if (
        torch.is_grad_enabled()
        and func != _DATA_SET
        and not by_init
        and (target.requires_grad or target.grad_fn is not None)
    ):
        raise RuntimeError(
            f"{handle.name}: a leaf parameter that requires grad is used in an in-place operation; use torch.no_grad()"
        )


def _check_same_shape(target: Any, values: torch.Tensor) -> None:
    if values.shape != target.shape:
        raise RuntimeError(
            f"{target._patrickstar.name}.data has shape {tuple(target.shape)}, the new tensor {tuple(values.shape)}; "
            "they must agree"
        )


def _map_items(value: Any, function: Callable[[Any], Any]) -> Any:
    return type(value)(function(item) for item in value) if isinstance(value, (list, tuple)) else value


def _map_tensors(value: Any, function: Callable[[Any], Any]) -> Any:
    return _map_items(value, function) if isinstance(value, (list, tuple)) else function(value)


def _out_like(out: torch.Tensor, places: dict[int, torch.Tensor], targets: list[Any]) -> torch.Tensor:
    """An ``out`` tensor in the parameter's dtype, which functions check, instead of its float32 copy."""
    for target in targets:
        if places[id(target)] is out:
            return torch.empty_like(out, dtype=target.dtype)
    return out


def _copy_out(computed: Any, given: Any, places: dict[int, torch.Tensor]) -> None:
    pairs = zip(computed, given, strict=True) if isinstance(given, (list, tuple)) else [(computed, given)]
    for values, target in pairs:
        if id(target) in places:
            places[id(target)].copy_(values)
