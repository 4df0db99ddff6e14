"""The interface between a scheduler's decisions and the system that runs jobs (Ray)."""

from __future__ import annotations

import dataclasses
import enum
from typing import Protocol

from patrickstar.elastic import RunReport
from patrickstar.ones.cluster.submission import Submission


class JobPhase(enum.Enum):
    """JobPhase of a job's processes."""

    RUNNING = "running"
    CHANGING = "changing"
    """An order was given and is not carried out yet."""
    ENDED = "ended"
    """All processes have ended normally."""
    STOPPED = "stopped"
    """All processes have ended on an order, or GPUs and processes were not available in time."""
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Status:
    """Status of a started job."""

    phase: JobPhase
    num_ranks: int
    """Ranks with a GPU, including joining ones."""
    report: RunReport | None
    """None if its script is not elastic, or has not made a step."""
    resize_s: float
    """Seconds of its last resize; 0 without one."""
    refusal: str = ""
    """Why the last order was refused, or nothing was started."""
    reason: str = ""
    """For a failure: the end of the process's output."""
    gpu_type: str = ""
    """The type of its GPUs; empty: unknown."""
    num_lost: int = 0
    """Ranks that were lost since its start, without which it goes on."""


class Fleet(Protocol):
    """Runs jobs, which outlive the caller."""

    def start(self, submission: Submission, num_ranks: int, global_batch: int) -> None:
        """Starts processes of a job that has none, on GPUs of the submission's type. They continue from its checkpoint,
        with this batch.
        """

    def resize(self, name: str, num_ranks: int, global_batch: int) -> None:
        """Orders ranks and a batch, and starts joining processes."""

    def stop(self, name: str) -> None:
        """Orders the job to end with a checkpoint."""

    def status(self, name: str) -> Status | None:
        """The job's status; None if nothing of it runs."""

    def remove(self, name: str) -> None:
        """Ends all remaining processes at once."""
