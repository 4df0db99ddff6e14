"""The interface of schedulers to the simulator and a real cluster."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from patrickstar.ones.jobs import Cluster, JobState
from patrickstar.ones.pools import Candidate, StateOn


@dataclasses.dataclass(frozen=True)
class Grant:
    """The allocation of one job."""

    gpus: tuple[int, ...]
    """Its GPUs, ascending; never empty."""
    batch_size: int
    """Its global batch, in samples."""
    gpu_type: str = ""
    """The type of these GPUs, in whose pool they are numbered. Policies that decide within a pool leave it empty."""


Allocation = Mapping[str, Grant]
"""Grants by job name; other jobs hold no GPU."""


class Foresight(enum.Enum):
    """A policy's knowledge of a job's remaining work, as in its paper."""

    NONE = "none"
    FITTED = "fitted"
    """An estimate from the loss so far, which improves with time."""
    EXACT = "exact"
    """The truth, which is unknown on a real cluster."""


class Sizes(enum.Enum):
    """Numbers of GPUs that a policy grants."""

    REQUESTED = "requested"
    ANY = "any"
    """Up to a job's maximum."""

    def most(self, requested_gpus: int, max_gpus: int) -> int:
        """The most that it grants to a job."""
        return requested_gpus if self is Sizes.REQUESTED else max_gpus


class Policy(Protocol):
    """A scheduler. It may keep state, and is called in order of time."""

    sizes: Sizes
    """For the choice among types of GPUs."""
    foresight: Foresight
    """Decides :attr:`JobState.remaining_samples`."""
    interval_s: float
    """Longest time between calls while there are jobs; infinity: only when a job arrives or ends."""

    def decide(self, now: float, jobs: Sequence[JobState], cluster: Cluster) -> Allocation:
        """The allocation from ``now`` (seconds) on; ``jobs`` are all that arrived and did not finish, by arrival."""

    def finished(self, now: float, state: JobState) -> None:
        """Called when a job has ended, with its last state."""


class Profiling(enum.Enum):
    """Measurements of a job before it starts, for free. The deployed scheduler makes none."""

    NONE = "none"
    EACH_TYPE = "each type"
    """A step on the fewest GPUs of each type, with the base batch. Sia does so at a job's arrival."""


@runtime_checkable
class TypesPolicy(Policy, Protocol):
    """A scheduler that also chooses among types of GPUs. Others decide within pools (:mod:`patrickstar.ones.pools`)."""

    profiling: Profiling
    """Measurements that the policy needs."""

    def decide_on_types(
        self, now: float, candidates: Sequence[Candidate], state_on: StateOn, pools: Mapping[str, Cluster]
    ) -> Allocation:
        """The allocation from ``now`` (seconds) on; ``candidates`` are all jobs, by arrival."""


class Memoryless:
    """Base of policies that learn nothing from finished jobs."""

    sizes = Sizes.ANY
    foresight = Foresight.NONE
    interval_s = float("inf")

    def finished(self, now: float, state: JobState) -> None:
        """Does nothing."""
