"""The session that is open in this process: for functions that are given parameters and no engine.

One engine is open at a time (``core_setup.check_no_open_engine``), so there is at most one.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from patrickstar import _C

if TYPE_CHECKING:
    from patrickstar.engine.session import Session

_session: weakref.ReferenceType[Session] | None = None


def note_open_session(session: Session) -> None:
    """``session`` is the one from now on."""
    global _session
    _session = weakref.ref(session)


def find_open_session() -> Session | None:
    """The open session, or None."""
    session = _session() if _session is not None else None
    return None if session is None or session.closed else session


def close_open_engine() -> None:
    """Closes the engine that is open in this process, if there is one: its module is an ordinary one again. For an
    engine that no name is left of, such as one that was made in a notebook's cell which then raised.
    """
    session = find_open_session()
    if session is not None:
        session.close()


def open_session() -> Session:
    """The open session.

    Raises:
        StateError: there is none.
    """
    session = find_open_session()
    if session is None:
        raise _C.StateError("no engine is open in this process; call patrickstar.initialize first")
    return session
