"""The longest sequence that each system trains: a ladder of lengths, climbed until one fails.

One model, one sequence that all ranks share, exact AdamW with clipping at 1.0, bfloat16 compute, checkpointed layers.
PatrickStar beside FSDP2 with PyTorch's context parallelism (inputs of checkpointed layers on the GPU; on the host; and
MLPs in tiles, too) and DeepSpeed's Arctic Long Sequence Training, each with its own offloading to the host. Each length
of each system is a run of its own, in fresh processes; a system stops at its first failure. Shorter lengths come first.

* s: of each step, with a synchronisation at its end. In the first one memory is touched and pinned, and kernels are
  chosen: with one step that is all there is.
* TFLOPS: those of the model per GPU, in the last step: 6 per parameter and token, and the causal half of attention.
* GPU: the highest of any rank, as PyTorch's allocator reserved it; host: what the machine's memory held at most, less
  what it held before; its ranks: the highest resident memory of each, together.
* loss and norm are those of the first step, before its update; all systems begin with the same values and tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmark.common import SHAPES, LlamaShape, model_flops, provenance
from benchmark.fresh_process import in_fresh_process
from benchmark.longest_systems import SYSTEMS, Job
from benchmark.rank_jobs import run_ranks
from benchmark.systems.worker_group import rank_environment
from patrickstar.command.flags import memory_size
from patrickstar.machine import host_memory

_GIB = 2**30
_LEAST_SECONDS = 20.0
TRAINED, DEVICE, HOST, TIME, FAILED = "trained", "out of device memory", "out of host memory", "time limit", "failed"
MEMORY = "out of memory"
"""Where CUDA says no more than that: it does for pinned memory of the host, too."""
_MODELS = [name for name, shape in SHAPES.items() if isinstance(shape, LlamaShape)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=_MODELS, default="llama-8b")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="NAME")
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[65536, 131072, 262144], help="tokens of the sequence"
    )
    parser.add_argument("--ranks", type=int, default=2, help="that share it, each with a GPU of its own")
    parser.add_argument("--steps", type=int, default=1, help="of each run")
    parser.add_argument("--tile-tokens", type=int, default=8192, help="of MLPs that are computed in tiles")
    parser.add_argument("--timeout", type=float, default=200.0, metavar="SECONDS", help="per run")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for all runs; those that are left are not run")
    parser.add_argument("--host-memory", type=memory_size, metavar="SIZE", help="the machine's (default: as it says)")
    parser.add_argument("--host-reserve", type=memory_size, default=6 * _GIB, metavar="SIZE", help="that is kept free")
    parser.add_argument("--output", type=Path, metavar="FILE", help="gets a JSON line after each run")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Climbs the ladder with all systems that are still on it."""
    end = time.monotonic() + (args.budget or float("inf"))
    rows: list[dict[str, Any]] = []
    fallen: set[str] = set()
    about = in_fresh_process(provenance)  # which opens a GPU: this process stays out of it
    for length in sorted(set(args.lengths)):
        for system in dict.fromkeys(args.systems):
            left = end - time.monotonic()
            if system in fallen or left < min(_LEAST_SECONDS, args.timeout):
                continue
            row = _run(system, length, min(args.timeout, left), args)
            rows.append(row)
            if row["outcome"] != TRAINED:
                fallen.add(system)
            _tell(row, about, args.output)
    return {"case": "longest", "model": args.model, "ranks": args.ranks, "rows": rows, **about}


def _tell(row: dict[str, Any], about: dict[str, Any], output: Path | None) -> None:
    print(_line(row), file=sys.stderr, flush=True)
    if output is not None:
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, **about}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _run(system: str, length: int, timeout: float, args: argparse.Namespace) -> dict[str, Any]:
    guard = HostGuard(args.host_memory or host_memory.usable_bytes(), args.host_reserve)
    entry = SYSTEMS[system]
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            system=system,
            model=args.model,
            ranks=args.ranks,
            length=length,
            steps=args.steps,
            tile_tokens=args.tile_tokens,
            host_bytes=args.host_memory and args.host_memory - args.host_reserve - guard.before_bytes,
            results=str(Path(folder, "results")),
        )
        found, reason = run_ranks(
            "benchmark.longest_worker",
            job,
            timeout,
            lambda rank, ranks, port: {**entry.environment, **rank_environment(rank, ranks, port)},
            guard.check,
        )
    return {**record(job, found, reason), "host_used_bytes": guard.peak_bytes - guard.before_bytes}


class HostGuard:
    """Ends a run before the machine's memory is full.

    What is used counts, not what is left: memory of a virtual machine may grow as it is touched.
    """

    def __init__(self, total_bytes: int, reserve_bytes: int):
        self._limit_bytes = total_bytes - reserve_bytes
        self.before_bytes = self.peak_bytes = _used_bytes()

    def check(self) -> str | None:
        """Why the run has to end; None: it may go on."""
        used = _used_bytes()
        self.peak_bytes = max(self.peak_bytes, used)
        if used <= self._limit_bytes:
            return None
        return f"host memory: {used / _GIB:.1f} GiB are used, {self._limit_bytes / _GIB:.1f} may be"


def _used_bytes() -> int:
    return host_memory.total_bytes() - host_memory.mem_available_bytes()


def record(job: Job, found: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
    """What is known of a run, from its ranks' lines and why it ended (None: as it should)."""
    steps = [line for line in found if "step" in line]
    built = [line for line in found if "built" in line]
    own = [line for line in steps if line["rank"] == 0]
    seconds = [
        max(line["seconds"] for line in steps if line["step"] == step) for step in sorted({s["step"] for s in steps})
    ]
    row: dict[str, Any] = {
        "system": job.system,
        "model": job.model,
        "ranks": job.ranks,
        "length": job.length,
        "outcome": TRAINED if reason is None else outcome_of(reason),
        "reason": reason and f"{reason} ({_stage(job, built, steps)})",
        "seconds": seconds,
        "losses": [line["loss"] for line in own],
        "grad_norms": [line["grad_norm"] for line in own],
        "build_seconds": max((line["built"] for line in built), default=None),
        "version": built[0]["version"] if built else None,
        "settings": built[0]["settings"] if built else None,
    }
    for name in ("device_peak_bytes", "host_peak_bytes"):
        peaks = [[line[name] for line in steps if line["rank"] == rank] for rank in range(job.ranks)]
        row[name] = [max((peak for peak in own if peak is not None), default=None) for own in peaks]
    tflops = model_flops(job.shape, 1) / job.ranks / 1e12
    row["model_tflops_per_rank"] = tflops / seconds[-1] if seconds else None
    return row


def _stage(job: Job, built: list[dict[str, Any]], steps: list[dict[str, Any]]) -> str:
    if len(built) < job.ranks:
        return "building"
    return f"step {min(sum(line['rank'] == rank for line in steps) for rank in range(job.ranks))}"


def outcome_of(reason: str) -> str:
    """What a run's end means, by its words: allocators say that memory is exhausted in words of their own."""
    text = reason.lower()
    if text.startswith("did not end within"):
        return TIME
    if "host memory" not in text and any(
        words in text for words in ("outofmemoryerror", "cuda out of memory", "memorybudgeterror")
    ):
        return DEVICE
    if any(
        words in text for words in ("host memory", "memoryerror", "allocate memory", "not enough memory", "sigkill")
    ):
        return HOST
    if "out of memory" in text:
        return MEMORY
    return FAILED


def _line(row: dict[str, Any]) -> str:
    head = f"{row['system']:<22}{row['length']:>9}  "
    host = f"{row['host_used_bytes'] / _GIB:7.1f}"
    if row["outcome"] != TRAINED:
        return f"{head}{row['outcome']}: {row['reason']}; host {host.strip()} GiB"
    device = [peak for peak in row["device_peak_bytes"] if peak is not None]
    ranks = sum(row["host_peak_bytes"]) / _GIB
    return (
        f"{head}{row['build_seconds']:7.1f}{row['model_tflops_per_rank']:8.1f}"
        + (f"{max(device) / _GIB:7.1f}" if device else f"{'':>7}")
        + f"{host}{ranks:7.1f}{row['losses'][0]:11.6f}{row['grad_norms'][0]:10.4f}  "
        + " ".join(f"{seconds:.2f}" for seconds in row["seconds"])
    )


def format_table(result: dict[str, Any]) -> str:
    """One row per run, and the longest of each system."""
    rows = result["rows"]
    lines = [
        f"{result['model']}, {result['ranks']} ranks, {result['gpu']}, torch {result['torch_version']}; sizes in GiB",
        "{:<22}{:>9}  {:>7}{:>8}{:>7}{:>7}{:>7}{:>11}{:>10}  {}".format(
            "system", "tokens", "build s", "TFLOPS", "GPU", "host", "ranks", "loss", "norm", "s of each step"
        ),
        *(_line(row) for row in rows),
    ]
    for system in dict.fromkeys(row["system"] for row in rows):
        reached = [row["length"] for row in rows if row["system"] == system and row["outcome"] == TRAINED]
        failed = [row for row in rows if row["system"] == system and row["outcome"] != TRAINED]
        then = f", {failed[0]['length']}: {failed[0]['outcome']}" if failed else ", and no longer one was tried"
        lines.append(f"{system}: {max(reached, default=0)} tokens{then}")
    return "\n".join(lines)
