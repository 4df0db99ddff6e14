"""Module hooks: every module with parameters below it opens a scope around its forward.

The hooks look at no input and no output but to find autograd nodes, so any pytree, keyword or object passes through
them.
"""

from __future__ import annotations

from torch import nn
from torch.utils.hooks import RemovableHandle

from patrickstar import _C
from patrickstar.chunked_parameter import ChunkedParameter
from patrickstar.observer import Observer


class ModuleHooks:
    """The hooks on one user's module, and what they have learned about who uses what."""

    def __init__(self, module: nn.Module, observer: Observer):
        self._hooks: list[tuple[_C.ModuleHook, list[int]]] = []
        """Each with what its module owns."""
        self._handles: list[RemovableHandle] = []
        self.is_learning = True
        """Whether the first whole step is not over."""
        for child in module.modules():
            if not _has_chunked(child):
                continue
            owned = [p._patrickstar.id for p in child._parameters.values() if isinstance(p, ChunkedParameter)]
            inner = any(_has_chunked(grandchild) for grandchild in child.children())
            until = _C.HoldUntil.NEXT_EVENT if inner else _C.HoldUntil.SCOPE_END
            hook = _C.ModuleHook(observer.uses, list(dict.fromkeys(owned)), until)
            self._hooks.append((hook, hook.params))
            self._handles.append(child.register_forward_pre_hook(hook.before_forward, prepend=True))
            # always_call: recomputation leaves a forward by an exception when it has what it needs.
            self._handles.append(child.register_forward_hook(hook.after_forward, always_call=True))

    def finish_learning(self, got_gradient: set[int]) -> None:
        """After the first whole step: modules no longer acquire what they were not seen to use.

        A parameter that no torch function was seen to touch, but that got a gradient (or is frozen), is used in a way
        that cannot be seen: its owner goes on acquiring it.
        """
        if not self.is_learning:
            return
        self.is_learning = False
        touched = {i for hook, _ in self._hooks for i in hook.touched}
        for hook, owned in self._hooks:
            seen = set() if hook.until == _C.HoldUntil.NEXT_EVENT else set(hook.touched)
            hook.finish_learning([i for i in owned if i in seen or (i not in touched and i in got_gradient)])

    def remove(self) -> None:
        """Takes all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _has_chunked(module: nn.Module) -> bool:
    return any(isinstance(param, ChunkedParameter) for param in module.parameters())
