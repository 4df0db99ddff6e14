"""Counts of an engine's work in a step, for benchmarks that print steps one by one.

* early, kept: speculative updates of chunks, and those that the step took over; settled: of these, updates valid for
  all clipping factors near the last; behind: two-phase updates; round trips: the GPU's updates of states that rest on
  the host; in place: parameters whose new value overwrote the old.
* pressed: chunks evicted because something else needed memory; on demand: chunks uploaded when they were needed;
  offloaded: bytes that activation offload moved off the device;
  returned: times that PyTorch's allocator released its cache.
* states: chunks with optimizer states on the device after the step; planned: bytes that the next plan may use there;
  fixed: the part of them that stays throughout; activations: their most memory; peak, reserved: the most memory that
  PyTorch's allocator had in use and reserved in the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from patrickstar import _C

_COUNTERS = {
    "early": "num_speculated_updates", "scale-independent": "num_scale_independent_updates",
    "round trips": "num_updates_round_trip",
    "in place": "num_values_in_place", "pressed": "num_pressure_evictions", "on demand": "num_on_demand_fetches",
    "plans": "num_plans", "up": "uploaded_bytes", "down": "downloaded_bytes", "offloaded": "offloaded_bytes",
}  # fmt: skip
_SUMS = {
    "kept": ("num_updates_host_ahead", "num_updates_host_two_passes_ahead"),
    "behind": ("num_updates_host_two_passes_ahead", "num_updates_host_two_passes"),
}
_LEVELS = ("states", "planned", "fixed", "activations", "peak", "reserved")
_IN_BYTES = ("up", "down", "offloaded", *_LEVELS[1:])


def counts(engine: Any) -> dict[str, int]:
    """Totals since the engine began."""
    report = engine.report()
    found = {name: report[key] for name, key in _COUNTERS.items()}
    found |= {name: sum(report[key] for key in keys) for name, keys in _SUMS.items()}
    if torch.cuda.is_available():
        found["returned"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    return found


def since(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """Differences of two :func:`counts`."""
    return {name: now[name] - before[name] for name in now}


def levels(engine: Any) -> dict[str, int]:
    """Levels after a step; resets the allocator's peaks."""
    runtime = engine._session.runtime
    problem = runtime.plan_problem()
    found = {
        "states": engine.report()["num_device_state_chunks"],
        "planned": problem["limit_bytes"] if problem["limit_bytes"] < _C.UNLIMITED else 0,
        "fixed": problem["fixed_bytes"],
        "activations": max((access["activation_peak_bytes"] for access in runtime.timeline()), default=0),
    }
    if torch.cuda.is_available():
        found |= {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        torch.cuda.reset_peak_memory_stats()
    return found


def in_words(counted: Mapping[str, Any]) -> list[str]:
    """The counts other than 0."""
    names = [name for name in (*_COUNTERS, *_SUMS, "returned", *_LEVELS) if counted.get(name)]
    return [
        f"{name} {counted[name] / 1e9:.1f} GB" if name in _IN_BYTES else f"{name} {counted[name]}" for name in names
    ]
