"""Seconds to lend the GPU to others and to take it back, beside moving the same bytes with PyTorch.

* left, back: ``engine.lend()``'s begin and end, synchronised. Parameters come back in the next step.
* step: the step after a loan, and the median of steps without one.
* PyTorch: GB/s of 8 GiB in tensors of 64 MiB, by ``tensor.to("cpu")`` and ``tensor.to("cuda")``, and by ``copy_`` into
  pinned tensors that exist, all copies enqueued at once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmark.common import provenance, show, synchronize, token_batch
from benchmark.steps import add_engine_arguments, make_job, timed_step

_STEPS_BEFORE = 12
_STEPS_BETWEEN = 4
_PIECE_NUMEL = 2**24  # float32
_NUM_PIECES = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--loans", type=int, default=4)
    parser.set_defaults(steps=0)


def seconds_of(call: Callable[[], Any]) -> float:
    synchronize()
    begin = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - begin


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, lends the GPU now and then, and moves as many bytes with PyTorch afterwards."""
    from benchmark.ranks import training_device
    from benchmark.systems.patrickstar import training_options
    from benchmark.systems.weights import build_job_model
    from patrickstar.runtime import initialize_engine

    job = make_job(args, 1.0)
    config = training_options(job).engine_config() | args.further
    device = training_device()
    engine, optimizer = initialize_engine(lambda: build_job_model(job), device.index or 0, config)
    engine.train()
    generator = torch.Generator().manual_seed(1)

    def step() -> float:
        tokens = {name: value.to(device) for name, value in token_batch(job.shape, job.batch, generator).items()}
        return timed_step(engine, optimizer, tokens)[0]

    steps = [step() for _ in range(_STEPS_BEFORE)]
    rows: list[dict[str, Any]] = []
    for _ in range(args.loans):
        before = engine.report()["device_chunk_buffer_bytes"]
        loan = engine.lend()
        left = seconds_of(loan.__enter__)
        moved = before - engine.report()["device_chunk_buffer_bytes"]
        back = seconds_of(lambda loan=loan: loan.__exit__(None, None, None))
        rows.append({"bytes": moved, "left": left, "back": back, "step": step()})
        show(_line(rows[-1]))
        steps += [step() for _ in range(_STEPS_BETWEEN)]
    engine.discard()
    return {
        "case": "lend", "model": args.model, "batch": args.batch_size, "config": config, "rows": rows,
        "steady_step": statistics.median(steps[_STEPS_BEFORE:]), "pytorch": _with_pytorch(device),
        **provenance(),
    }  # fmt: skip


def _with_pytorch(device: torch.device) -> dict[str, float]:
    """GB/s of the docstring's copies."""
    held = [torch.zeros(_PIECE_NUMEL, device=device) for _ in range(_NUM_PIECES)]
    away = [torch.empty(_PIECE_NUMEL, pin_memory=tensor.is_cuda) for tensor in held]

    def copy(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
        for one, other in zip(to, source, strict=True):
            one.copy_(other, non_blocking=True)

    def move(where: torch.device | str) -> None:
        for index, tensor in enumerate(held):
            held[index] = tensor.to(where)

    calls = {
        "pinned_left": lambda: copy(away, held),
        "pinned_back": lambda: copy(held, away),
        "to_left": lambda: move("cpu"),
        "to_back": lambda: move(device),
    }
    num_bytes = 4 * _PIECE_NUMEL * _NUM_PIECES
    return {name: num_bytes / 1e9 / seconds_of(call) for name, call in calls.items()}


def _line(row: dict[str, Any]) -> str:
    rate = row["bytes"] / 1e9 / row["left"]
    return (
        f"{row['bytes'] / 2**30:.1f} GiB left in {row['left']:.2f} s ({rate:.1f} GB/s), back in {row['back']:.2f} s, "
        f"next step {row['step']:.3f} s"
    )


def format_table(result: dict[str, Any]) -> str:
    """All loans, and PyTorch's copies."""
    plain = result["pytorch"]
    return "\n".join(
        [
            f"{result['model']}, batch {result['batch']}, steps of {result['steady_step']:.3f} s",
            *map(_line, result["rows"]),
            f"PyTorch into pinned tensors: {plain['pinned_left']:.1f} GB/s, back {plain['pinned_back']:.1f}",
            f"PyTorch, tensor.to: {plain['to_left']:.1f} GB/s, back {plain['to_back']:.1f}",
        ]
    )
