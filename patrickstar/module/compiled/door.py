"""The function that a module's call runs, and the `Door` through which calls enter a forward.

``nn.Module.__call__`` runs ``_compiled_call_impl`` if an instance has one. ``Module.compile`` sets it; copies and
pickles leave it out. A `CompiledUnit` (unit.py) is installed there, and a `Door` in front of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.module.compiled.dynamo import knowing_caller

_ATTRIBUTE = "_compiled_call_impl"
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)  # PyTorch 2.6 has none
Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Door:
    """Replaces the function that a module's call runs: a call from outside begins a forward.

    Args:
        module: the module whose calls are routed here.
        enter: runs one call: ``enter(run, args, kwargs)``; ``run`` is the module's own call.
        note_caller: called first with the compiler of the calling function, if that is compiled (``knowing_caller``).
    """

    def __init__(self, module: nn.Module, enter: Call, note_caller: Callable[[Any], None]):
        self.module = module
        self.run: Callable[..., Any] | None = module.__dict__.get(_ATTRIBUTE)
        """The function behind the door; None: the module's own ``_call_impl``."""
        self._enter = enter
        self._note_caller = note_caller
        self._call = knowing_caller(self._pass)
        self.shut()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Passes on a call, from outside or from within a forward."""
        return self._call(*args, **kwargs)

    def _pass(self, caller: Any, *args: Any, **kwargs: Any) -> Any:
        if caller is not None:
            self._note_caller(caller)
        if _is_exporting():
            raise _C.StateError(
                "torch.export of an open engine's module, whose parameters are in chunks: export a copy "
                "(copy.deepcopy(engine.module)), or the module after engine.close()"
            )
        return self._enter(self.run or self.module._call_impl, args, kwargs)

    def open(self) -> None:
        """Removes the door; the module then appears to be an ordinary one."""
        _set(self.module, self.run)

    def shut(self) -> None:
        """Installs the door."""
        _set(self.module, self)


def get_call(module: nn.Module) -> Callable[..., Any] | None:
    """The function that a call of ``module`` runs, behind its door if it has one; None: its own ``_call_impl``."""
    call = module.__dict__.get(_ATTRIBUTE)
    return call.run if isinstance(call, Door) else call


def set_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Sets the function that a call of ``module`` runs, behind its door if it has one; None: its own ``_call_impl``."""
    door = module.__dict__.get(_ATTRIBUTE)
    if isinstance(door, Door):
        door.run = call
    else:
        _set(module, call)


def _set(module: nn.Module, call: Callable[..., Any] | None) -> None:
    if call is None:
        module.__dict__.pop(_ATTRIBUTE, None)
    else:
        module.__dict__[_ATTRIBUTE] = call
