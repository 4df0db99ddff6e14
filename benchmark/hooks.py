"""What hooks cost the host: microseconds per module in the steady state, on layers too small to hide anything.

Plain PyTorch and the engine run the same chain of linear layers in turn, everything resident, so that the difference
is what the launching thread does besides: hooks, ``__torch_function__``, acquire and release. The least of many
repetitions counts, since everything else is the machine's noise.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmark.common import provenance
from patrickstar.runtime import initialize_engine

GOAL_MICROSECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modules", type=int, default=200)
    parser.add_argument("--width", type=int, default=8, help="of the linear layers")
    parser.add_argument("--repetitions", type=int, default=200)


def _least_seconds(repetitions: int, *runs: Callable[[], float]) -> list[float]:
    """The least of what each returns, in turn."""
    return [min(values) for values in zip(*([run() for run in runs] for _ in range(repetitions)), strict=True)]


def _timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def run(args: argparse.Namespace) -> dict:
    """Times forward alone, and forward with backward."""
    torch.set_num_threads(1)

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(args.modules)))

    data = torch.randn(4, args.width)
    plain = build()
    engine, optimizer = initialize_engine(build, 0, {"optimizer": {"type": "AdamW"}})
    device_data = data.to(next(engine.module.parameters()).device)
    plain.to(device_data.device)
    with engine:
        for _ in range(3):
            engine.backward(engine(device_data).sum())
            optimizer.step()

        def plain_step() -> float:
            plain.zero_grad()
            return _timed(lambda: plain(device_data).sum().backward())

        def engine_step() -> float:
            seconds = _timed(lambda: engine.backward(engine(device_data).sum()))
            optimizer.step()
            return seconds

        forward = _least_seconds(
            args.repetitions, lambda: _timed(lambda: plain(device_data)), lambda: _timed(lambda: engine(device_data))
        )
        step = _least_seconds(args.repetitions, plain_step, engine_step)
    forward_us = (forward[1] - forward[0]) / args.modules * 1e6
    step_us = (step[1] - step[0]) / args.modules * 1e6
    return {
        "case": "hooks",
        "modules": args.modules,
        "plain_forward_us": forward[0] / args.modules * 1e6,
        "forward_overhead_us": forward_us,
        "backward_overhead_us": step_us - forward_us,
        "overhead_per_call_us": step_us / 2,
        "goal_us": GOAL_MICROSECONDS,
        **provenance(),
    }


def format_table(result: dict) -> str:
    """The result of run() for people."""
    return (
        f"per module: forward {result['forward_overhead_us']:.1f} us more than plain PyTorch's "
        f"{result['plain_forward_us']:.1f}, backward {result['backward_overhead_us']:.1f} us more; "
        f"per call {result['overhead_per_call_us']:.1f} us (goal at most {result['goal_us']:.0f})"
    )
