"""Runs one job in fresh processes and gathers what they measured, however they end.

The failure of one rank ends all: the others get a moment to fail on their own, since the first to say so is not always
the one at fault, and are then killed.
"""

from __future__ import annotations

import json
import selectors
import signal
import time
from collections.abc import Callable

from benchmark.systems import SYSTEMS, Job
from benchmark.systems.events import Outcome, peak_resident_bytes
from benchmark.systems.run import RankEvents, Run, WorkerEndedError
from benchmark.systems.worker_group import Worker, WorkerGroup

_POLL_SECONDS = 0.2
_FAILURE_GRACE_SECONDS = 2.0


def run_system(job: Job, *, timeout_seconds: float, log: Callable[[str], None]) -> Run:
    """Runs ``job`` in a worker per rank and returns what they measured; never raises for what goes wrong in a worker.

    Args:
        job: what to train.
        timeout_seconds: the workers are killed when they take longer.
        log: gets a line per event, for people who wait.
    """
    run = Run(job)
    spec = SYSTEMS[job.system]
    if not spec.is_installed:
        run.outcome, run.reason = Outcome.NOT_INSTALLED, f"there is no package {spec.package!r}"
        return run
    if spec.max_ranks is not None and job.ranks > spec.max_ranks:
        run.outcome = Outcome.NOT_SUPPORTED
        run.reason = f"{job.ranks} ranks, but this benchmark runs it on at most {spec.max_ranks}"
        return run
    with WorkerGroup(job) as group:
        watch = _Watch(run, group, timeout_seconds)
        try:
            watch.read(log)
        except WorkerEndedError as ended:
            _note_end(run, ended, watch.host_peak_bytes)
            if run.outcome is not Outcome.TRAINED:
                group.kill()
                run.log_tail = group.log_tail(ended.rank)
    return run


class _Watch:
    """Reads the workers' events and keeps them within their limits."""

    def __init__(self, run: Run, group: WorkerGroup, timeout_seconds: float):
        self._run = run
        self._group = group
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + timeout_seconds
        job = run.job
        self._host_limit_bytes = None if SYSTEMS[job.system].limits_host_itself else job.host_bytes
        self._peaks = [0] * job.ranks
        self._failures: dict[int, WorkerEndedError] = {}
        self._grace_deadline = float("inf")

    @property
    def host_peak_bytes(self) -> int:
        """Sum over the ranks of each one's highest resident memory so far; what they share counts several times."""
        return sum(self._peaks)

    def read(self, log: Callable[[str], None]) -> None:
        """Until all workers have closed their pipes, or nothing more is to come.

        Raises:
            WorkerEndedError: a worker failed, or a limit was exceeded.
        """
        events = RankEvents(self._run, log)
        with selectors.DefaultSelector() as selector:
            for worker in self._group.workers:
                selector.register(worker.events, selectors.EVENT_READ, worker)
            while not self._has_all(selector) and time.monotonic() < self._grace_deadline:
                ready = selector.select(_POLL_SECONDS)
                self._check_limits()
                for key, _ in ready:
                    if not self._read_from(key.data, events):
                        selector.unregister(key.fileobj)
        if self._failures:
            raise min(self._failures.values(), key=_distance_from_cause)
        if not self._run.is_measured:
            raise WorkerEndedError(Outcome.FAILED, "exit status 0")

    def _has_all(self, selector: selectors.BaseSelector) -> bool:
        """Nothing more is to come. Of a run that is measured rank 0 alone has more to tell; if its profile failed, the
        others may wait for it without end.
        """
        reading = {key.data.rank for key in selector.get_map().values()}
        return not reading or (self._run.is_measured and 0 not in reading)

    def _read_from(self, worker: Worker, events: RankEvents) -> bool:
        """False when nothing more comes from it."""
        lines = worker.read_events()
        try:
            if lines is None:
                self._check_exit(worker)
                return False
            for line in lines:
                events.take(worker.rank, json.loads(line))
        except WorkerEndedError as ended:
            self._failures.setdefault(worker.rank, ended)
            self._grace_deadline = min(self._grace_deadline, time.monotonic() + _FAILURE_GRACE_SECONDS)
        return lines is not None

    def _check_exit(self, worker: Worker) -> None:
        exit_code = worker.process.wait()
        if exit_code == -signal.SIGKILL:
            reason = "SIGKILL, as the host does when its memory is exhausted"
            raise WorkerEndedError(Outcome.KILLED, reason, worker.rank)
        if exit_code < 0:
            raise WorkerEndedError(Outcome.KILLED, signal.Signals(-exit_code).name, worker.rank)
        if exit_code > 0:
            raise WorkerEndedError(Outcome.FAILED, f"exit status {exit_code}", worker.rank)

    def _check_limits(self) -> None:
        for worker in self._group.workers:
            self._peaks[worker.rank] = max(self._peaks[worker.rank], peak_resident_bytes(worker.process.pid))
        if self._host_limit_bytes is not None and self.host_peak_bytes > self._host_limit_bytes:
            reason = f"{self.host_peak_bytes} bytes of host memory, {self._host_limit_bytes} are allowed"
            raise WorkerEndedError(Outcome.OUT_OF_MEMORY, reason)
        if time.monotonic() > self._deadline:
            raise WorkerEndedError(Outcome.TIMED_OUT, f"more than {self._timeout_seconds:g} s")


def _distance_from_cause(ended: WorkerEndedError) -> int:
    """Of several ranks that failed, the least is at fault; of equal ones the first."""
    if ended.outcome is Outcome.OUT_OF_MEMORY:
        return 0
    return 2 if ended.reason.startswith("RankFailure:") else 1  # that is PatrickStar's word for another rank's failure


def _note_end(run: Run, ended: WorkerEndedError, host_peak_bytes: int) -> None:
    """Workers that end in the profiled step have measured all but that."""
    several = run.job.ranks > 1 and ended.rank is not None
    reason = f"{f'rank {ended.rank}: ' if several else ''}{ended.reason} (in {run.stage})"
    if run.is_measured:
        run.activity_reason = reason
        return
    run.outcome, run.reason, run.host_peak_bytes = ended.outcome, reason, host_peak_bytes
