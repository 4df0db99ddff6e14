"""The longest sequence that each system trains: a ladder of lengths, climbed until a length fails.

One model, one sequence that all ranks share, exact AdamW with clipping at 1.0, bfloat16 compute, checkpointed layers.
PatrickStar beside FSDP2 with PyTorch's context parallelism and DeepSpeed's Arctic Long Sequence Training, each with its
own offloading to the host. FSDP2 has three variants: inputs of checkpointed layers on the GPU; on the host; on the host
with MLPs in tiles. Each length of each system is a run in fresh processes, shorter lengths first. A system stops at its
first failure.

* s: of each step on the slowest rank, synchronised. In the first step memory is touched and pinned and kernels are
  chosen.
* TFLOPS: model TFLOPS per GPU in the last step: 6 per parameter and token, and the causal half of attention.
* GPU: peak of PyTorch's reserved memory, on the rank with the highest. host: peak of the machine's used memory, less
  its use before the run. ranks: peaks of the ranks' resident memory, together.
* loss and norm belong to the first step, before its update; all systems begin with the same values and tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from benchmark.common import LLAMAS, gib, in_fresh_process, model_flops, provenance, show, table
from benchmark.launch import Outcome
from benchmark.systems import LONG_SYSTEMS, Job
from benchmark.systems.run import Run, run_system
from patrickstar.command.flags import memory_size
from patrickstar.machine import host_memory

_GIB = 2**30
_LEAST_SECONDS = 20.0
_CLIPPING = 1.0
TRAINED, DEVICE, HOST, TIME, FAILED = "trained", "out of device memory", "out of host memory", "time limit", "failed"
MEMORY = "out of memory"
"""CUDA reports no more than that, also for pinned memory of the host."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=LLAMAS, default="llama-8b")
    parser.add_argument("--systems", nargs="+", choices=LONG_SYSTEMS, default=list(LONG_SYSTEMS), metavar="NAME")
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[65536, 131072, 262144], help="tokens of the sequence"
    )
    parser.add_argument("--ranks", type=int, default=2, help="that share it, each with a GPU of its own")
    parser.add_argument("--steps", type=int, default=1, help="of each run")
    parser.add_argument("--tile-tokens", type=int, default=8192, help="of MLPs that are computed in tiles")
    parser.add_argument("--timeout", type=float, default=200.0, metavar="SECONDS", help="per run")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for all runs; the rest is not run")
    parser.add_argument("--host-memory", type=memory_size, metavar="SIZE", help="of the machine (default: detected)")
    parser.add_argument("--host-reserve", type=memory_size, default=6 * _GIB, metavar="SIZE", help="that stays free")
    parser.add_argument("--output", type=Path, metavar="FILE", help="gets a JSON line after each run")


def run(args: argparse.Namespace) -> dict[str, Any]:
    end = time.monotonic() + (args.budget or float("inf"))
    rows: list[dict[str, Any]] = []
    fallen: set[str] = set()
    about = in_fresh_process(provenance)  # it opens a GPU, which this process must not
    for length in sorted(set(args.lengths)):
        for system in dict.fromkeys(args.systems):
            left = end - time.monotonic()
            if system in fallen or left < min(_LEAST_SECONDS, args.timeout):
                continue
            row = _run(system, length, min(args.timeout, left), args)
            rows.append(row)
            if row["outcome"] != TRAINED:
                fallen.add(system)
            show(_line(row))
            if args.output is not None:
                with args.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**row, **about}) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
    return {"case": "longest", "model": args.model, "ranks": args.ranks, "rows": rows, **about}


def _run(system: str, length: int, timeout: float, args: argparse.Namespace) -> dict[str, Any]:
    guard = HostGuard(args.host_memory or host_memory.usable_bytes(), args.host_reserve)
    job = Job(
        system=system, model=args.model, ranks=args.ranks, length=length, batch=1, clipping=_CLIPPING, gpu_bytes=None,
        host_bytes=args.host_memory and args.host_memory - args.host_reserve - guard.before_bytes, warmup=0,
        steps=args.steps, shares_sequence=True, tile_tokens=args.tile_tokens, is_profiled=False,
    )  # fmt: skip
    done = run_system(job, timeout_seconds=timeout, log=lambda line: None, guard=guard.check)
    if done.log_tail:
        show(done.log_tail)
    return {**record(done), "host_used_bytes": guard.peak_bytes - guard.before_bytes}


class HostGuard:
    """Ends a run before the machine's memory is full.

    Used memory counts, not free memory: memory of a virtual machine may grow as it is touched.
    """

    def __init__(self, total_bytes: int, reserve_bytes: int):
        self._limit_bytes = total_bytes - reserve_bytes
        self.before_bytes = self.peak_bytes = _used_bytes()

    def check(self) -> str | None:
        """The reason to end the run, or None."""
        used = _used_bytes()
        self.peak_bytes = max(self.peak_bytes, used)
        if used <= self._limit_bytes:
            return None
        return f"host memory: {used / _GIB:.1f} GiB are used, {self._limit_bytes / _GIB:.1f} may be"


def _used_bytes() -> int:
    return host_memory.total_bytes() - host_memory.mem_available_bytes()


def record(run: Run) -> dict[str, Any]:
    job, seconds = run.job, run.slowest_step_seconds
    tflops = model_flops(job.shape, 1) / job.ranks / 1e12
    return {
        "system": job.system, "model": job.model, "ranks": job.ranks, "length": job.length, "outcome": outcome_of(run),
        "reason": run.reason or None, "seconds": seconds, "losses": run.losses, "grad_norms": run.grad_norms,
        "build_seconds": run.init_seconds, "version": run.version, "settings": run.settings,
        "device_peak_bytes": run.device_peak_bytes, "host_peak_bytes": run.host_peak_bytes,
        "model_tflops_per_rank": tflops / seconds[-1] if seconds else None,
    }  # fmt: skip


def outcome_of(run: Run) -> str:
    """Tells device memory from host memory by the reason's words, which each allocator chooses for itself."""
    text = run.reason.lower()
    if run.outcome in (Outcome.TRAINED, Outcome.TIMED_OUT):
        return TRAINED if run.outcome is Outcome.TRAINED else TIME
    if "host memory" not in text and any(
        words in text for words in ("outofmemoryerror", "cuda out of memory", "memorybudgeterror")
    ):
        return DEVICE
    if any(
        words in text for words in ("host memory", "memoryerror", "allocate memory", "not enough memory", "sigkill")
    ):
        return HOST
    return MEMORY if "out of memory" in text else FAILED


_COLUMNS = (
    ("system", -22, ""), ("tokens", 9, ""), ("build s", 9, ".1f"), ("TFLOPS", 8, ".1f"), ("GPU", 7, ".1f"),
    ("host", 7, ".1f"), ("ranks", 7, ".1f"), ("loss", 11, ".6f"), ("norm", 10, ".4f"), ("  s of each step", -16, ""),
)  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    if row["outcome"] != TRAINED:
        host = gib(row["host_used_bytes"])
        return f"{row['system']:<22}{row['length']:>9}  {row['outcome']}: {row['reason']}; host {host:.1f} GiB"
    cells = [
        row["system"], row["length"], row["build_seconds"], row["model_tflops_per_rank"], gib(row["device_peak_bytes"]),
        gib(row["host_used_bytes"]), gib(row["host_peak_bytes"]), row["losses"][0], row["grad_norms"][0],
        "  " + " ".join(f"{seconds:.2f}" for seconds in row["seconds"]),
    ]  # fmt: skip
    return table(_COLUMNS, [cells])[1]


def format_table(result: dict[str, Any]) -> str:
    rows = result["rows"]
    lines = [
        f"{result['model']}, {result['ranks']} ranks, {result['gpu']}, torch {result['torch_version']}; sizes in GiB",
        *table(_COLUMNS, []),
        *(_line(row) for row in rows),
    ]
    for system in dict.fromkeys(row["system"] for row in rows):
        reached = [row["length"] for row in rows if row["system"] == system and row["outcome"] == TRAINED]
        failed = [row for row in rows if row["system"] == system and row["outcome"] != TRAINED]
        then = f", {failed[0]['length']}: {failed[0]['outcome']}" if failed else ", and no longer one was tried"
        lines.append(f"{system}: {max(reached, default=0)} tokens{then}")
    return "\n".join(lines)
