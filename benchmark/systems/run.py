"""One job in fresh processes, and the figures that its ranks sent."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

from benchmark.launch import Outcome, RunFailedError, launch, rank_environment
from benchmark.systems import Job

_WORKER = "benchmark.systems.worker"


@dataclasses.dataclass
class Run:
    """Figures of one job. Lists have one entry per step, warm-up first."""

    job: Job
    outcome: Outcome = Outcome.TRAINED
    reason: str = ""
    """Why it did not train; empty if it did."""
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)
    version: str = ""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    init_seconds: float | None = None
    """Slowest rank."""
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    """Rank 0."""
    slowest_step_seconds: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    """Means over the ranks."""
    grad_norms: list[float | None] = dataclasses.field(default_factory=list)
    """Before clipping; None where it was not computed."""
    device_peak_bytes: int | None = None
    """The rank with the highest peak."""
    host_peak_bytes: int | None = None
    """Sum over all ranks."""
    report: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Rank 0."""
    activity: dict[str, Any] | None = None
    """Result of ``gpu_activity.profile_step`` for rank 0; None: not measured."""
    activity_reason: str = ""
    """Why it was not measured."""
    log_tail: str = ""
    """End of the processes' output, if the run did not train."""

    @property
    def stage(self) -> str:
        """The present part of the run."""
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
        """Timed steps in which clipping acted; None without clipping, or where norms are unknown."""
        norms = self.grad_norms[self.job.warmup :]
        if self.job.clipping <= 0 or not norms or None in norms:
            return None
        return sum(norm > self.job.clipping for norm in norms if norm is not None)

    @property
    def is_measured(self) -> bool:
        """True if all timed steps are over on every rank."""
        return self.host_peak_bytes is not None and self.outcome is Outcome.TRAINED


def run_system(
    job: Job,
    *,
    timeout_seconds: float,
    log: Callable[[str], None],
    guard: Callable[[], str | None] = lambda: None,
) -> Run:
    """Runs ``job`` in a process per rank. Failures of processes are reported in the result, never raised.

    Args:
        job: the work.
        timeout_seconds: the processes are killed when they take longer.
        log: called with a line per event.
        guard: called many times a second; a returned reason kills the processes.
    """
    run, spec = Run(job), job.spec
    if not spec.is_installed:
        run.outcome, run.reason = Outcome.NOT_INSTALLED, f"there is no package {spec.package!r}"
        return run
    if spec.max_ranks is not None and job.ranks > spec.max_ranks:
        run.outcome = Outcome.NOT_SUPPORTED
        run.reason = f"{job.ranks} ranks, but this benchmark runs it on at most {spec.max_ranks}"
        return run
    limit_bytes = None if spec.limits_host_itself else job.host_bytes
    host_peak_bytes = 0

    def check(host_bytes: int) -> str | None:
        nonlocal host_peak_bytes
        host_peak_bytes = host_bytes
        if limit_bytes is not None and host_bytes > limit_bytes:
            return f"{host_bytes} bytes of host memory, {limit_bytes} are allowed"
        return guard()

    failure = launch(
        _WORKER,
        job,
        timeout_seconds=timeout_seconds,
        take=_RankEvents(run, log).take,
        environment=lambda rank, ranks, port: {**spec.environment, **rank_environment(rank, ranks, port)},
        guard=check,
        # Rank 0 alone sends a profile. If its profile failed, the other ranks may wait for it without end.
        is_complete=lambda reading: run.is_measured and 0 not in reading,
    )
    if failure is None and not run.is_measured:
        failure = RunFailedError(Outcome.FAILED, "exit status 0")
    if failure is not None:
        _note(run, failure, host_peak_bytes)
    return run


def _note(run: Run, failure: RunFailedError, host_peak_bytes: int) -> None:
    """A failure in the profiled step costs the profile alone."""
    reason = f"{failure if run.job.ranks > 1 else failure.reason} (in {run.stage})"
    if run.is_measured:
        run.activity_reason = reason
        return
    run.outcome, run.reason, run.host_peak_bytes = failure.outcome, reason, host_peak_bytes
    run.log_tail = failure.log_tail


class _RankEvents:
    """Adds the ranks' events to a run.

    ``initialised``, ``step`` and ``measured`` are added once every rank has sent its own; rank 0 alone sends others.
    """

    def __init__(self, run: Run, log: Callable[[str], None]):
        self._run = run
        self._log = log
        self._name = f"{run.job.system} on {run.job.ranks} ranks" if run.job.ranks > 1 else run.job.system
        self._pending = [collections.deque[dict[str, Any]]() for _ in range(run.job.ranks)]

    def take(self, rank: int, event: dict[str, Any]) -> None:
        kind = event["event"]
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
