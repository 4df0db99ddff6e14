"""Blocks of a GPT whose matrices GPUs share: in two dimensions, in one, and by PyTorch's DTensor tensor parallelism.

Forward and backward of the same blocks on the same tokens, without embedding, head and optimizer, which take the same
for all: ``patrickstar.tensor2d`` on p x 1, 1 x p and, where that exists, square meshes, its one dimension, and
``parallelize_module`` with ``ColwiseParallel``, ``RowwiseParallel`` and ``SequenceParallel``, as it is and with blocks
that ``torch.compile`` compiles, on GPUs with asynchronous tensor parallelism (``_micro_pipeline_tp``). All have the
same attention kernels (SDPA), a layer for queries, keys and values together, and the dtype of ``--dtype``.

Systems take turns, ``--rounds`` times, each in fresh processes, which it may leave broken: the reason is given and the
others go on.

* ms: median of all rounds' iterations on the slowest rank, by CUDA events, the host running ahead.
* TFLOPS: of matrix products, three times forward's, and of the causal half of attention, per GPU.
* exposed: the median less what the profiler saw rank 0 compute in one iteration more; collectives: of that iteration,
  when nothing but these ran. On the CPU neither is known.
* kernels: the longest of that iteration by name, of the fastest system and of the fastest one of PatrickStar.
* of best: the fastest system's time over this one's. peak: of the GPU's memory, parameters and gradients included.
* gap: the largest relative difference of the norms of output and gradients to those of the first system that ran.

Without a GPU ranks talk over gloo, which is for tests: it says nothing about speed.
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
from benchmark.tensor2d_worker import SYSTEMS, Job

_WIDEST_GAP = 0.02
_DEFAULT_SYSTEMS = [name for name in SYSTEMS if name != "square"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=_DEFAULT_SYSTEMS, metavar="NAME")
    parser.add_argument("--tokens", nargs="+", type=int, default=[16384, 65536], help="of all sequences together")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=2, help="each with a GPU of its own")
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each system")
    parser.add_argument("--warmup", type=int, default=3, help="iterations before the timed ones")
    parser.add_argument("--iterations", type=int, default=10, help="timed ones, in each round")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="per system and round")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the systems in turn."""
    wrong = [tokens for tokens in args.tokens if tokens % args.seq_len]
    if wrong:
        raise ValueError(
            f"--tokens {wrong[0]} are no whole sequences of {args.seq_len}; give --seq-len that divides it"
        )
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    failures: dict[str, str] = {}
    for _ in range(args.rounds):
        for system in dict.fromkeys(args.systems):
            if system in failures:
                continue
            results, reason = _run_system(system, device_type, args)
            for result in results:
                found.setdefault((system, result["tokens"]), []).append(result)
                print(_progress(system, result), file=sys.stderr, flush=True)
            if reason is not None:
                failures[system] = reason
                print(f"{system}: {reason}", file=sys.stderr, flush=True)
    rows = [_row(system, parts, args) for (system, _), parts in found.items()]
    _compare(rows)
    return {
        "case": "tensor2d",
        "rows": rows,
        "failures": [{"system": system, "reason": reason} for system, reason in failures.items()],
        "device_type": device_type,
        **{name: getattr(args, name) for name in ("seq_len", "ranks", "hidden", "heads", "layers", "dtype")},
        **{name: getattr(args, name) for name in ("rounds", "warmup", "iterations")},
        **provenance(),
    }


def _run_system(system: str, device_type: str, args: argparse.Namespace) -> tuple[list[dict[str, Any]], str | None]:
    """What it measured, of the numbers of tokens that it came to, and why there are no more."""
    if device_type == "cuda" and torch.cuda.device_count() < args.ranks:
        return [], f"needs {args.ranks} GPUs, there is {torch.cuda.device_count()}; give --ranks"
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            system=system,
            ranks=args.ranks,
            device_type=device_type,
            batches=sorted({tokens // args.seq_len for tokens in args.tokens}),
            length=args.seq_len,
            hidden=args.hidden,
            heads=args.heads,
            layers=args.layers,
            dtype=args.dtype,
            warmup=args.warmup,
            iterations=args.iterations,
            results=str(Path(folder, "results")),
        )
        return run_ranks("benchmark.tensor2d_worker", job, args.timeout)


def _progress(system: str, result: dict[str, Any]) -> str:
    """Of one round, before the others come."""
    text = f"{system}, {result['tokens']} tokens: {statistics.median(result['seconds']) * 1e3:.2f} ms"
    profile = result["profile"]
    if profile is None:
        return text
    computing, alone = (profile[key] * 1e3 for key in ("computing_seconds", "collectives_only_seconds"))
    return f"{text}, computing {computing:.2f}, nothing but collectives {alone:.2f}"


def _row(system: str, parts: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Of all rounds."""
    seconds = [one for part in parts for one in part["seconds"]]
    tokens, median = parts[0]["tokens"], statistics.median(seconds)
    profiled = [part["profile"] for part in parts if part["profile"] is not None]
    peaks = [part["peak_bytes"] for part in parts if part["peak_bytes"] is not None]
    flops = args.layers * tokens * (3 * 2 * 12 * args.hidden**2 + 3.5 * 2 * args.seq_len * args.hidden)
    return {
        "system": system,
        "mesh": parts[0]["mesh"],
        "tokens": tokens,
        "seconds": seconds,
        "median_seconds": median,
        "round_medians": [statistics.median(part["seconds"]) for part in parts],
        "median_forward_seconds": statistics.median(one for part in parts for one in part["forward_seconds"]),
        "tflops_per_rank": flops / median / args.ranks / 1e12,
        "exposed_seconds": median - min(one["computing_seconds"] for one in profiled) if profiled else None,
        "collectives_only_seconds": min(one["collectives_only_seconds"] for one in profiled) if profiled else None,
        "profile": profiled[-1] if profiled else None,
        "peak_bytes": max(peaks) if peaks else None,
        "norms": parts[0]["norms"],
    }


def _compare(rows: list[dict[str, Any]]) -> None:
    """With the fastest at as many tokens, and the first system's numbers."""
    for row in rows:
        peers = [peer for peer in rows if peer["tokens"] == row["tokens"]]
        row["of_best"] = min(peer["median_seconds"] for peer in peers) / row["median_seconds"]
        row["gap"] = max(abs(own - other) / other for own, other in zip(row["norms"], peers[0]["norms"], strict=True))


def format_table(result: dict[str, Any]) -> str:
    """The result of run() for people."""
    device = result["gpu"] if result["device_type"] == "cuda" else f"{result['cpu']}, gloo"
    lines = [
        f"{result['layers']} blocks of a GPT, forward and backward: hidden size {result['hidden']}, {result['heads']} "
        f"heads, sequences of {result['seq_len']} tokens, {result['dtype']}, {result['ranks']} ranks, {device}, torch "
        f"{result['torch_version']}",
        f"{'system':<24}{'mesh':<9}{'tokens':>8}{'ms':>10}{'forward':>10}{'least':>10}{'most':>10}{'TFLOPS':>8}"
        f"{'of best':>9}{'exposed ms':>12}{'collectives':>13}{'peak GiB':>10}{'gap':>9}",
    ]
    for row in sorted(result["rows"], key=lambda row: row["tokens"]):
        exposed, alone, peak = (
            "" if row[key] is None else f"{row[key] * scale:.2f}"
            for key, scale in (("exposed_seconds", 1e3), ("collectives_only_seconds", 1e3), ("peak_bytes", 2**-30))
        )
        lines.append(
            f"{row['system']:<24}{row['mesh']:<9}{row['tokens']:>8}{row['median_seconds'] * 1e3:>10.2f}"
            f"{row['median_forward_seconds'] * 1e3:>10.2f}{min(row['seconds']) * 1e3:>10.2f}"
            f"{max(row['seconds']) * 1e3:>10.2f}{row['tflops_per_rank']:>8.0f}{row['of_best']:>9.3f}"
            f"{exposed:>12}{alone:>13}{peak:>10}{row['gap']:>9.1e}"
            + ("  OTHER NUMBERS" if row["gap"] > _WIDEST_GAP else "")
        )
    lines += [f"{failure['system']} failed: {failure['reason']}" for failure in result["failures"]]
    for tokens in sorted({row["tokens"] for row in result["rows"]}):
        lines += _kernels([row for row in result["rows"] if row["tokens"] == tokens])
    return "\n".join(line.rstrip() for line in lines)


def _kernels(rows: list[dict[str, Any]]) -> list[str]:
    """Of the fastest system of these, and of the fastest one of PatrickStar."""
    by_time = sorted((row for row in rows if row["profile"] is not None), key=lambda row: row["median_seconds"])
    ours = [row for row in by_time if not row["system"].startswith("dtensor")]
    lines = []
    for row in {row["system"]: row for row in (*by_time[:1], *ours[:1])}.values():
        lines.append(f"longest kernels of {row['system']}, {row['tokens']} tokens, on rank 0:")
        lines += [
            f"{kernel['seconds'] * 1e3:>10.2f} ms{kernel['number']:>6} x  {kernel['name']}"
            for kernel in row["profile"]["kernels"]
        ]
    return lines
