"""Largest micro-batch that fits, extrapolated from a measured step with fewer samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from patrickstar import _C

MARGIN_RATIO = 0.05
"""Share of the device's limit left free: activation memory is not exactly proportional to the samples."""


def most_samples(
    layout: _C.Layout,
    accesses: Sequence[Mapping[str, Any]],
    *,
    samples: int,
    upto: int,
    limit_bytes: int,
    host_bytes: int,
    disk_bytes: int = 0,
    backwards: _C.Backwards = _C.Backwards.SEVERAL,
) -> int:
    """Returns the most samples with which every access of a step fits the device beside its chunks.

    Activation memory is assumed proportional to the samples, which overestimates its constant part. Optimizer states
    are evicted for it as far as the host has room.

    Args:
        layout: the future chunks.
        accesses: accesses of the measured step (``Runtime.timeline``).
        samples: of a measured micro-batch, which fits; the result is at least as large.
        upto: upper limit of the result.
        limit_bytes: device bytes for chunk buffers and activations (``limit_bytes`` of ``Runtime.plan_problem``).
        host_bytes: for chunks.
        disk_bytes: for optimizer states (``disk_memory.size``).
        backwards: of a step.

    Raises:
        ValueError: ``samples`` is below 1.
    """
    if samples < 1:
        raise ValueError(f"samples is {samples}; give those of a micro-batch that was measured, at least 1")
    known = {chunk for access in accesses for chunk, *_ in access["uses"]}
    if upto <= samples or limit_bytes >= _C.UNLIMITED or not known or max(known) >= layout.num_chunks:
        return max(min(samples, upto), 1)
    resting_tiers, _, _ = _C.initial_placement(layout, host_bytes, limit_bytes, backwards, disk_bytes)
    on_device = [resting_tier == _C.Tier.DEVICE for resting_tier in resting_tiers]
    budget = _C.DeviceBudget()
    budget.limit_bytes, budget.backwards = limit_bytes, backwards
    enough = int(limit_bytes * (1 - MARGIN_RATIO))

    def fit(count: int) -> bool:
        risen = [
            {**access, "activation_peak_bytes": -(-access["activation_peak_bytes"] * count // samples)}
            for access in accesses
        ]
        problem = _C.pose_problem(layout, risen, on_device, budget)
        return _C.make_plan(_C.PlanProblem(risen, **problem))["least_limit_bytes"] <= enough

    least, most = samples, upto  # least fits; most may not
    while least < most:
        middle = (least + most + 1) // 2
        if fit(middle):
            least = middle
        else:
            most = middle - 1
    return least
