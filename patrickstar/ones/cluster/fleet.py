"""What a scheduler asks of those who run jobs: the seam between its decisions and Ray."""

from __future__ import annotations

import dataclasses
import enum
from typing import Protocol

from patrickstar.elastic import RunReport
from patrickstar.ones.cluster.submission import Submission


class Phase(enum.Enum):
    """Where the processes of a job are."""

    RUNNING = "running"
    CHANGING = "changing"
    """An order was given and is not carried out yet."""
    ENDED = "ended"
    """All processes have ended as they should."""
    STOPPED = "stopped"
    """They have, as they were ordered to, or GPUs and processes to start on were not there in time."""
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Status:
    """Of a job that was started."""

    phase: Phase
    num_ranks: int
    """That have a GPU, those that join included."""
    report: RunReport | None
    """None: its script has no elastic line, or has not come to its first step."""
    resize_s: float
    """Seconds that its last resize took; 0: there was none."""
    refusal: str = ""
    """Why the last order was refused, or nothing was started."""
    reason: str = ""
    """Of a failure: the end of what the process wrote."""


class Fleet(Protocol):
    """Runs jobs. What it runs outlives whoever asks."""

    def start(self, submission: Submission, num_ranks: int) -> None:
        """Starts processes of a job that has none; they go on from its checkpoint."""

    def resize(self, name: str, num_ranks: int) -> None:
        """Orders it; processes that are to join are started."""

    def stop(self, name: str) -> None:
        """Orders it to end with a checkpoint."""

    def status(self, name: str) -> Status | None:
        """None: nothing of it runs."""

    def remove(self, name: str) -> None:
        """Ends what is left of it, at once."""
