"""Times of forward and backward on this rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def timed_passes(
    forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], Any], device: torch.device, iterations: int
) -> list[tuple[float, float]]:
    """Seconds of forward, and of forward and backward. On a GPU the host runs ahead, as in training."""
    marks: list[list[Any]] = []

    def mark() -> Any:
        if device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    for _ in range(iterations):
        begin = mark()
        out = forward()
        between = mark()
        backward(out)
        del out
        marks.append([begin, between, mark()])
    if device.type == "cpu":
        return [(between - begin, end - begin) for begin, between, end in marks]
    torch.cuda.synchronize()
    return [(begin.elapsed_time(between) / 1e3, begin.elapsed_time(end) / 1e3) for begin, between, end in marks]
