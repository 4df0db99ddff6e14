"""The call of a region: its parameters are brought in and held, and are ordinary ones to compiled code.

[Note: compiled units] Nobody sees when compiled code uses which parameter: modules inside have no hooks, no torch
function is called. So around each call of a region, outside of what Dynamo traces, a *unit* opens one scope that
acquires all parameters below the region and holds them to its end; none was seen in an operation, so the backward of
the call's outputs, which is compiled code too, acquires them again (``uncovered``, csrc/bind/scope_stack.h).

While the call runs, its parameters have the class ``nn.Parameter``: Dynamo traces no ``__torch_function__`` written in
C++, and guards would tell the two classes apart. Outside of it they say when they are used, as ever. That chunks move
is not seen in compiled code either: it gets tensors and reads their addresses at each call, and parameters begin at
multiples of 128 elements, so what one block's code takes for granted of alignment holds for every block's parameters.
Code with CUDA graphs has addresses in it and is refused (units.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.module.chunked_parameter import ChunkedParameter, ChunkedView, ParamHandle, become_view
from patrickstar.module.compiled.door import Door
from patrickstar.module.observer import Observer, find_tensors


class CompiledUnit:
    """Stands where a module has the function that its call runs (``_compiled_call_impl``).

    Args:
        module: the region.
        run: its compiled call.
        observer: is told about uses.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any], observer: Observer):
        self.module = module
        self._run = run
        self._uses = observer.uses
        self._params = [param for param in module.parameters() if isinstance(param, ChunkedParameter)]
        self._handles = [param._patrickstar for param in self._params]
        self._hook = self._make_hook(self._handles)
        self._by_storage = _by_storage(self._handles)
        self._doors: list[Door] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One call of the region."""
        given = list(_chunked_in((args, kwargs)))
        if given:
            return self._call_with_given(given, args, kwargs)
        output = self._call(args, kwargs)
        _mark_views(output, self._by_storage)
        return output

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._hook.before_forward(None, ())
        output = None
        chunked = [param for param in self._params if type(param) is ChunkedParameter]
        doors = self._doors_inside()
        try:
            for param in chunked:
                param.__class__ = nn.Parameter
            for door in doors:
                door.open()
            versions = [param._version for param in chunked]
            output = self._run(*args, **kwargs)
            if versions != [param._version for param in chunked]:
                self._refuse_writes(chunked, versions)
        finally:
            for door in doors:
                door.shut()
            for param in chunked:
                param.__class__ = ChunkedParameter
            self._hook.after_forward(None, (), output)
        return output

    def _call_with_given(self, given: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Among the arguments are parameters of other modules, or views of some."""
        handles = [tensor._patrickstar for tensor in given]
        classes = [type(tensor) for tensor in given]
        hook, output = self._make_hook(handles), None
        hook.before_forward(None, ())
        try:
            for tensor in given:
                tensor.__class__ = nn.Parameter if isinstance(tensor, ChunkedParameter) else torch.Tensor
            output = self._call(args, kwargs)
        finally:
            for tensor, its_class in zip(given, classes, strict=True):
                tensor.__class__ = its_class
            hook.after_forward(None, (), output)
        _mark_views(output, _by_storage([*self._handles, *handles]))
        return output

    def _make_hook(self, handles: list[ParamHandle]) -> _C.ModuleHook:
        return _C.ModuleHook(self._uses, list(dict.fromkeys(h.id for h in handles)), _C.HoldUntil.SCOPE_END)

    def _doors_inside(self) -> list[Door]:
        """Those of modules inside, whose calls are part of this one."""
        if self._doors is None:
            inside = [child for child in self.module.modules() if child is not self.module]
            calls = [child.__dict__.get("_compiled_call_impl") for child in inside]
            self._doors = [call for call in calls if isinstance(call, Door)]
        return self._doors

    def _refuse_writes(self, params: list[nn.Parameter], versions: list[int]) -> None:
        changed = next(p for p, version in zip(params, versions, strict=True) if p._version != version)
        raise RuntimeError(
            f"{changed._patrickstar.name} was changed in place within the compiled {type(self.module).__name__}, where "
            "the change does not reach its float32 value; change parameters outside of what is compiled"
        )


def _mark_views(output: Any, handles: dict[int, list[ParamHandle]]) -> None:
    """Views of parameters say when they are used, as they would if the call were not compiled."""
    for tensor in find_tensors(output):
        if type(tensor) is not torch.Tensor:
            continue
        candidates = handles.get(tensor.untyped_storage()._cdata)
        if candidates is not None:
            offset = tensor.storage_offset()
            own = (h for h in candidates if h.offset <= offset < h.offset + h.shape.numel())
            become_view(tensor, next(own, candidates[0]))


def _by_storage(handles: list[ParamHandle]) -> dict[int, list[ParamHandle]]:
    result: dict[int, list[ParamHandle]] = {}
    for handle in handles:
        result.setdefault(handle.storage, []).append(handle)
    return result


def _chunked_in(value: Any) -> Iterator[torch.Tensor]:
    """Parameters in chunks and views of them, in tuples, lists and dicts."""
    if isinstance(value, (ChunkedParameter, ChunkedView)):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _chunked_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _chunked_in(item)
