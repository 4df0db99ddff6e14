"""The ends of a session: its module becomes an ordinary one again, or is left without elements.

Every function here does nothing after the session's end.
"""

from __future__ import annotations

import logging

from patrickstar import _C
from patrickstar.machine.host_memory import available_bytes
from patrickstar.module.adoption import AdoptedParams
from patrickstar.ranks.distributed import RankGroups
from patrickstar.session.interrupts import deferred_signals
from patrickstar.session.rank_sync import failed_ranks
from patrickstar.session.session import Session
from patrickstar.sizes import show_size

logger = logging.getLogger("patrickstar")

_RESERVE_BYTES = 2**30  # for other allocations of the process during the close


def close_session(session: Session) -> None:
    """Restores the module (original dtypes and devices) and frees all chunks.

    The restored module may not fit, since an engine's values lie on device and host together and in fewer bytes. In
    float32, 30 B parameters take 114 GiB of host memory. All ranks check this before anything is changed. Chunks whose
    states rest on the host are released first, which makes room for the values of the others.

    All parts are closed even if one fails; the first failure is raised at the end.

    Raises:
        MemoryBudgetError: host memory does not hold the module's own parameters; nothing is changed.
    """
    if session.closed:
        return
    _ = session.runtime.closed  # raises in a fork of the process
    session.saves.wait()
    with deferred_signals(), session.thread.hold("close"):
        try:
            session.kept_plan.close()
            with session.guard("close"):
                held_bytes = session.runtime.report()["host_bytes"]
                lack = _lack_of_room(session.params, held_bytes, session.ranks)
                session.ranks.meet()
        except BaseException as error:
            abandon_session(session, error)  # the other ranks do not come
            raise
        if lack:
            raise _C.MemoryBudgetError(lack)
        session.closed = True
        try:
            with session.guard("close"):
                session.teardown.close()
        except BaseException as error:
            session.ranks.leave(error)
            raise
        session.ranks.close()
    session.saves.finish()


def discard_session(session: Session) -> None:
    """Frees all chunks without returning the values to the module."""
    if session.closed:
        return
    _ = session.runtime.closed  # raises in a fork of the process
    session.params.discard()
    close_session(session)


def revert_session(session: Session) -> None:
    """Closes an engine that was never used; parameters from the meta device return to it."""
    if session.closed:
        return
    with session.guard("close"):
        session.params.undo()
    close_session(session)


def abandon_session(session: Session, error: BaseException) -> None:
    """Closes the session because of ``error``, which the caller raises. Does nothing in a fork of the process.

    A single rank restores the module with its values. Of several ranks, the others receive ``error`` and are not
    awaited, and parameters in chunks are left without elements.
    """
    if session.closed or session.ranks.is_fork:
        return
    session.closed = True
    with deferred_signals():
        session.ranks.fail(error)
        try:
            session.params.discard() if len(session.ranks.members) > 1 else session.params.release()
            session.teardown.close()
        except Exception as other:
            logger.warning("closing the engine after %s failed as well: %s", type(error).__name__, other)
        session.ranks.leave(error)


def _lack_of_room(params: AdoptedParams, held_bytes: int, ranks: RankGroups) -> str:
    """Why host memory cannot hold the restored module; empty if it can. Collective over all ranks.

    Args:
        params: to be restored.
        held_bytes: host memory that this rank's chunks would free.
        ranks: that close together; each restores its module.
    """
    num_here = ranks.context.local_world_size
    needed = num_here * params.host_bytes_when_released()
    room = max(available_bytes() - _RESERVE_BYTES, 0) + held_bytes * num_here
    failure = _C.MemoryBudgetError(_text(needed, room)) if needed > room else None
    failed = failed_ranks(ranks, failure)
    return str(failure) if failure is not None else failed


def _text(needed: int, room: int) -> str:
    return (
        f"the module's own parameters take {show_size(needed)} of host memory when the engine closes, which has "
        f"{show_size(room)} for them once chunks are freed; nothing was changed: save or export what is wanted and "
        "call engine.discard(), which frees all without making the module whole, or build the module in 16 bits"
    )
