"""The cost of SavedRun in steps without a save: pairs of steps, one within SavedRun with grace_seconds, one without.

* wall, CPU: medians of a step's seconds and of its process's CPU seconds, with quartiles of the pairs' ratios.
* after_step: its median seconds, and CPU seconds. It is nearly all that a step within SavedRun does besides; a message
  after each micro-batch is exchanged too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch

from benchmark.common import provenance, token_batch
from benchmark.steps import add_engine_arguments, make_job, timed_step

GOAL = 0.01
CLOCKS = ("wall", "CPU")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--pairs", type=int, default=100)
    parser.set_defaults(steps=0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains; the first step of a pair alternates."""
    from benchmark.ranks import training_device
    from benchmark.systems.patrickstar import training_options
    from benchmark.systems.weights import build_job_model
    from patrickstar import SavedRun
    from patrickstar.runtime import initialize_engine

    job, device = make_job(args, 1.0), training_device()
    config = training_options(job).engine_config() | args.further
    engine, optimizer = initialize_engine(lambda: build_job_model(job), device.index or 0, config)
    engine.train()
    tokens = token_batch(job.shape, job.batch, torch.Generator().manual_seed(1))
    batch = {key: value.to(device) for key, value in tokens.items()}
    calls: list[tuple[float, float]] = []

    def bare() -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        timed_step(engine, optimizer, batch)
        return time.perf_counter() - wall, time.process_time() - cpu

    def saved() -> tuple[float, float]:
        with tempfile.TemporaryDirectory() as folder, SavedRun(engine, folder, grace_seconds=3600) as saved_run:
            wall, cpu = time.perf_counter(), time.process_time()
            timed_step(engine, optimizer, batch)
            began, began_cpu = time.perf_counter(), time.process_time()
            saved_run.after_step({"step": 1})
            calls.append((time.perf_counter() - began, time.process_time() - began_cpu))
            return time.perf_counter() - wall, time.process_time() - cpu

    for _ in range(5):
        bare()
        saved()
    calls.clear()
    pairs = []
    for number in range(args.pairs):
        first, second = (bare, saved) if number % 2 == 0 else (saved, bare)
        one, other = first(), second()
        pairs.append((one, other) if number % 2 == 0 else (other, one))
    engine.discard()
    rows = {}
    for index, clock in enumerate(CLOCKS):
        ratios = [with_run[index] / without[index] for without, with_run in pairs]
        rows[clock] = {
            "without": statistics.median(without[index] for without, _ in pairs),
            "within": statistics.median(with_run[index] for _, with_run in pairs),
            "quartiles": statistics.quantiles(ratios, n=4),
            "after_step": statistics.median(call[index] for call in calls),
        }
    return {
        "case": "saved_run", "model": args.model, "pairs": args.pairs, **rows, **provenance(),
    }  # fmt: skip


def format_table(result: dict[str, Any]) -> str:
    lines = []
    for clock in CLOCKS:
        row = result[clock]
        low, middle, high = row["quartiles"]
        lines.append(
            f"{clock}: {row['without'] * 1e3:.2f} ms without, {row['within'] * 1e3:.2f} ms within SavedRun; "
            f"ratio of a pair {middle:.3f} ({low:.3f} to {high:.3f}); after_step {row['after_step'] * 1e6:.0f} us, "
            f"{row['after_step'] / row['without']:.2%} of a step (goal at most {GOAL:.0%})"
        )
    return "\n".join(lines)
