"""The worker processes of one job, one per rank, on this machine.

Each is in a process session of its own, so that it ends with all that it started, and has a pipe for its events and a
file for what it prints. All have the variables of torchrun, whose agent's part the launcher takes: it serves torch's
store (``TORCHELASTIC_USE_AGENT_STORE``), on a port that the system chose.

    with WorkerGroup(job) as group:
        for worker in group.workers: ...        # whoever is left at the end is killed
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

import torch.distributed as dist

from benchmark.systems import Job
from patrickstar import _C
from patrickstar.planning.plan_cache import VARIABLE as PLAN_CACHE

_ROOT = Path(__file__).resolve().parents[2]
_LOG_TAIL_BYTES = 4000
_ADDRESS = "127.0.0.1"


@dataclasses.dataclass
class Worker:
    """The process of one rank."""

    rank: int
    process: subprocess.Popen
    events: BinaryIO
    """The pipe's end that the launcher reads."""
    output: BinaryIO
    """What it prints."""
    pending: bytes = b""
    """Of an event that has not come whole."""

    def read_events(self) -> list[bytes] | None:
        """The lines that have come since; None: the worker has closed the pipe. Waits for at least one byte."""
        data = os.read(self.events.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self.pending = (self.pending + data).split(b"\n")
        return lines

    def log_tail(self, num_bytes: int) -> str:
        """The end of what it printed."""
        self.output.seek(max(0, self.output.seek(0, os.SEEK_END) - num_bytes))
        return self.output.read().decode(errors="replace")

    def kill(self) -> None:
        """Ends it and what it started; returns at once."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


class WorkerGroup:
    """See the module's docstring."""

    def __init__(self, job: Job):
        self.workers: list[Worker] = []
        self._files = contextlib.ExitStack()
        self._store = dist.TCPStore(_ADDRESS, 0, is_master=True, wait_for_workers=False)
        try:
            for rank in range(job.ranks):
                self.workers.append(self._start(job, rank))
        except BaseException:
            self._close()
            raise

    def _start(self, job: Job, rank: int) -> Worker:
        read_end, write_end = os.pipe()
        events = self._files.enter_context(os.fdopen(read_end, "rb", buffering=0))
        output = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        try:
            process = subprocess.Popen(
                [*worker_command(job), str(write_end)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(write_end,),
                cwd=_ROOT,
                env=rank_environment(rank, job.ranks, self._store.port),
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        return Worker(rank, process, events, output)

    def log_tail(self, rank: int | None) -> str:
        """The end of what one rank printed, or for None what each did."""
        chosen = self.workers if rank is None else [self.workers[rank]]
        tails = [worker.log_tail(_LOG_TAIL_BYTES // len(chosen)) for worker in chosen]
        if len(tails) == 1:
            return tails[0]
        return "\n".join(f"rank {worker.rank}:\n{tail}" for worker, tail in zip(chosen, tails, strict=True))

    def kill(self) -> None:
        """Ends all workers; returns when their memory is free."""
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.process.wait()

    def _close(self) -> None:
        self.kill()
        self._files.close()

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()


def worker_command(job: Job) -> list[str]:
    """What each rank runs, but for the last argument, the file descriptor for events."""
    return [sys.executable, "-m", "benchmark.systems.worker", json.dumps(dataclasses.asdict(job))]


def rank_environment(rank: int, num_ranks: int, store_port: int) -> dict[str, str]:
    """This process's environment with what torchrun would set. Several ranks divide the cores for their OpenMP threads
    (PyTorch's CPU optimizers) evenly, where torchrun would give each one; ``OMP_NUM_THREADS`` of the user stays. No
    plan of an earlier run is used unless the user says so: first steps do not depend on what ran before.
    """
    environment = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", PLAN_CACHE: "0"}
    if num_ranks > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, _C.num_available_cpus() // num_ranks))
    return {
        **environment,
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": str(store_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
