"""The interface of schedulers to the simulator and a real cluster."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Protocol

from patrickstar.ones.jobs import Cluster, JobState


@dataclasses.dataclass(frozen=True)
class Grant:
    """The allocation of one job."""

    gpus: tuple[int, ...]
    """Its GPUs, ascending; never empty."""
    batch_size: int
    """Its global batch, in samples."""


Allocation = Mapping[str, Grant]
"""Grants by job name; other jobs hold no GPU."""


class Foresight(enum.Enum):
    """A policy's knowledge of a job's remaining work, as in its paper."""

    NONE = "none"
    FITTED = "fitted"
    """An estimate from the loss so far, which improves with time."""
    EXACT = "exact"
    """The truth, which is unknown on a real cluster."""


class Policy(Protocol):
    """A scheduler. It may keep state, and is called in order of time."""

    foresight: Foresight
    """Decides :attr:`JobState.remaining_samples`."""
    interval_s: float
    """Longest time between calls while there are jobs; infinity: only when a job arrives or ends."""

    def decide(self, now: float, jobs: Sequence[JobState], cluster: Cluster) -> Allocation:
        """The allocation from ``now`` (seconds) on; ``jobs`` are all that arrived and did not finish, by arrival."""

    def finished(self, now: float, state: JobState) -> None:
        """Called when a job has ended, with its last state."""


class Memoryless:
    """Base of policies that learn nothing from finished jobs."""

    foresight = Foresight.NONE
    interval_s = float("inf")

    def finished(self, now: float, state: JobState) -> None:
        """Does nothing."""
