"""The launcher of every benchmark with several processes: a fresh process per rank, which sends JSON lines.

Each process has torchrun's variables, a process session of its own, a pipe for its lines and a file for its output. The
launcher serves torch's store (``TORCHELASTIC_USE_AGENT_STORE``) on a free port, as torchrun's agent does. When a rank
fails, the others get two seconds to report failures of their own; then all are killed. The process's side is
``benchmark.ranks``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch.distributed as dist

from patrickstar import _C
from patrickstar.planning.plan_cache import VARIABLE as PLAN_CACHE

_ROOT = Path(__file__).resolve().parent.parent
_ADDRESS = "127.0.0.1"
_LOG_TAIL_BYTES = 4000
_POLL_SECONDS = 0.1
_FAILURE_GRACE_SECONDS = 2.0


class Outcome(enum.Enum):
    """How a run ended."""

    TRAINED = "trained"
    NOT_INSTALLED = "not installed"
    NOT_SUPPORTED = "not supported"
    OUT_OF_MEMORY = "out of memory"
    KILLED = "killed"
    TIMED_OUT = "timed out"
    FAILED = "failed"


class RunFailedError(Exception):
    """A process failed, or a limit ended all of them."""

    log_tail = ""
    """End of the output of the rank, or of all ranks where ``rank`` is None."""

    def __init__(self, outcome: Outcome, reason: str, rank: int | None = None):
        super().__init__(reason)
        self.outcome, self.reason, self.rank = outcome, reason, rank

    def __str__(self) -> str:
        return self.reason if self.rank is None else f"rank {self.rank}: {self.reason}"

    @property
    def distance_from_cause(self) -> int:
        """The rank with the least distance is at fault, of several that failed."""
        if self.outcome is Outcome.OUT_OF_MEMORY:
            return 0
        return 2 if self.reason.startswith("RankFailure:") else 1  # PatrickStar's error for another rank's failure


@dataclasses.dataclass
class _Worker:
    rank: int
    process: subprocess.Popen
    events: BinaryIO
    """The launcher's end of the pipe."""
    output: BinaryIO
    pending: bytes = b""
    """The beginning of a line whose end has not arrived."""

    def read_lines(self) -> list[bytes] | None:
        """Blocks until a byte arrives; None: the process has closed the pipe."""
        data = os.read(self.events.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self.pending = (self.pending + data).split(b"\n")
        return lines

    def check_exit(self) -> None:
        code = self.process.wait()
        if code == -signal.SIGKILL:
            reason = "SIGKILL, as the host does when its memory is exhausted"
            raise RunFailedError(Outcome.KILLED, reason, self.rank)
        if code < 0:
            raise RunFailedError(Outcome.KILLED, signal.Signals(-code).name, self.rank)
        if code > 0:
            raise RunFailedError(Outcome.FAILED, f"exit status {code}", self.rank)

    def log_tail(self, num_bytes: int) -> str:
        self.output.seek(max(0, self.output.seek(0, os.SEEK_END) - num_bytes))
        return self.output.read().decode(errors="replace")


def rank_environment(rank: int, num_ranks: int, store_port: int) -> dict[str, str]:
    """This process's environment and torchrun's variables.

    Several ranks share the cores evenly among their OpenMP threads, where torchrun would give each rank one thread. The
    user's own variables win. The plan cache is off unless the user sets it, so that first steps do not depend on
    earlier runs.
    """
    environment = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", PLAN_CACHE: "0"}
    if num_ranks > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, _C.num_available_cpus() // num_ranks))
    return {
        **environment, **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": _ADDRESS, "MASTER_PORT": str(store_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip


def worker_command(module: str, job: Any) -> list[str]:
    """The command of each rank without its last argument, the file descriptor for its lines."""
    return [sys.executable, "-m", module, json.dumps(dataclasses.asdict(job))]


def launch(
    module: str,
    job: Any,
    *,
    timeout_seconds: float,
    take: Callable[[int, dict[str, Any]], None],
    environment: Callable[[int, int, int], dict[str, str]] = rank_environment,
    guard: Callable[[int], str | None] = lambda host_bytes: None,
    is_complete: Callable[[set[int]], bool] = lambda reading: False,
) -> RunFailedError | None:
    """Runs ``python -m module JOB FD`` once per rank; no process outlives the call.

    Args:
        module: calls :func:`benchmark.ranks.work`.
        job: a dataclass with ``ranks``, the number of processes; each gets it as JSON.
        timeout_seconds: all are killed when they take longer.
        take: called with a rank and each line of it, in the rank's order.
        environment: of (rank, number of ranks, store's port).
        guard: called many times a second with the sum of the processes' peaks of resident memory; a returned reason
            kills all.
        is_complete: whether no more lines are needed from the ranks that have not closed their pipes.

    Returns:
        The failure at fault, or None.
    """
    store = dist.TCPStore(_ADDRESS, 0, is_master=True, wait_for_workers=False)
    workers: list[_Worker] = []
    with contextlib.ExitStack() as files:
        try:
            for rank in range(job.ranks):
                variables = environment(rank, job.ranks, store.port)
                workers.append(_start(rank, worker_command(module, job), variables, files))
            _watch(workers, timeout_seconds, take, guard, is_complete)
        except RunFailedError as failure:
            _kill(workers)
            failure.log_tail = _log_tail(workers, failure.rank)
            return failure
        finally:
            _kill(workers)
    return None


def _start(rank: int, command: list[str], environment: dict[str, str], files: contextlib.ExitStack) -> _Worker:
    read_end, write_end = os.pipe()
    events = files.enter_context(os.fdopen(read_end, "rb", buffering=0))
    output = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    try:
        process = subprocess.Popen(
            [*command, str(write_end)], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            pass_fds=(write_end,), cwd=_ROOT, env=environment, start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(write_end)
    return _Worker(rank, process, events, output)


def _watch(
    workers: list[_Worker],
    timeout_seconds: float,
    take: Callable[[int, dict[str, Any]], None],
    guard: Callable[[int], str | None],
    is_complete: Callable[[set[int]], bool],
) -> None:
    """Reads until all processes have closed their pipes, or the lines are complete; raises RunFailedError."""
    deadline, grace_deadline = time.monotonic() + timeout_seconds, float("inf")
    failures: dict[int, RunFailedError] = {}
    peaks = [0] * len(workers)
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.events, selectors.EVENT_READ, worker)
        while time.monotonic() < grace_deadline:
            reading = {key.data.rank for key in selector.get_map().values()}
            if not reading or is_complete(reading):
                break
            ready = selector.select(_POLL_SECONDS)
            for worker in workers:
                peaks[worker.rank] = max(peaks[worker.rank], peak_resident_bytes(worker.process.pid))
            if (reason := guard(sum(peaks))) is not None:
                raise RunFailedError(Outcome.OUT_OF_MEMORY, reason)
            if time.monotonic() > deadline:
                raise RunFailedError(Outcome.TIMED_OUT, f"more than {timeout_seconds:g} s")
            for key, _ in ready:
                try:
                    _read(key.data, selector, take)
                except RunFailedError as failure:
                    failures.setdefault(key.data.rank, failure)
                    grace_deadline = min(grace_deadline, time.monotonic() + _FAILURE_GRACE_SECONDS)
    if failures:
        raise min(failures.values(), key=lambda failure: failure.distance_from_cause)


def _read(worker: _Worker, selector: selectors.BaseSelector, take: Callable[[int, dict[str, Any]], None]) -> None:
    lines = worker.read_lines()
    if lines is None:
        selector.unregister(worker.events)
        worker.check_exit()
        return
    for line in lines:
        event = json.loads(line)
        if event["event"] == "failed":
            raise RunFailedError(Outcome(event["outcome"]), event["reason"], worker.rank)
        take(worker.rank, event)


def _log_tail(workers: list[_Worker], rank: int | None) -> str:
    chosen = workers if rank is None else [workers[rank]]
    tails = [worker.log_tail(_LOG_TAIL_BYTES // len(chosen)) for worker in chosen]
    if len(tails) == 1:
        return tails[0]
    return "\n".join(f"rank {worker.rank}:\n{tail}" for worker, tail in zip(chosen, tails, strict=True))


def _kill(workers: list[_Worker]) -> None:
    """Kills each process and its children; returns when their memory is free."""
    for worker in workers:
        if worker.process.poll() is None:
            os.killpg(worker.process.pid, signal.SIGKILL)
    for worker in workers:
        worker.process.wait()


def collect(module: str, job: Any, **options: Any) -> tuple[list[dict[str, Any]], str | None]:
    """:func:`launch`, with all lines in their order of arrival and the failure's text; its log goes to stderr."""
    lines: list[dict[str, Any]] = []
    failure = launch(module, job, take=lambda rank, line: lines.append(line), **options)
    if failure is None:
        return lines, None
    print(failure.log_tail, file=sys.stderr, flush=True)
    return lines, str(failure)


def peak_resident_bytes(process: int | str = "self") -> int:
    """Highest resident memory of a process so far, pinned memory included.

    Where the kernel does not record the peak: another process's present resident memory, or this one's ``ru_maxrss``.
    """
    fields = _memory_fields(f"/proc/{process}/status")
    for name in ("VmHWM", "VmRSS") if process != "self" else ("VmHWM",):
        if name in fields:
            return fields[name]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if process == "self" else 0


def others_resident_bytes() -> int:
    """Part of this process's resident memory that counts for the other processes sharing it: RSS less PSS.

    0 where the kernel does not report it. Takes seconds for a hundred GiB.
    """
    fields = _memory_fields("/proc/self/smaps_rollup")
    return fields["Rss"] - fields["Pss"] if "Rss" in fields and "Pss" in fields else 0


def _memory_fields(path: str) -> dict[str, int]:
    """Bytes by name, from lines ``name: 123 kB``; empty for a file that cannot be read."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = [line.split(":", 1) for line in lines if ":" in line and line.endswith(" kB")]
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}
