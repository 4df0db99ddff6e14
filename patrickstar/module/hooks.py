"""Module hooks: each module with parameters opens a scope around its forward.

The hooks search inputs and outputs only for autograd nodes, so any pytree, keyword or object passes through.
"""

from __future__ import annotations

import copyreg
import dataclasses
from collections.abc import Callable, Container
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from patrickstar import _C
from patrickstar.module.chunked_parameter import ChunkedParameter
from patrickstar.module.observer import Observer
from patrickstar.module.tiled_modules import inside_one_use, is_one_use


def _reduce_bound(method: Any) -> tuple[Callable[..., Any], tuple[Any, str]]:
    return getattr, (method.__self__, method.__func__.__name__)


# A module's copies and pickles include its hooks; nanobind's bound methods cannot be pickled by themselves.
copyreg.pickle(type(_C.ModuleHook().before_forward), _reduce_bound)


BeforeForward = Callable[[nn.Module, tuple[Any, ...]], None]


@dataclasses.dataclass(frozen=True)
class _Hooked:
    hook: _C.ModuleHook
    owned: list[int]
    """Ids of the module's own parameters; if a call is one use, also those of its submodules."""
    handles: tuple[RemovableHandle, ...]


class ModuleHooks:
    """Hooks of the user's module, and what the first step has shown about uses."""

    def __init__(
        self,
        module: nn.Module,
        observer: Observer,
        condition: Callable[[nn.Module, BeforeForward], BeforeForward] = lambda _, before_forward: before_forward,
    ):
        """``condition``: gives the hook that runs before a module's forward; it may leave out the one it is given."""
        self._module = module
        self._observer = observer
        self._condition = condition
        self._hooked: dict[nn.Module, _Hooked] = {}
        self.is_learning = True
        """True until the first whole step is over."""
        self.leave_out(())

    def leave_out(self, modules: Container[nn.Module]) -> None:
        """Installs hooks on all submodules except ``modules``, those inside a module whose call is one use, and those
        whose call does not read their parameters.

        A tiled module is one use (`TiledModules`): otherwise the chunks of its linear layers would be fetched once per
        tile.
        """
        within = inside_one_use(self._module)
        for child in self._module.modules():
            if child in modules or child in within or _postpones(child):
                self._remove_from(child)
            elif child not in self._hooked and _has_chunked(child):
                self._hooked[child] = self._add_to(child)

    def _add_to(self, child: nn.Module) -> _Hooked:
        is_whole = is_one_use(child)
        params = child.parameters() if is_whole else child._parameters.values()
        owned = [p._patrickstar.id for p in params if isinstance(p, ChunkedParameter)]
        inner = not is_whole and any(_has_chunked(grandchild) for grandchild in child.children())
        until = _C.HoldUntil.NEXT_EVENT if inner else _C.HoldUntil.SCOPE_END
        hook = _C.ModuleHook(self._observer.uses, list(dict.fromkeys(owned)), until)
        before = child.register_forward_pre_hook(self._condition(child, hook.before_forward), prepend=True)
        # always_call: recomputation leaves a forward by an exception once it has the tensors it needs.
        after = child.register_forward_hook(hook.after_forward, always_call=True)
        return _Hooked(hook, hook.params, (before, after))

    def _remove_from(self, child: nn.Module) -> None:
        hooked = self._hooked.pop(child, None)
        for handle in hooked.handles if hooked is not None else ():
            handle.remove()

    def finish_learning(self, got_gradient: set[int]) -> None:
        """Ends learning after the first whole step: modules stop acquiring parameters that they were not seen to use.

        A parameter that no torch function was seen to touch may still be used, for example by a custom kernel. If it
        got a gradient (or is frozen), its owner goes on acquiring it.
        """
        if not self.is_learning:
            return
        self.is_learning = False
        touched = {i for hooked in self._hooked.values() for i in hooked.hook.touched}
        for hooked in self._hooked.values():
            hook = hooked.hook
            seen = set() if hook.until == _C.HoldUntil.NEXT_EVENT else set(hook.touched)
            hook.finish_learning([i for i in hooked.owned if i in seen or (i not in touched and i in got_gradient)])

    def remove(self) -> None:
        """Removes the hooks from all modules."""
        for child in list(self._hooked):
            self._remove_from(child)


def _postpones(module: nn.Module) -> bool:
    """True if the module's ``forward`` was replaced by one that leaves its parameters to later operations."""
    return getattr(vars(module).get("forward"), "postpones_uses", False)


def _has_chunked(module: nn.Module) -> bool:
    return any(isinstance(param, ChunkedParameter) for param in module.parameters())
