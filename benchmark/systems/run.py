"""What came of one job, put together from the events of its ranks."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

from benchmark.systems import Job
from benchmark.systems.events import Outcome


@dataclasses.dataclass
class Run:
    """What came of one job."""

    job: Job
    outcome: Outcome = Outcome.TRAINED
    reason: str = ""
    """Why it did not train; empty if it did."""
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)
    version: str = ""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    init_seconds: float | None = None
    """Of the rank that took longest."""
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    """Rank 0's, of all steps, warm-up first."""
    slowest_step_seconds: list[float] = dataclasses.field(default_factory=list)
    """Of the same steps, each of the rank that took longest."""
    losses: list[float] = dataclasses.field(default_factory=list)
    """Of the same steps, means over the ranks."""
    grad_norms: list[float | None] = dataclasses.field(default_factory=list)
    """Of the same steps, before clipping; None where nobody knows it."""
    device_peak_bytes: int | None = None
    """Of the rank that took most."""
    host_peak_bytes: int | None = None
    """Of all ranks together."""
    report: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Rank 0's."""
    activity: dict[str, Any] | None = None
    """What ``gpu_activity.summarize`` returns, of rank 0 in one step more; None: not measured."""
    activity_reason: str = ""
    """Why it was not measured."""
    log_tail: str = ""
    """The end of what the workers printed, if it did not train."""

    @property
    def stage(self) -> str:
        """How far it is."""
        num_steps = len(self.step_seconds)
        if self.init_seconds is None:
            return "the initialisation"
        if num_steps < self.job.warmup:
            return f"warm-up step {num_steps + 1}"
        if num_steps < self.job.warmup + self.job.steps:
            return f"timed step {num_steps - self.job.warmup + 1}"
        return "the profiled step"

    @property
    def num_clipped_steps(self) -> int | None:
        """In how many timed steps clipping acted; None: there was none, or it is not known."""
        norms = self.grad_norms[self.job.warmup :]
        if self.job.clipping <= 0 or not norms or None in norms:
            return None
        return sum(norm > self.job.clipping for norm in norms if norm is not None)

    @property
    def is_measured(self) -> bool:
        """Whether all timed steps are over, on every rank."""
        return self.host_peak_bytes is not None and self.outcome is Outcome.TRAINED


class WorkerEndedError(Exception):
    """A worker, or all of them, had to be ended or have ended."""

    def __init__(self, outcome: Outcome, reason: str, rank: int | None = None):
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason
        self.rank = rank
        """None: no rank in particular."""


class RankEvents:
    """Adds the events of all ranks to a run: ``initialised``, ``step`` and ``measured`` once every rank has sent its
    own, the others, which rank 0 alone sends, at once.
    """

    def __init__(self, run: Run, log: Callable[[str], None]):
        self._run = run
        self._log = log
        self._name = f"{run.job.system} on {run.job.ranks} ranks" if run.job.ranks > 1 else run.job.system
        self._pending = [collections.deque[dict[str, Any]]() for _ in range(run.job.ranks)]

    def take(self, rank: int, event: dict[str, Any]) -> None:
        """One event of one rank, in its order.

        Raises:
            WorkerEndedError: it says that the rank failed.
        """
        kind = event["event"]
        if kind == "failed":
            raise WorkerEndedError(Outcome(event["outcome"]), event["reason"], rank)
        if kind in ("initialised", "step", "measured"):
            self._pending[rank].append(event)
            while all(self._pending):
                self._merge([events.popleft() for events in self._pending])
        elif kind == "provenance":
            self._run.provenance = {key: value for key, value in event.items() if key != "event"}
        elif kind == "profiled":
            self._run.activity = {key: value for key, value in event.items() if key != "event"}
        elif kind == "not_profiled":
            self._run.activity_reason = event["reason"]
        else:
            raise ValueError(f"rank {rank} sent the event {kind!r}, which is not known")

    def _merge(self, events: list[dict[str, Any]]) -> None:
        """Takes the same event of all ranks."""
        run, first = self._run, events[0]
        if first["event"] == "initialised":
            run.init_seconds = max(event["init_seconds"] for event in events)
            run.version, run.settings = first["version"], first["settings"]
            self._log(f"{self._name}: initialised in {run.init_seconds:.1f} s")
        elif first["event"] == "step":
            stage = run.stage
            run.step_seconds.append(first["seconds"])
            run.slowest_step_seconds.append(max(event["seconds"] for event in events))
            run.losses.append(statistics.fmean(event["loss"] for event in events))
            run.grad_norms.append(first["grad_norm"])
            self._log(f"{self._name}: {stage}: {first['seconds']:.3f} s, loss {run.losses[-1]:.4f}")
        else:
            device_peaks = [event["device_peak_bytes"] for event in events if event["device_peak_bytes"] is not None]
            run.device_peak_bytes = max(device_peaks, default=None)
            run.host_peak_bytes = sum(event["host_peak_bytes"] for event in events)
            run.report = first["report"]
