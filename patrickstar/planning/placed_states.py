"""Placement of optimizer states once activation memory is known, as by the engine (csrc/engine/residency.cpp)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from patrickstar import _C


def states_on_device(
    layout: _C.Layout, first: Sequence[_C.Tier], accesses: list[dict[str, Any]], budget: _C.DeviceBudget | None
) -> list[bool]:
    """By chunk, True if its states rest on the device.

    Args:
        layout: of the chunks.
        first: resting tiers before activation memory was known.
        accesses: of the step.
        budget: of device memory; None: states move to no device (``use_hybrid_adam``).
    """
    on_device = [tier == _C.Tier.DEVICE for tier in first]
    count = 0 if budget is None else _C.num_device_state_chunks(layout, accesses, budget)
    moved_in = set(_C.chunks_that_move_in(layout, count, on_device))
    return [at or index in moved_in for index, at in enumerate(on_device)]


def earliest_updates(
    layout: _C.Layout,
    tiers: Sequence[_C.Tier],
    room_bytes: int,
    start: _C.UpdateStart,
    scale: _C.ExpectedScale = _C.ExpectedScale.EXACT,
) -> list[_C.Recipe]:
    """By chunk, the earliest update that memory allows.

    Args:
        layout: of the chunks.
        tiers: resting tiers of states.
        room_bytes: host memory for new values of speculative updates.
        start: earliest start of updates that the step allows.
        scale: gradient scale that they assume.
    """
    ahead = _C.choose_ahead(layout, tiers, room_bytes if start == _C.UpdateStart.SPECULATIVE else 0)
    chunks = (layout.chunk(index) for index in range(layout.num_chunks))
    return [
        _C.earliest_recipe(chunk["trainable"], chunk["dtype"], tier, start, part, scale)
        for chunk, tier, part in zip(chunks, tiers, ahead, strict=True)
    ]
