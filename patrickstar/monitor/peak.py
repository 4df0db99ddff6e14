"""The GPU's measured peak: the rate of a large matrix product in the run's dtype."""

from __future__ import annotations

import functools

import torch

_SIZE = 4096
"""Rows and columns: enough to fill every GPU's tensor cores."""
_ROUNDS = 10
_LEAST_BUDGET_BYTES = 1 << 30
"""With less device memory the matrices, 64 to 128 MiB, would push chunks out."""


def peak_tflops(device: torch.device, dtype: torch.dtype, budget_bytes: int) -> float | None:
    """10^12 floating point operations per second, the best of ten products of 4096 x 4096 matrices.

    Takes a few milliseconds of the GPU on the current stream, once per device and dtype. None without a GPU, and with a
    budget below 1 GiB.
    """
    return None if device.type != "cuda" or budget_bytes < _LEAST_BUDGET_BYTES else _measure(device, dtype)


@functools.cache
def _measure(device: torch.device, dtype: torch.dtype) -> float | None:
    """None if the device has no memory for the matrices."""
    try:
        generator = torch.Generator(device).manual_seed(0)  # the run's own random numbers stay
        matrix = torch.randn(_SIZE, _SIZE, device=device, dtype=dtype, generator=generator)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_ROUNDS + 1)]
        out = torch.empty_like(matrix)
        with torch.no_grad():
            for event in events:
                torch.mm(matrix, matrix, out=out)
                event.record()
        events[-1].synchronize()
    except torch.OutOfMemoryError:
        return None
    del matrix, out
    torch.cuda.empty_cache()
    fastest = min(begin.elapsed_time(end) for begin, end in zip(events, events[1:], strict=False))
    return 2 * _SIZE**3 / (fastest * 1e-3) / 1e12
