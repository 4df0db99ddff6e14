"""Runs one system in a fresh process and gathers what it measured, however it ends."""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmark.systems import SYSTEMS, Job
from benchmark.systems.events import Outcome, peak_resident_bytes

_ROOT = Path(__file__).resolve().parents[2]
_POLL_SECONDS = 0.2
_LOG_TAIL_BYTES = 4000


@dataclasses.dataclass
class Run:
    """What came of one system."""

    job: Job
    outcome: Outcome = Outcome.TRAINED
    reason: str = ""
    """Why it did not train; empty if it did."""
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)
    version: str = ""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    init_seconds: float | None = None
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    """Of all steps, warm-up first."""
    losses: list[float] = dataclasses.field(default_factory=list)
    """Of the same steps."""
    device_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    report: dict[str, Any] = dataclasses.field(default_factory=dict)
    activity: dict[str, Any] | None = None
    """What ``gpu_activity.summarize`` returns, of one step more; None: not measured."""
    activity_reason: str = ""
    """Why it was not measured."""
    log_tail: str = ""
    """The end of what the worker printed, if it did not train."""

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
    def is_measured(self) -> bool:
        """Whether all timed steps are over."""
        return self.host_peak_bytes is not None and self.outcome is Outcome.TRAINED


class _WorkerEndedError(Exception):
    """The worker has to be, or was, ended."""

    def __init__(self, outcome: Outcome, reason: str):
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason


def run_system(job: Job, *, timeout_seconds: float, log: Callable[[str], None]) -> Run:
    """Runs ``job`` in a worker and returns what it measured; never raises for what goes wrong in the worker.

    Args:
        job: what to train.
        timeout_seconds: the worker is killed when it takes longer.
        log: gets a line per event, for people who wait.
    """
    run = Run(job)
    package = SYSTEMS[job.system].package
    if not SYSTEMS[job.system].is_installed:
        run.outcome, run.reason = Outcome.NOT_INSTALLED, f"there is no package {package!r}"
        return run
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile() as output, os.fdopen(read_end, "rb", buffering=0) as events:
        command = [sys.executable, "-m", "benchmark.systems.worker", json.dumps(dataclasses.asdict(job))]
        try:
            worker = subprocess.Popen(
                [*command, str(write_end)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(write_end,),
                cwd=_ROOT,
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        watch = _Watch(run, worker, time.monotonic() + timeout_seconds, timeout_seconds)
        try:
            watch.read(events.fileno(), log)
            _check_exit(run, worker.wait())
        except _WorkerEndedError as ended:
            _note_end(run, ended, watch.host_peak_bytes)
        finally:
            _kill(worker)
        if run.outcome is not Outcome.TRAINED:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            run.log_tail = output.read().decode(errors="replace")
    return run


class _Watch:
    """Reads a worker's events and keeps it within its limits."""

    def __init__(self, run: Run, worker: subprocess.Popen, deadline: float, timeout_seconds: float):
        self._run = run
        self._worker = worker
        self._deadline = deadline
        self._timeout_seconds = timeout_seconds
        job = run.job
        self._host_bytes = None if SYSTEMS[job.system].limits_host_itself else job.host_bytes
        self.host_peak_bytes = 0

    def read(self, events: int, log: Callable[[str], None]) -> None:
        """Until the worker closes the pipe."""
        pending = b""
        with selectors.DefaultSelector() as selector:
            selector.register(events, selectors.EVENT_READ)
            while True:
                ready = selector.select(_POLL_SECONDS)
                self._check_limits()
                if not ready:
                    continue
                data = os.read(events, 1 << 16)
                if not data:
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    _take(self._run, json.loads(line), log)

    def _check_limits(self) -> None:
        self.host_peak_bytes = max(self.host_peak_bytes, peak_resident_bytes(self._worker.pid))
        if self._host_bytes is not None and self.host_peak_bytes > self._host_bytes:
            reason = f"{self.host_peak_bytes} bytes of host memory, {self._host_bytes} are allowed"
            raise _WorkerEndedError(Outcome.OUT_OF_MEMORY, reason)
        if time.monotonic() > self._deadline:
            raise _WorkerEndedError(Outcome.TIMED_OUT, f"more than {self._timeout_seconds:g} s")


def _take(run: Run, event: dict[str, Any], log: Callable[[str], None]) -> None:
    """Adds an event to ``run``."""
    kind = event.pop("event")
    name = run.job.system
    if kind == "provenance":
        run.provenance = event
    elif kind == "initialised":
        run.init_seconds, run.version, run.settings = event["init_seconds"], event["version"], event["settings"]
        log(f"{name}: initialised in {run.init_seconds:.1f} s")
    elif kind == "step":
        stage = run.stage
        run.step_seconds.append(event["seconds"])
        run.losses.append(event["loss"])
        log(f"{name}: {stage}: {event['seconds']:.3f} s, loss {event['loss']:.4f}")
    elif kind == "measured":
        run.device_peak_bytes, run.host_peak_bytes = event["device_peak_bytes"], event["host_peak_bytes"]
        run.report = event["report"]
    elif kind == "profiled":
        run.activity = event
    elif kind == "not_profiled":
        run.activity_reason = event["reason"]
    else:
        raise _WorkerEndedError(Outcome(event["outcome"]), event["reason"])


def _check_exit(run: Run, exit_code: int) -> None:
    if exit_code == -signal.SIGKILL:
        raise _WorkerEndedError(Outcome.KILLED, "SIGKILL, as the host does when its memory is exhausted")
    if exit_code < 0:
        raise _WorkerEndedError(Outcome.KILLED, signal.Signals(-exit_code).name)
    if exit_code > 0 or not run.is_measured:
        raise _WorkerEndedError(Outcome.FAILED, f"exit status {exit_code}")


def _note_end(run: Run, ended: _WorkerEndedError, host_peak_bytes: int) -> None:
    """A worker that ends in the profiled step has measured all but that."""
    reason = f"{ended.reason} (in {run.stage})"
    if run.is_measured:
        run.activity_reason = reason
        return
    run.outcome, run.reason, run.host_peak_bytes = ended.outcome, reason, host_peak_bytes


def _kill(worker: subprocess.Popen) -> None:
    """The worker and what it started; waits until their memory is free."""
    if worker.poll() is None:
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
