"""Host time of hooks: microseconds per module in the steady state, on layers too small to hide any of it.

Plain PyTorch and the engine run the same chain of linear layers in turn, everything resident. The difference is the
launching thread's time for hooks, ``__torch_function__``, acquire and release. The least of many repetitions counts,
since everything above it is the machine's noise.
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


def _timed_step(forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], object]) -> tuple[float, float]:
    begin = time.perf_counter()
    loss = forward()
    between = time.perf_counter()
    backward(loss)
    return between - begin, time.perf_counter() - between


def _least(steps: list[tuple[float, float]]) -> tuple[float, float]:
    return min(forward for forward, _ in steps), min(backward for _, backward in steps)


def run(args: argparse.Namespace) -> dict:
    torch.set_num_threads(1)

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(args.modules)))

    data = torch.randn(4, args.width)
    plain = build()
    engine, optimizer = initialize_engine(build, 0, {"optimizer": {"type": "AdamW"}, "steps_per_print": 0})
    device_data = data.to(next(engine.module.parameters()).device)
    plain.to(device_data.device)
    with engine:
        for _ in range(3):
            engine.backward(engine(device_data).sum())
            optimizer.step()

        plain_steps, engine_steps = [], []
        for _ in range(args.repetitions):
            plain.zero_grad()
            plain_steps.append(_timed_step(lambda: plain(device_data).sum(), lambda loss: loss.backward()))
            engine_steps.append(_timed_step(lambda: engine(device_data).sum(), engine.backward))
            optimizer.step()
    plain_us, engine_us = ([s / args.modules * 1e6 for s in _least(steps)] for steps in (plain_steps, engine_steps))
    forward_us, backward_us = (mine - theirs for mine, theirs in zip(engine_us, plain_us, strict=True))
    return {
        "case": "hooks", "modules": args.modules, "plain_forward_us": plain_us[0], "forward_overhead_us": forward_us,
        "backward_overhead_us": backward_us, "overhead_per_call_us": (forward_us + backward_us) / 2,
        "goal_us": GOAL_MICROSECONDS, **provenance(),
    }  # fmt: skip


def format_table(result: dict) -> str:
    return (
        f"per module: forward {result['forward_overhead_us']:.1f} us more than plain PyTorch's "
        f"{result['plain_forward_us']:.1f}, backward {result['backward_overhead_us']:.1f} us more; "
        f"per call {result['overhead_per_call_us']:.1f} us (goal at most {result['goal_us']:.0f})"
    )
