"""The GPU's measured peak: the rate of a large matrix product in the run's dtype."""

from __future__ import annotations

import functools

import torch

_SIZE = 4096
"""Rows and columns: long enough to fill every GPU's tensor cores, 96 MiB for three matrices of 16 bits."""
_ROUNDS = 10


@functools.cache
def peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """10^12 floating point operations per second, the best of ten products of 4096 x 4096 matrices.

    Takes a few milliseconds of the GPU on the current stream, once per device and dtype. None without a GPU, or without
    memory for the matrices.
    """
    if device.type != "cuda":
        return None
    try:
        generator = torch.Generator(device).manual_seed(0)  # the run's own random numbers stay
        left, right = (torch.randn(_SIZE, _SIZE, device=device, dtype=dtype, generator=generator) for _ in range(2))
        out = torch.empty(_SIZE, _SIZE, device=device, dtype=dtype)
    except torch.cuda.OutOfMemoryError:
        return None
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_ROUNDS + 1)]
    with torch.no_grad():
        for event in events:
            torch.mm(left, right, out=out)
            event.record()
    events[-1].synchronize()
    fastest = min(begin.elapsed_time(end) for begin, end in zip(events, events[1:], strict=False))
    return 2 * _SIZE**3 / (fastest * 1e-3) / 1e12
