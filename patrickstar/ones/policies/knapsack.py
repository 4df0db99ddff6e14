"""The best number of GPUs of every job, if the value of an allocation is the sum of its jobs' values."""

from __future__ import annotations

import numpy as np


def best_sizes(values: np.ndarray, num_gpus: int) -> np.ndarray:
    """Maximises the sum of values with at most ``num_gpus`` GPUs, exactly, by dynamic programming over GPUs.

    Args:
        values: of each job on 0, 1, ... GPUs; float64 ``[jobs, sizes]``, -inf where it is not allowed.
        num_gpus: of the cluster; the smallest allowed sizes must fit together.

    Returns:
        int64 ``[jobs]``; of equal values the smaller sizes.

    Raises:
        ValueError: the smallest allowed sizes exceed the cluster.
    """
    best = np.zeros(num_gpus + 1)  # of the jobs so far, with at most so many GPUs
    chosen = np.zeros((len(values), num_gpus + 1), dtype=np.int64)
    for job, row in enumerate(values):
        finite = np.flatnonzero(np.isfinite(row))
        most = int(finite[-1]) if len(finite) else 0
        padded = np.concatenate([np.full(most, -np.inf), best])
        if 2 * len(finite) < most:
            totals = np.stack([padded[most - n : len(padded) - n] + row[n] for n in finite], axis=1)
        else:
            totals = np.lib.stride_tricks.sliding_window_view(padded, most + 1)[:, ::-1] + row[: most + 1]
            finite = np.arange(most + 1)
        at = totals.argmax(axis=1)
        chosen[job] = finite[at]
        best = totals[np.arange(num_gpus + 1), at]
    if not np.isfinite(best[num_gpus]):
        raise ValueError(f"the smallest sizes of {len(values)} jobs exceed {num_gpus} GPUs; a policy is wrong")
    sizes = np.zeros(len(values), dtype=np.int64)
    left = num_gpus
    for job in reversed(range(len(values))):
        sizes[job] = chosen[job, left]
        left -= sizes[job]
    return sizes
