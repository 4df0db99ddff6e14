"""Seconds to lend the GPU to others and to take it back, beside moving the same bytes with PyTorch.

* left, back: ``engine.lend()``'s begin and end, synchronised.
* step: the step after a loan, and the median of steps without one.
* to, pinned: the same number of bytes in tensors of 64 MiB, by ``tensor.to("cpu")`` and ``tensor.to("cuda")``, and by
  ``copy_`` into pinned tensors that exist, all copies enqueued at once.
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--loans", type=int, default=4)


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

    args.steps = 0
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
    num_bytes = 0
    for _ in range(args.loans):
        before = engine.report()["device_chunk_buffer_bytes"]
        loan = engine.lend()
        left = seconds_of(loan.__enter__)
        moved = before - engine.report()["device_chunk_buffer_bytes"]
        back = seconds_of(lambda loan=loan: loan.__exit__(None, None, None))
        rows.append({"bytes": moved, "left": left, "back": back, "step": step()})
        show(_line(rows[-1]))
        num_bytes = max(num_bytes, moved)
        steps += [step() for _ in range(_STEPS_BETWEEN)]
    engine.discard()
    return {
        "case": "lend", "model": args.model, "batch": args.batch_size, "config": config, "rows": rows,
        "steady_step": statistics.median(steps[_STEPS_BEFORE:]), "pytorch": _with_pytorch(num_bytes, device),
        **provenance(),
    }  # fmt: skip


def _with_pytorch(num_bytes: int, device: torch.device) -> dict[str, float]:
    """Seconds of the docstring's ``to`` and ``pinned``."""
    held = [torch.zeros(_PIECE_NUMEL, device=device) for _ in range(num_bytes // (4 * _PIECE_NUMEL))]
    found = _with_pinned(held)

    def move(where: torch.device | str) -> None:
        for index, tensor in enumerate(held):
            held[index] = tensor.to(where)

    return found | {"to_left": seconds_of(lambda: move("cpu")), "to_back": seconds_of(lambda: move(device))}


def _with_pinned(held: list[torch.Tensor]) -> dict[str, float]:
    away = [torch.empty(_PIECE_NUMEL, pin_memory=tensor.is_cuda) for tensor in held]

    def copy(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
        for one, other in zip(to, source, strict=True):
            one.copy_(other, non_blocking=True)

    return {"pinned_left": seconds_of(lambda: copy(away, held)), "pinned_back": seconds_of(lambda: copy(held, away))}


def _line(row: dict[str, Any]) -> str:
    rate = row["bytes"] / 1e9
    return (
        f"{row['bytes'] / 2**30:.1f} GiB left in {row['left']:.2f} s ({rate / row['left']:.1f} GB/s), back in "
        f"{row['back']:.2f} s ({rate / row['back']:.1f} GB/s), next step {row['step']:.3f} s"
    )


def format_table(result: dict[str, Any]) -> str:
    """All loans, and PyTorch's copies."""
    plain = result["pytorch"]
    return "\n".join(
        [
            f"{result['model']}, batch {result['batch']}, steps of {result['steady_step']:.3f} s",
            *map(_line, result["rows"]),
            f"PyTorch, into pinned tensors that exist: {plain['pinned_left']:.2f} s, {plain['pinned_back']:.2f} s",
            f"PyTorch, tensor.to: {plain['to_left']:.2f} s, {plain['to_back']:.2f} s",
        ]
    )
