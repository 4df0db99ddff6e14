"""Calls of a compiled region: its parameters are fetched, held, and appear as ordinary ones to compiled code.

Uses inside compiled code cannot be observed: modules have no hooks there, and no torch function is called. So a
`CompiledUnit` around each call of a region, outside of what Dynamo traces, opens one scope. The scope acquires all
parameters below the region and holds them to its end. No operation was seen to use them, so the backward of the call's
outputs, which is compiled too, acquires them again (``uncovered``, csrc/bind/scope_stack.h).

During the call the parameters have the class ``nn.Parameter``: Dynamo cannot trace a ``__torch_function__`` written in
C++, and its guards would distinguish the classes.

Compiled code tolerates that chunks move: it gets tensors and reads their addresses at each call. Parameters begin at
multiples of 128 elements, so alignment assumptions of one block's code hold for all blocks. Code with CUDA graphs
contains addresses and is refused (units.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.module.checkpointed_layers import checkpoints_itself, run_checkpointed
from patrickstar.module.chunked_parameter import ChunkedParameter, ChunkedView, become_view
from patrickstar.module.compiled.door import Door
from patrickstar.module.compiled.dynamo import unwrapped
from patrickstar.module.observer import Observer, find_tensors
from patrickstar.module.param_handle import ParamHandle


class CompiledUnit:
    """Replaces the function that a region's call runs (``_compiled_call_impl``).

    Args:
        module: the region.
        run: its compiled call.
        observer: receives uses.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any], observer: Observer):
        self.module = module
        self._inside = unwrapped(module)
        self._run = run
        self._uses = observer.uses
        self._params = [param for param in module.parameters() if isinstance(param, ChunkedParameter)]
        self._handles = [param._patrickstar for param in self._params]
        self._hook = self._make_hook(self._handles)
        self._by_storage = _by_storage(self._handles)
        self._doors: list[Door] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one call of the region. A checkpoint in it runs around it, where its activations are chosen
        (activations/checkpoint_calls.py).
        """
        if checkpoints_itself(self._inside):
            return run_checkpointed(self._inside, self._run_region, args, kwargs)
        return self._run_region(*args, **kwargs)

    def _run_region(self, *args: Any, **kwargs: Any) -> Any:
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
        """Runs a call whose arguments include parameters of other modules, or views of them."""
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
        """The doors of submodules, whose calls are part of this call."""
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
    """Turns views of parameters in ``output`` into ``ChunkedView``s, as an uncompiled call would."""
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
    """Chunked parameters and views of them, in tuples, lists and dicts."""
    if isinstance(value, (ChunkedParameter, ChunkedView)):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _chunked_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _chunked_in(item)
