"""Forward and backward of several systems beside each other, each in fresh processes (``tensor2d``, ``sequence``).

A case is a module of this package. Its ``SYSTEMS`` maps names to openers: a context manager of (job, size, device) that
yields :class:`Passes`. The worker is ``python -m benchmark.passes JOB FD``; rank 0 sends one line per size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from benchmark.common import provenance
from benchmark.launch import collect
from benchmark.ranks import EventWriter, RankPlace, training_device, work
from benchmark.systems.gpu_activity import profile_step


@dataclasses.dataclass(frozen=True)
class Job:
    case: str
    """Module of this package."""
    system: str
    """A key of the module's ``SYSTEMS``."""
    ranks: int
    sizes: list[int]
    """Arguments of the opener, one measurement each."""
    options: dict[str, Any]
    """The case's own, such as the number of heads."""
    dtype: str
    warmup: int
    iterations: int
    is_profiled: bool


@dataclasses.dataclass
class Passes:
    """Forward and backward of one system on this rank."""

    forward: Callable[[], torch.Tensor]
    backward: Callable[[torch.Tensor], Any]
    results: Callable[[torch.Tensor], Iterable[Iterable[torch.Tensor]]]
    """From backward's result to groups of tensors, output first. Each group has one norm over all ranks."""
    labels: dict[str, Any] = dataclasses.field(default_factory=dict)
    """For the row, such as the mesh."""


Opener = Callable[[Job, int, torch.device], contextlib.AbstractContextManager[Passes]]


def add_arguments(parser: Any, systems: Iterable[str], default: list[str]) -> None:
    parser.add_argument("--systems", nargs="+", choices=systems, default=default, metavar="NAME")
    parser.add_argument("--ranks", type=int, default=2, help="each with a GPU of its own")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--warmup", type=int, default=3, help="iterations before the timed ones")
    parser.add_argument("--iterations", type=int, default=10, help="timed ones, in each round")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="per system and round")


def run_systems(
    args: Any,
    case: str,
    *,
    sizes: list[int],
    options: dict[str, Any],
    ranks_of: Callable[[str], int],
    rounds: int = 1,
    is_profiled: bool = False,
) -> tuple[list[dict[str, Any]], list[dict[str, str]], dict[str, Any]]:
    """Runs the systems of ``args`` in turn, ``rounds`` times; a failed system is not run again.

    Returns:
        A row per system and size with the times of all rounds, the failures with their reasons, and the settings for
        the record.
    """
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    failures: dict[str, str] = {}
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    for _ in range(rounds):
        for system in dict.fromkeys(args.systems):
            if system in failures:
                continue
            job = Job(
                case, system, ranks_of(system), sorted(set(sizes)), options, args.dtype, args.warmup, args.iterations,
                is_profiled,
            )  # fmt: skip
            if device_type == "cuda" and torch.cuda.device_count() < job.ranks:
                lines, reason = [], f"needs {job.ranks} GPUs, there is {torch.cuda.device_count()}; give --ranks"
            else:
                lines, reason = collect("benchmark.passes", job, timeout_seconds=args.timeout)
            for line in lines:
                found.setdefault((system, line["size"]), []).append(line)
                text = f"{system}, {line['size']}: {statistics.median(line['seconds']) * 1e3:.2f} ms"
                print(text, file=sys.stderr, flush=True)
            if reason is not None:
                failures[system] = reason
                print(f"{system}: {reason}", file=sys.stderr, flush=True)
    rows = [_row(system, ranks_of(system), parts) for (system, _), parts in found.items()]
    for row in rows:
        first = next(peer for peer in rows if peer["size"] == row["size"])
        row["gap"] = max(abs(own - other) / other for own, other in zip(row["norms"], first["norms"], strict=True))
    settings = {
        "device_type": device_type, "dtype": args.dtype, "warmup": args.warmup, "iterations": args.iterations,
        **options, **provenance(),
    }  # fmt: skip
    return rows, [{"system": system, "reason": reason} for system, reason in failures.items()], settings


def _row(system: str, ranks: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [one for part in parts for one in part["seconds"]]
    profiles = [part["profile"] for part in parts if part["profile"] is not None]
    peaks = [part["peak_bytes"] for part in parts if part["peak_bytes"] is not None]
    median = statistics.median(seconds)
    return {
        "system": system,
        "ranks": ranks,
        "size": parts[0]["size"],
        **parts[0]["labels"],
        "seconds": seconds,
        "median_seconds": median,
        "round_medians": [statistics.median(part["seconds"]) for part in parts],
        "median_forward_seconds": statistics.median(one for part in parts for one in part["forward_seconds"]),
        "exposed_seconds": median - min(one["computing_seconds"] for one in profiles) if profiles else None,
        "collectives_only_seconds": min(one["collectives_only_seconds"] for one in profiles) if profiles else None,
        "profile": profiles[-1] if profiles else None,
        "peak_bytes": max(peaks, default=None),
        "norms": parts[0]["norms"],
    }


def timed_passes(passes: Passes, device: torch.device, iterations: int) -> list[tuple[float, float]]:
    """Seconds of forward, and of forward and backward. On a GPU the host runs ahead, as in training."""
    marks: list[list[Any]] = []

    def mark() -> Any:
        if device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    for _ in range(iterations):
        begin = mark()
        out = passes.forward()
        between = mark()
        passes.backward(out)
        del out
        marks.append([begin, between, mark()])
    if device.type == "cpu":
        return [(between - begin, end - begin) for begin, between, end in marks]
    torch.cuda.synchronize()
    return [(begin.elapsed_time(between) / 1e3, begin.elapsed_time(end) / 1e3) for begin, between, end in marks]


def measure(job: Job, passes: Passes, device: torch.device) -> dict[str, Any]:
    """Times on the slowest rank, the largest peak of memory, rank 0's profile, and norms over all ranks."""
    is_cuda = device.type == "cuda"
    timed_passes(passes, device, job.warmup)
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if job.ranks > 1:
        dist.barrier()
    times = torch.tensor(timed_passes(passes, device, job.iterations), dtype=torch.float64, device=device)
    peak = torch.tensor(torch.cuda.max_memory_allocated() if is_cuda else 0, device=device)

    def profiled() -> None:
        passes.backward(passes.forward())
        torch.cuda.synchronize()

    profile = profile_step(profiled) if is_cuda and job.is_profiled else None
    groups = passes.results(passes.forward())
    squares = torch.stack([
        torch.stack([torch.linalg.vector_norm(part.detach(), dtype=torch.float32) ** 2 for part in group]).sum()
        for group in groups
    ])  # fmt: skip
    if job.ranks > 1:
        dist.all_reduce(times, dist.ReduceOp.MAX)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        dist.all_reduce(squares)
    forward, both = times.t().tolist()
    return {
        "labels": passes.labels, "forward_seconds": forward, "seconds": both,
        "peak_bytes": int(peak) if is_cuda else None, "profile": profile, "norms": squares.sqrt().tolist(),
    }  # fmt: skip


def _run(job: Job, place: RankPlace, events: EventWriter) -> None:
    device = training_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if job.ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    opener: Opener = importlib.import_module(f"benchmark.{job.case}").SYSTEMS[job.system]
    for size in job.sizes:
        with opener(job, size, device) as passes:
            found = measure(job, passes, device)
        del passes  # the next size's memory is its own
        if place.rank == 0:
            events.send("measured", size=size, **found)
    if job.ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    work(_run, Job)
