"""Going on with the ranks that are left, for a run (`ElasticRun`): copies after each step, and recoveries."""

from __future__ import annotations

import contextlib
import enum
import traceback
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from patrickstar.elastic.engine_protocol import RecoverableEngine
from patrickstar.elastic.orders import OrderBoard
from patrickstar.elastic.phases import Recovered
from patrickstar.elastic.rendezvous import Rendezvous
from patrickstar.elastic.survivors import RollCall


class Redundancy(enum.IntEnum):
    """Copies of each rank's shards on other ranks."""

    NONE = 0
    """After a lost rank the others need a checkpoint."""
    NEXT_RANK = 1
    """The next rank has them in host memory."""


class Survival:
    """One process's part; as long as its run.

    Args:
        engine: of the run.
        meeting: its rendezvous.
        user_state: of the run, by name.
        redundancy: which copies are kept.
    """

    def __init__(
        self, engine: RecoverableEngine, meeting: Rendezvous, user_state: Mapping[str, Any], redundancy: Redundancy
    ):
        self._engine, self._meeting = engine, meeting
        self._user_state, self.redundancy = user_state, redundancy
        self._call = RollCall(meeting, uuid.uuid4().hex, engine.rank_timeout_seconds)

    def beating(self) -> contextlib.AbstractContextManager[None]:
        """Context in which this process counts as living; as long as it is a rank."""
        return self._call.beating()

    def copy(self, num_ranks: int) -> None:
        """After each step and change of ranks: copies the shards of several ranks."""
        redundancy = self.redundancy if num_ranks > 1 else Redundancy.NONE
        self._engine.keep_copies(self._call.name, redundancy=redundancy, user_state=self._user_state)

    def copy_alone(self) -> None:
        """Before one rank gets others: copies its shards, so that it can go on alone."""
        self._engine.keep_copies(self._call.name, redundancy=self.redundancy, user_state=self._user_state)

    def recover(self, error: RuntimeError, number: int, options: Mapping[str, Any]) -> Recovered:
        """Goes on with the ranks that are left; see ``Engine.recover``."""
        traceback.clear_frames(error.__traceback__)  # they hold tensors of the broken step
        return self._engine.recover(
            error, call=self._call, number=number, user_state=self._user_state, rendezvous=self._meeting, **options
        )

    def refuse_resizes(self, first: int, reason: str) -> int:
        """Refuses orders from ``first`` on until one that is no resize, and the processes that wait to join for them.
        Returns the number of the next order. For the rank that leads.
        """
        following = OrderBoard(self._meeting.store).refuse_resizes(first, reason)
        if following > first:
            self._meeting.send_all_away(reason)
        return following


@contextlib.contextmanager
def ending(stack: contextlib.ExitStack) -> Iterator[None]:
    """Closes ``stack`` if the block raises: the process is no rank any more."""
    try:
        yield
    except BaseException:
        stack.close()
        raise
