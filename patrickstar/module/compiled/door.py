"""What a call of a module runs, and the door that calls from outside of a forward come through.

``nn.Module.__call__`` runs ``_compiled_call_impl`` where an instance has one: it is what ``Module.compile`` sets, and
what copies and pickles leave out. Compiled units (unit.py) stand there, and doors in front of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from patrickstar.module.compiled.dynamo import knowing_caller

_ATTRIBUTE = "_compiled_call_impl"
Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Door:
    """Stands where a module has the function that its call runs: a call from outside begins a forward.

    Args:
        module: whose calls come here.
        enter: runs one call: ``enter(run, args, kwargs)``, where ``run`` is the module's own call.
        note_caller: is told first what compiles the function that calls, if it is compiled (``knowing_caller``).
    """

    def __init__(self, module: nn.Module, enter: Call, note_caller: Callable[[Any], None]):
        self.module = module
        self.run: Callable[..., Any] | None = module.__dict__.get(_ATTRIBUTE)
        """What the call runs within; None: the module's own ``_call_impl``."""
        self._enter = enter
        self._note_caller = note_caller
        self._call = knowing_caller(self._pass)
        self.shut()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A call from outside, or from within a forward."""
        return self._call(*args, **kwargs)

    def _pass(self, caller: Any, *args: Any, **kwargs: Any) -> Any:
        if caller is not None:
            self._note_caller(caller)
        return self._enter(self.run or self.module._call_impl, args, kwargs)

    def open(self) -> None:
        """Calls go by the door: the module is an ordinary one to those who look."""
        _set(self.module, self.run)

    def shut(self) -> None:
        """Calls come through the door."""
        _set(self.module, self)


def get_call(module: nn.Module) -> Callable[..., Any] | None:
    """What a call of ``module`` runs, behind its door where it has one; None: its own ``_call_impl``."""
    call = module.__dict__.get(_ATTRIBUTE)
    return call.run if isinstance(call, Door) else call


def set_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Sets what a call of ``module`` runs, behind its door where it has one; None: its own ``_call_impl``."""
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
