"""What an engine did in a step, counted, for benchmarks that tell of steps one by one.

* early, kept: updates of chunks that began in backward, and of these those that the step took over; settled: of these,
  made for all factors near the last one; behind: whose states came after the values; in place: parameters whose new
  value took the old one's place.
* pressed: chunks that left the device because something else needed memory; on demand: that came when they were needed;
  returned: how often PyTorch's allocator gave its cache back.
* states: chunks whose optimizer states are on the device after the step; planned: what the next plan may use there,
  fixed: of this, what stays throughout, tide: what activations take at most; peak, reserved: of PyTorch's allocator,
  the most that was in use in the step, and that it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from patrickstar import _C

_COUNTERS = {
    "early": "num_speculated_updates",
    "settled": "num_settled_updates",
    "visits": "num_updates_visit",
    "in place": "num_values_in_place",
    "pressed": "num_pressure_evictions",
    "on demand": "num_on_demand_fetches",
    "plans": "num_plans",
    "up": "uploaded_bytes",
    "down": "downloaded_bytes",
}
_SUMS = {
    "kept": ("num_updates_host_ahead", "num_updates_host_two_passes_ahead"),
    "behind": ("num_updates_host_two_passes_ahead", "num_updates_host_two_passes"),
}
_LEVELS = ("states", "planned", "fixed", "tide", "peak", "reserved")
_IN_BYTES = ("up", "down", *_LEVELS[1:])


def counts(engine: Any) -> dict[str, int]:
    """Since the engine began."""
    report = engine.report()
    found = {name: report[key] for name, key in _COUNTERS.items()}
    found |= {name: sum(report[key] for key in keys) for name, keys in _SUMS.items()}
    if torch.cuda.is_available():
        found["returned"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    return found


def since(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """What came between two :func:`counts`."""
    return {name: now[name] - before[name] for name in now}


def levels(engine: Any) -> dict[str, int]:
    """After a step; the allocator's peaks begin anew."""
    runtime = engine._session.runtime
    problem = runtime.plan_problem()
    found = {
        "states": engine.report()["num_device_state_chunks"],
        "planned": problem["limit_bytes"] if problem["limit_bytes"] < _C.UNLIMITED else 0,
        "fixed": problem["fixed_bytes"],
        "tide": max((moment["tide_peak_bytes"] for moment in runtime.timeline()), default=0),
    }
    if torch.cuda.is_available():
        found |= {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        torch.cuda.reset_peak_memory_stats()
    return found


def in_words(counted: Mapping[str, Any]) -> list[str]:
    """Those that are not 0."""
    names = [name for name in (*_COUNTERS, *_SUMS, "returned", *_LEVELS) if counted.get(name)]
    return [
        f"{name} {counted[name] / 1e9:.1f} GB" if name in _IN_BYTES else f"{name} {counted[name]}" for name in names
    ]
