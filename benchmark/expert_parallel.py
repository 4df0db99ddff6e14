"""Experts that ranks divide (``expert_parallel``), beside experts whose chunks they share, under torchrun.

Rows: batch sizes and ways. Figures of rank 0: seconds per step (median of the second half), bytes of chunks that it
gathers and scatters in a step, and its peak of GPU memory. With ``NCCL_P2P_DISABLE=1`` messages pass through host
memory, as between GPUs without peer access.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

import torch

from benchmark.common import SHAPES, provenance, show, token_batch
from benchmark.steps import add_engine_arguments, make_job, timed_step

_NCCL = ("NCCL_P2P_DISABLE",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.set_defaults(model="qwen3-30b-8-layers")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16], help="sequences per step and rank")
    parser.add_argument("--size", type=int, help="ranks that divide experts (default: all)")
    parser.add_argument("--steps", type=int, default=8)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains with one engine after another. The rows are batch sizes and ways."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    size = args.size or num_ranks
    rows = []
    for batch in args.batch_sizes:
        args.batch_size = batch
        for way, section in (("shared", {}), ("divided", {"expert_parallel": {"size": size}})):
            rows.append({"batch": batch, "way": way, **_train(args, section)})
            show(_line(rows[-1]))
    return {
        "case": "expert_parallel", "model": args.model, "ranks": num_ranks, "size": size, "rows": rows,
        "tokens": args.seq_len or SHAPES[args.model].length, "device_memory": args.device_memory,
        "nccl": {name: os.environ[name] for name in _NCCL if name in os.environ}, **provenance(),
    }  # fmt: skip


def _train(args: argparse.Namespace, section: dict[str, Any]) -> dict[str, Any]:
    from benchmark.ranks import training_device
    from benchmark.systems.patrickstar import training_options
    from benchmark.systems.weights import build_job_model
    from patrickstar.runtime import initialize_engine

    job = make_job(args, 1.0)
    config = training_options(job).engine_config() | args.further | section
    device = training_device()
    engine, optimizer = initialize_engine(lambda: build_job_model(job), device.index or 0, config)
    engine.train()
    generator = torch.Generator().manual_seed(1 + int(os.environ.get("RANK", "0")))
    seconds, losses = [], []
    before = engine.report()
    for step in range(args.steps):
        if step == args.steps // 2:
            before = engine.report()
        tokens = {name: value.to(device) for name, value in token_batch(job.shape, job.batch, generator).items()}
        taken, loss = timed_step(engine, optimizer, tokens)
        seconds.append(taken)
        losses.append(loss)
    now = engine.report()
    count = args.steps - args.steps // 2
    moved = {name: (now[name] - before[name]) / count for name in ("gathered_bytes", "scattered_bytes")}
    engine.discard()
    return {"seconds": statistics.median(seconds[-count:]), "losses": losses, **moved,
            "device_peak_bytes": now["device_peak_bytes"]}  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    moved = (row["gathered_bytes"] + row["scattered_bytes"]) / 1e9
    return (
        f"batch {row['batch']:3} {row['way']:8} {row['seconds']:7.3f} s, chunks between ranks {moved:6.1f} GB a step, "
        f"peak {row['device_peak_bytes'] / 2**30:5.1f} GiB, loss {row['losses'][-1]:.4f}"
    )


def format_table(result: dict[str, Any]) -> str:
    rows = result["rows"]
    ratios = [
        f"{rows[index]['batch']}: {rows[index]['seconds'] / rows[index + 1]['seconds']:.2f}"
        for index in range(0, len(rows), 2)
    ]
    nccl = ", ".join(f"{name}={value}" for name, value in result["nccl"].items())
    title = (
        f"{result['gpu']} x {result['ranks']}, {result['model']}, experts over {result['size']} ranks, "
        f"{result['tokens']} tokens a sequence{', ' + nccl if nccl else ''}"
    )
    return "\n".join([title, *map(_line, rows), f"shared / divided, by batch: {', '.join(ratios)}"])
