"""Jobs of some ranks on this machine, each rank a fresh process: ``run_ranks`` starts them, ``work`` is what they run.

A job is a dataclass that travels as JSON. Rank 0 adds results as it comes to them, so that those before a failure stay.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from benchmark.systems.worker_group import rank_environment

_ROOT = Path(__file__).resolve().parent.parent
_GRACE_SECONDS = 5.0  # after the first rank that fails, for the others to say why they do
_LOG_TAIL_CHARACTERS = 4000


class RankJob(Protocol):
    """What all jobs have."""

    @property
    def ranks(self) -> int:
        """How many processes."""

    @property
    def results(self) -> str:
        """The file for lines of results; that of what rank i raised has ``.i`` behind its name."""


def run_ranks(
    module: str,
    job: RankJob,
    timeout_seconds: float,
    environment: Callable[[int, int, int], dict[str, str]] = rank_environment,
    guard: Callable[[], str | None] = lambda: None,
) -> tuple[list[dict[str, Any]], str | None]:
    """Starts a process of ``module`` for each rank and waits; none is left. What was added, and what went wrong or
    None. ``environment`` gives a process's, as ``rank_environment`` does; ``guard`` is asked many times a second for a
    reason to end them all.
    """
    reason = _run(module, job, timeout_seconds, environment, guard)
    results = Path(job.results)
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return [json.loads(line) for line in lines], reason


def _run(
    module: str,
    job: RankJob,
    timeout_seconds: float,
    environment: Callable[[int, int, int], dict[str, str]],
    guard: Callable[[], str | None],
) -> str | None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", module, json.dumps(dataclasses.asdict(job))]  # type: ignore[call-overload]
    processes: list[subprocess.Popen] = []
    output = Path(f"{job.results}.output")
    try:
        with output.open("wb") as log:
            for rank in range(job.ranks):
                processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        cwd=_ROOT,
                        env=environment(rank, job.ranks, store.port),
                        start_new_session=True,
                    )
                )
        is_done, reason = _wait(processes, timeout_seconds, guard)
        killed = [rank for rank, process in enumerate(processes) if process.poll() == -signal.SIGKILL]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if reason is None and all(process.returncode == 0 for process in processes):
        return None
    print(output.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL_CHARACTERS:], file=sys.stderr, flush=True)
    if reason is not None:
        return reason
    raised = [
        f"rank {rank}: {path.read_text(encoding='utf-8').splitlines()[0]}"
        for rank in range(job.ranks)
        if (path := Path(f"{job.results}.{rank}")).exists()
    ]
    # A rank that waits in vain for one without memory says so too.
    raised.sort(key=lambda text: "memory" not in text.lower())
    if raised:
        return raised[0]
    if killed:
        return f"rank {killed[0]} was ended by SIGKILL, as the host does when its memory is exhausted"
    for rank, process in enumerate(processes):
        if is_done and process.returncode not in (0, -signal.SIGKILL):
            return f"rank {rank} ended with {process.returncode}"
    return f"did not end within {timeout_seconds:g} s"


def _wait(
    processes: list[subprocess.Popen], timeout_seconds: float, guard: Callable[[], str | None]
) -> tuple[bool, str | None]:
    """Until all have ended, or some time after one has failed: True; False when the time is over before, or when the
    guard has a reason, which comes with it.
    """
    deadline, has_failed = time.monotonic() + timeout_seconds, False
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return True, None
        if (reason := guard()) is not None:
            return False, reason
        if any(codes) and not has_failed:
            deadline, has_failed = min(deadline, time.monotonic() + _GRACE_SECONDS), True
        time.sleep(0.05)
    return has_failed, None


def add_result(job: RankJob, found: dict[str, Any]) -> None:
    """Of rank 0, or of any process where lines say whose they are: a short line is added as a whole."""
    with Path(job.results).open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")


_Job = TypeVar("_Job", bound=RankJob)


def work(run: Callable[[_Job], None], kind: type[_Job]) -> None:
    """Runs the job of the command line; what it raises is kept for :func:`run_ranks`."""
    job = kind(**json.loads(sys.argv[1]))
    try:
        run(job)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".strip()
        Path(f"{job.results}.{os.environ['RANK']}").write_text(text, encoding="utf-8")
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # without waiting for ranks that wait for this one
