"""Causal attention over a sequence that two GPUs share, against one GPU's and PyTorch's context parallelism.

Forward and backward of one layer's attention, the same numbers for all: PyTorch's own attention on one GPU, with flash
attention and with cuDNN's; ``patrickstar.sequence.attention`` in the modes zigzag, ring and ulysses; and
``torch.distributed.tensor.experimental.context_parallel`` with load balancing, by both of its rotations, over both
kernels. Each system runs in fresh processes, which it may leave broken: the reason is given and the others go on.

* ms: median of the iterations' times on the slowest rank, by CUDA events, the host running ahead.
* TFLOPS: 3.5 times those of the causal half of two products of queries, keys and head_dim, per GPU.
* of linear: the best one-GPU time over the number of ranks times this one; 1 is as fast as GPUs can share the work.
* gap: the largest relative difference of the norms of output and gradients to those of the first system that ran.

Without a GPU ranks talk over gloo, and what needs one fails.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmark.common import provenance
from benchmark.rank_jobs import run_ranks
from benchmark.sequence_worker import ALONE, TOGETHER, Job

_WIDEST_GAP = 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--systems", nargs="+", choices=[*ALONE, *TOGETHER], default=[*ALONE, *TOGETHER], metavar="NAME"
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[16384, 65536, 131072], help="tokens of the sequence")
    parser.add_argument("--ranks", type=int, default=2, help="that share it, each with a GPU of its own")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--warmup", type=int, default=3, help="iterations before the timed ones")
    parser.add_argument("--iterations", type=int, default=10, help="timed ones")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="per system")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the systems in turn."""
    rows, failures = [], []
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    for system in dict.fromkeys(args.systems):
        found, reason = _run_system(system, device_type, args)
        rows += found
        for row in found:
            milliseconds = row["median_seconds"] * 1e3
            print(f"{system}, {row['length']} tokens: {milliseconds:.2f} ms", file=sys.stderr, flush=True)
        if reason is not None:
            failures.append({"system": system, "reason": reason})
            print(f"{system}: {reason}", file=sys.stderr, flush=True)
    _compare(rows)
    for row in rows:
        flops = 3.5 * 2 * row["length"] ** 2 * args.head_dim * args.heads
        row["tflops_per_rank"] = flops / row["median_seconds"] / row["ranks"] / 1e12
    return {
        "case": "sequence",
        "rows": rows,
        "failures": failures,
        "device_type": device_type,
        "heads": args.heads,
        "key_heads": args.key_heads,
        "head_dim": args.head_dim,
        "dtype": args.dtype,
        "warmup": args.warmup,
        "iterations": args.iterations,
        "cudnn_version": torch.backends.cudnn.version(),
        **provenance(),
    }


def _compare(rows: list[dict[str, Any]]) -> None:
    """With one GPU's speed at the same length, and the first system's numbers."""
    for row in rows:
        peers = [peer for peer in rows if peer["length"] == row["length"]]
        alone = [peer["median_seconds"] for peer in peers if peer["ranks"] == 1]
        row["of_linear"] = min(alone) / (row["ranks"] * row["median_seconds"]) if alone else None
        gaps = [abs(own - other) / other for own, other in zip(row["norms"], peers[0]["norms"], strict=True)]
        row["gap"] = max(gaps)


def _run_system(system: str, device_type: str, args: argparse.Namespace) -> tuple[list[dict[str, Any]], str | None]:
    """Its rows, of the lengths that it came to, and why there are no more."""
    ranks = 1 if system in ALONE else args.ranks
    if device_type == "cuda" and torch.cuda.device_count() < ranks:
        return [], f"needs {ranks} GPUs, there is {torch.cuda.device_count()}; give --ranks"
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            system=system,
            ranks=ranks,
            device_type=device_type,
            lengths=sorted(set(args.lengths)),
            heads=args.heads,
            key_heads=args.key_heads,
            head_dim=args.head_dim,
            dtype=args.dtype,
            warmup=args.warmup,
            iterations=args.iterations,
            results=str(Path(folder, "results")),
        )
        found, reason = run_ranks("benchmark.sequence_worker", job, args.timeout)
    return [_row(job, one) for one in found], reason


def _row(job: Job, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "system": job.system,
        "ranks": job.ranks,
        **found,
        "median_seconds": statistics.median(found["seconds"]),
        "median_forward_seconds": statistics.median(found["forward_seconds"]),
    }


def format_table(result: dict[str, Any]) -> str:
    """The result of run() for people."""
    gpu = result["gpu"] if result["device_type"] == "cuda" else result["cpu"]
    lines = [
        f"causal attention, forward and backward: {result['heads']} heads, {result['key_heads']} key heads of "
        f"{result['head_dim']}, {result['dtype']}, {gpu}, torch {result['torch_version']}",
        f"{'system':<34}{'ranks':>6}{'tokens':>9}{'ms':>10}{'forward':>10}{'least':>10}{'most':>10}{'TFLOPS':>8}"
        f"{'of linear':>11}{'peak GiB':>10}{'gap':>9}",
    ]
    for row in sorted(result["rows"], key=lambda row: (row["length"], row["ranks"])):
        least, most = min(row["seconds"]), max(row["seconds"])
        share = "" if row["of_linear"] is None else f"{row['of_linear']:.3f}"
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f}"
        lines.append(
            f"{row['system']:<34}{row['ranks']:>6}{row['length']:>9}{row['median_seconds'] * 1e3:>10.2f}"
            f"{row['median_forward_seconds'] * 1e3:>10.2f}{least * 1e3:>10.2f}{most * 1e3:>10.2f}"
            f"{row['tflops_per_rank']:>8.0f}{share:>11}{peak:>10}{row['gap']:>9.1e}"
            + (f"  {row['note']}" if row["note"] else "")
            + ("  OTHER NUMBERS" if row["gap"] > _WIDEST_GAP else "")
        )
    lines += [f"{failure['system']} failed: {failure['reason']}" for failure in result["failures"]]
    return "\n".join(lines)
