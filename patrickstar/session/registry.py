"""The open sessions of this process, for functions that take parameters and no engine.

Several may be open at once (teacher and student, policy and reference, two adversaries). A parameter belongs to one.
"""

from __future__ import annotations

import gc
import threading
import weakref

from torch import nn

from patrickstar import _C
from patrickstar.session.closing import close_session
from patrickstar.session.session import Session

_sessions: list[weakref.ref[Session]] = []  # in the order of their opening
_num_opened = 0
_lock = threading.RLock()  # guards both; reentrant, since a signal handler may run in between


def note_open_session(session: Session) -> None:
    """Adds ``session``."""
    global _num_opened
    with _lock:
        _sessions.append(weakref.ref(session))
        _num_opened += 1


def num_opened_sessions() -> int:
    """Sessions that this process has opened so far, including closed ones."""
    return _num_opened


def open_sessions() -> list[Session]:
    """The open sessions in the order of their opening."""
    with _lock:
        found = [session for session in (reference() for reference in _sessions) if session is not None]
        found = [session for session in found if not session.closed]
        _sessions[:] = [weakref.ref(session) for session in found]
    return found


def drop_unreachable_sessions() -> None:
    """Frees the memory of unreachable engines. Engine, module and hooks form reference cycles."""
    if open_sessions():
        gc.collect()


def close_open_engine() -> None:
    """Closes all open engines of this process; their modules are ordinary ones again.

    Needed for an engine that no name refers to, such as one made in a notebook's cell that then raised.
    """
    for session in reversed(open_sessions()):
        close_session(session)


def close_lost_engine(module: nn.Module) -> None:
    """Closes the engine that has parameters of ``module``, if the engine is unreachable.

    A notebook's name that was rebound leaves such an engine. The caller has collected garbage. An engine of several
    ranks stays open, since each rank would have to close its own.
    """
    for session in open_sessions():
        face = session.owner.face
        is_lost = face is not None and face() is None and len(session.ranks.members) == 1
        if is_lost and any(session.has_param(param) for param in module.parameters()):
            close_session(session)


def find_session(param: nn.Parameter) -> Session | None:
    """The open session whose module has this parameter, or None."""
    return next((session for session in open_sessions() if session.has_param(param)), None)


def session_of(param: nn.Parameter) -> Session:
    """The open session whose module has this parameter.

    Raises:
        StateError: none has it.
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
