"""What the simulator and a real cluster ask of a scheduler."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Protocol

from patrickstar.ones.jobs import Cluster, JobState


@dataclasses.dataclass(frozen=True)
class Grant:
    """What one job gets."""

    gpus: tuple[int, ...]
    """Its GPUs, ascending; never empty."""
    batch_size: int
    """Its global batch, in samples."""


Allocation = Mapping[str, Grant]
"""Grants by name of job; a job that is not in it holds no GPU."""


class Foresight(enum.Enum):
    """What a policy is told of the work that a job has left, as in the paper that it comes from."""

    NONE = "none"
    FITTED = "fitted"
    """An estimate from the loss so far, which is wrong at first and better later."""
    EXACT = "exact"
    """The truth, which no real cluster has."""


class Policy(Protocol):
    """A scheduler. It may keep state, and is asked in the order of time."""

    foresight: Foresight
    """Decides :attr:`JobState.remaining_samples`."""
    interval_s: float
    """It is asked at least so often while there are jobs; infinity: only when a job comes or ends."""

    def decide(self, now: float, jobs: Sequence[JobState], cluster: Cluster) -> Allocation:
        """The allocation from ``now`` (seconds) on; ``jobs`` are all that arrived and did not finish, by arrival."""

    def finished(self, now: float, state: JobState) -> None:
        """Hears that a job has ended, with its last state."""


class Memoryless:
    """For policies that learn nothing of finished jobs."""

    foresight = Foresight.NONE
    interval_s = float("inf")

    def finished(self, now: float, state: JobState) -> None:
        """Forgets it."""
