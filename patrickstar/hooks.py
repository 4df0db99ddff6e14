"""Module hooks: every module with parameters below it opens a scope around its forward.

The hooks look at no input and no output but to find autograd nodes, so any pytree, keyword or object passes through
them.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from patrickstar import _C
from patrickstar.chunked_parameter import ChunkedParameter
from patrickstar.observer import Observer


class ModuleHooks:
    """The hooks on one user's module, and what they have learned about who uses what."""

    def __init__(self, module: nn.Module, observer: Observer):
        self._observer: Observer | None = observer
        self._owned: dict[nn.Module, list[int]] = {}
        self._acquired: dict[nn.Module, list[int]] = {}
        self._until: dict[nn.Module, _C.HoldUntil] = {}
        self._touched_by: dict[nn.Module, set[int]] = {}
        self._touched: set[int] = set()
        self._handles: list[RemovableHandle] = []
        self._learning = True
        for child in module.modules():
            below = [param for param in child.parameters() if isinstance(param, ChunkedParameter)]
            if not below:
                continue
            owned = [p._patrickstar.id for p in child._parameters.values() if isinstance(p, ChunkedParameter)]
            inner = any(_has_chunked(grandchild) for grandchild in child.children())
            self._owned[child] = self._acquired[child] = list(dict.fromkeys(owned))
            self._until[child] = _C.HoldUntil.NEXT_EVENT if inner else _C.HoldUntil.SCOPE_END
            self._touched_by[child] = set()
            self._handles.append(child.register_forward_pre_hook(self._before_forward, prepend=True))
            # always_call: recomputation leaves a forward by an exception when it has what it needs.
            self._handles.append(child.register_forward_hook(self._after_forward, always_call=True))

    def __reduce__(self) -> Any:
        """A copy of the user's module (copy.deepcopy, pickle) is an ordinary module: its copied hooks do nothing."""
        return _detached_hooks, ()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._observer is not None:
            self._observer.open_scope(module, self._acquired[module], self._until[module])

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        scope = self._observer.close_scope(module, output) if self._observer is not None else None
        if scope is not None and self._learning:
            self._touched_by[module] |= scope.touched
            self._touched |= scope.touched

    def finish_learning(self, got_gradient: set[int]) -> None:
        """After the first whole step: modules no longer acquire what they were not seen to use.

        A parameter that no torch function was seen to touch, but that got a gradient (or is frozen), is used in a way
        that cannot be seen: its owner goes on acquiring it.
        """
        if not self._learning:
            return
        self._learning = False
        for module, owned in self._owned.items():
            if self._until[module] == _C.HoldUntil.NEXT_EVENT:
                self._acquired[module] = [i for i in owned if i not in self._touched and i in got_gradient]
                continue
            seen = self._touched_by[module]
            self._acquired[module] = [i for i in owned if i in seen or (i not in self._touched and i in got_gradient)]

    def remove(self) -> None:
        """Takes all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _detached_hooks() -> ModuleHooks:
    hooks = ModuleHooks.__new__(ModuleHooks)
    hooks._observer = None
    return hooks


def _has_chunked(module: nn.Module) -> bool:
    return any(isinstance(param, ChunkedParameter) for param in module.parameters())
