"""The end of a session: its module becomes an ordinary one again, or is left without elements.

[Note: room to close] An engine's values lie on the device and the host together, in 16 bits and fewer bytes than a
module has: one of 30 B parameters in float32 takes 114 GiB of the host alone when it is whole again. Where that does
not fit, the system would end the process on the way. So it is asked before anything is changed, by all ranks, and
chunks whose states are on the host are given back first, which makes room for the others' values.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from patrickstar import _C
from patrickstar.engine.interrupts import deferred_signals
from patrickstar.engine.rank_sync import failed_ranks
from patrickstar.engine.teardown import Teardown
from patrickstar.machine.host_memory import available_bytes
from patrickstar.module.adoption import AdoptedParams
from patrickstar.ranks.distributed import RankGroups
from patrickstar.sizes import show_size

if TYPE_CHECKING:
    from patrickstar.engine.session import Session

logger = logging.getLogger("patrickstar")

_RESERVE_BYTES = 2**30  # for what a process takes meanwhile


class Closing:
    """The ways in which one session ends. Each does nothing after the end."""

    def __init__(self, session: Session):
        self._session = session
        self.is_over = False
        """The session has ended, or an end has begun and cannot go back."""
        self.teardown = Teardown()
        """Undoes the core, and what the session has put into the module. Empty between two cores."""

    def leave(self) -> None:
        """Ends a session that has no core any more: its ranks go on without it."""
        self.is_over = True

    def close(self) -> None:
        """Turns the module back into an ordinary one (original dtypes and devices) and frees all chunks.

        All of it is done also where a part fails; what failed first is raised at the end.

        Raises:
            MemoryBudgetError: host memory does not hold the module's own parameters; nothing is changed.
        """
        if self.is_over:
            return
        session = self._session
        _ = session.runtime.closed  # raises in a fork of the process
        with deferred_signals(), session.thread.hold("close"):
            try:
                session.kept_plan.close()
                with session.guard("close"):
                    held_bytes = session.runtime.report()["host_bytes"]
                    lack = _lack_of_room(session.params, held_bytes, session.ranks)
                    session.ranks.meet()
            except BaseException as error:
                self.abandon(error)  # the others do not come
                raise
            if lack:
                raise _C.MemoryBudgetError(lack)
            self.is_over = True
            try:
                with session.guard("close"):
                    self.teardown.close()
            except BaseException as error:
                session.ranks.leave(error)
                raise
            session.ranks.close()

    def discard(self) -> None:
        """Frees all chunks without giving the module its values back."""
        if self.is_over:
            return
        _ = self._session.runtime.closed  # raises in a fork of the process
        self._session.params.discard()
        self.close()

    def revert(self) -> None:
        """Closes an engine that was never used: what was on the meta device is there again."""
        if self.is_over:
            return
        with self._session.guard("close"):
            self._session.params.undo()
        self.close()

    def abandon(self, error: BaseException) -> None:
        """Closes what is there because of ``error``, which goes on: the module is an ordinary one again, with its
        values where this is the only rank. Of several the others are told of ``error`` and not waited for, and
        parameters that were moved into chunks are left without elements. Nothing in a fork of the process.
        """
        session = self._session
        if self.is_over or session.ranks.is_fork:
            return
        self.is_over = True
        with deferred_signals():
            session.ranks.fail(error)
            try:
                session.params.discard() if len(session.ranks.members) > 1 else session.params.release()
                self.teardown.close()
            except Exception as other:
                logger.warning("closing the engine after %s failed as well: %s", type(error).__name__, other)
            session.ranks.leave(error)


def _lack_of_room(params: AdoptedParams, held_bytes: int, ranks: RankGroups) -> str:
    """Reason why the module cannot be whole again; empty if it can. All ranks must ask.

    Args:
        params: what would be given back.
        held_bytes: of the host, which this rank's chunks have and would free.
        ranks: those that close together; each makes its module whole.
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
