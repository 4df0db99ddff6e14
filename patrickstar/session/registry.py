"""The sessions that are open in this process: for functions that are given parameters and no engine.

Several may be open at once (teacher and student, policy and reference, two adversaries); a parameter belongs to one.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from patrickstar import _C

if TYPE_CHECKING:
    from patrickstar.engine.notebook import CellStatement
    from patrickstar.engine.session import Session


@dataclasses.dataclass
class Owner:
    """The owner of a session, for calls that close it or change its ranks."""

    made_by: CellStatement | None
    """The statement of a notebook's cell."""
    face: Callable[[], Any] | None = None
    """Gives the engine that was made of the session, as long as somebody has it; None before it is made."""
    keeps_ranks: str | None = None
    """Why its ranks cannot change, and what to do instead, where the host that made it says so."""


_sessions: list[weakref.ref[Session]] = []  # in the order of their opening
_lock = threading.RLock()  # of that list; a signal's handler may come in between


def note_open_session(session: Session) -> None:
    """``session`` is one of them from now on."""
    with _lock:
        _sessions.append(weakref.ref(session))


def open_sessions() -> list[Session]:
    """Those that are open, in the order of their opening."""
    with _lock:
        found = [session for session in (reference() for reference in _sessions) if session is not None]
        found = [session for session in found if not session.closed]
        _sessions[:] = [weakref.ref(session) for session in found]
    return found


def drop_unreachable_sessions() -> None:
    """Frees what engines hold that nobody can reach any more: engine, module and hooks refer to each other in
    circles.
    """
    if open_sessions():
        gc.collect()


def close_open_engine() -> None:
    """Closes all engines that are open in this process: their modules are ordinary ones again. For engines that no name
    is left of, such as one that was made in a notebook's cell which then raised.
    """
    for session in reversed(open_sessions()):
        session.closing.close()


def close_lost_engine(module: nn.Module) -> None:
    """Closes the engine that has parameters of ``module``, if nobody can reach it any more: what a notebook's name held
    that was bound anew, for example. Garbage was collected before. With several ranks it stays open: each would have to
    close its own.
    """
    for session in open_sessions():
        face = session.owner.face
        is_lost = face is not None and face() is None and len(session.ranks.members) == 1
        if is_lost and any(session.has_param(param) for param in module.parameters()):
            session.closing.close()


def find_session(param: nn.Parameter) -> Session | None:
    """The open session whose module has this parameter, or None."""
    return next((session for session in open_sessions() if session.has_param(param)), None)


def session_of(param: nn.Parameter) -> Session:
    """The open session whose module has this parameter.

    Raises:
        StateError: there is none.
    """
    session = find_session(param)
    if session is None and not open_sessions():
        raise _C.StateError("no engine is open in this process; call patrickstar.initialize first")
    if session is None:
        raise _C.StateError(
            f"a parameter of shape {tuple(param.shape)} belongs to no engine that is open in this process; give one of "
            "engine.module.parameters()"
        )
    return session
