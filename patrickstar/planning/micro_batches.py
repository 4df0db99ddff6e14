"""How many samples a micro-batch may have, by what a step with fewer of them was seen to take of the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from patrickstar import _C

MARGIN_RATIO = 0.05
"""Of the device's limit, what is left free: a tide is not exactly proportional to its samples."""


def most_samples(
    layout: _C.Layout,
    moments: Sequence[Mapping[str, Any]],
    *,
    samples: int,
    upto: int,
    limit_bytes: int,
    host_bytes: int,
    disk_bytes: int = 0,
    backwards: _C.Backwards = _C.Backwards.SEVERAL,
) -> int:
    """The most samples with which each moment of a step fits the device beside the chunks that it uses.

    The tide is taken to grow in proportion to the samples. It consists of what grows so and of what does not grow, so
    that more samples take no more than that. Optimizer states leave the device for them, as far as the host has room.

    Args:
        layout: of the chunks that will be there.
        moments: of the step that was measured (``Runtime.timeline``).
        samples: of a micro-batch in it; the answer is no less, since that many were seen to fit.
        upto: the answer is no more.
        limit_bytes: of the device, for payloads and the tide (``limit_bytes`` of ``Runtime.plan_problem``).
        host_bytes: for chunks.
        disk_bytes: for optimizer states (``disk_memory.size``).
        backwards: of a step.

    Raises:
        ValueError: ``samples`` is below 1.
    """
    if samples < 1:
        raise ValueError(f"samples is {samples}; give those of a micro-batch that was measured, at least 1")
    known = {chunk for moment in moments for chunk, *_ in moment["accesses"]}
    if upto <= samples or limit_bytes >= _C.UNLIMITED or not known or max(known) >= layout.num_chunks:
        return max(min(samples, upto), 1)
    homes, _, _ = _C.initial_placement(layout, host_bytes, limit_bytes, backwards, disk_bytes)
    on_device = [home == _C.Tier.DEVICE for home in homes]
    budget = _C.DeviceBudget()
    budget.limit_bytes, budget.backwards = limit_bytes, backwards
    enough = int(limit_bytes * (1 - MARGIN_RATIO))

    def fit(count: int) -> bool:
        risen = [{**moment, "tide_peak_bytes": -(-moment["tide_peak_bytes"] * count // samples)} for moment in moments]
        problem = _C.pose_problem(layout, risen, on_device, budget)
        return _C.make_plan(risen, **problem)["least_limit_bytes"] <= enough

    least, most = samples, upto  # what fits, and perhaps does not
    while least < most:
        middle = (least + most + 1) // 2
        if fit(middle):
            least = middle
        else:
            most = middle - 1
    return least
