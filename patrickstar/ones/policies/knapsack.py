"""The best number of GPUs of every job, if the value of an allocation is the sum of its jobs' values."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_MOST_STATES = 10**7
_WORTH_EQUAL_SHARES = 0.95  # value of equal shares, over that of the best ones


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
            totals = padded[_places(num_gpus, most)] + row[: most + 1]
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


def with_equal_shares(sizes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """These sizes, or equal shares of the same GPUs for jobs with equal values, where that is worth nearly as much.

    Their sizes then differ by at most one; of equal jobs the first ones have the larger share.

    Args:
        sizes: of each job; int64 ``[jobs]``.
        values: as in :func:`best_sizes`.
    """
    shared, alike = sizes.copy(), collections.defaultdict(list)
    for job, row in enumerate(values):
        alike[row.tobytes()].append(job)
    for jobs in alike.values():
        share, rest = divmod(int(sizes[jobs].sum()), len(jobs))
        equal = share + (np.arange(len(jobs)) < rest)
        if values[jobs, equal].sum() >= _WORTH_EQUAL_SHARES * values[jobs, sizes[jobs]].sum():
            shared[jobs] = equal
    return shared


@functools.lru_cache(maxsize=16)
def _places(num_gpus: int, most: int) -> np.ndarray:
    """Places of ``g - n`` GPUs, for ``g`` up to ``num_gpus`` and ``n`` up to ``most``, in a row padded by ``most``."""
    return most + np.arange(num_gpus + 1)[:, None] - np.arange(most + 1)


class Configuration(NamedTuple):
    """A number of GPUs of one type for a job, and its value."""

    value: float
    num_gpus: int
    kind: int = 0
    """Index of the type."""


def best_configurations(offers: Sequence[Sequence[Configuration]], num_gpus: Sequence[int]) -> list[Configuration]:
    """Chooses a configuration for each job so that the sum of values is the largest, exactly.

    Dynamic programming over numbers of GPUs of all types, for few configurations per job. The integer linear program
    of the same choice has the same optimum.

    Args:
        offers: configurations of each job, among them one without GPUs; of equal values the first is chosen.
        num_gpus: of the cluster, by type.

    Raises:
        ValueError: the products of numbers of GPUs are too many for dynamic programming.
    """
    shape = tuple(count + 1 for count in num_gpus)
    if math.prod(shape) > _MOST_STATES:
        raise ValueError(
            f"{' x '.join(map(str, num_gpus))} GPUs of {len(shape)} types are {math.prod(shape)} states for dynamic "
            f"programming, which takes {_MOST_STATES}; simulate a smaller cluster"
        )
    best = np.zeros(shape)  # of the jobs so far, with at most so many GPUs
    chosen = np.zeros((len(offers), *shape), dtype=np.int16)
    for job, configurations in enumerate(offers):
        totals = np.full(shape, -np.inf)
        for index, one in enumerate(configurations):
            with_it = best[_along(one.kind, slice(shape[one.kind] - one.num_gpus))] + one.value
            there = _along(one.kind, slice(one.num_gpus, None))
            is_better = with_it > totals[there]
            np.copyto(totals[there], with_it, where=is_better)
            np.copyto(chosen[job][there], index, where=is_better)
        best = totals
    found, left = [], list(num_gpus)
    for job in reversed(range(len(offers))):
        one = offers[job][chosen[(job, *left)]]
        left[one.kind] -= one.num_gpus
        found.append(one)
    return found[::-1]


def _along(axis: int, part: slice) -> tuple[slice, ...]:
    return (slice(None),) * axis + (part,)
