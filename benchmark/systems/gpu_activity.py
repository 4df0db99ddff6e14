"""What the GPU does in one step, from PyTorch's profiler: how long it computes, and what is copied.

A moment is *computing* when at least one kernel other than a collective runs on the GPU. What is left of a step is time
in which the GPU waits: for a transfer, for an optimizer on the host, or for the launching thread. This is measured in
the same way for every system, whatever it calls its streams.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

_DIRECTIONS = {"HtoD": "uploaded", "DtoH": "downloaded"}


def profile_step(step: Callable[[], None]) -> dict[str, Any]:
    """Runs ``step`` twice, the second time under the profiler, and returns :func:`summarize` of that. ``step`` has to
    synchronise.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with profile(
            activities=[ProfilerActivity.CUDA],
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace)),
        ) as profiler:
            for _ in range(2):
                step()
                profiler.step()
        return summarize(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"])


def summarize(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of computing, and bytes and seconds of copies by direction, of a trace in Chrome's format.

    Raises:
        RuntimeError: there is no kernel in it.
    """
    kernels: list[tuple[float, float]] = []
    figures: dict[str, Any] = {}
    for direction in _DIRECTIONS.values():
        figures |= {f"{direction}_bytes": 0, f"{direction}_seconds": 0.0}
    for event in events:
        category, name = event.get("cat"), event.get("name", "")
        if event.get("ph") != "X":
            continue
        if category == "kernel" and not name.startswith("nccl"):
            kernels.append((event["ts"], event["ts"] + event["dur"]))
        elif category == "gpu_memcpy":
            for key, direction in _DIRECTIONS.items():
                if key in name:
                    figures[f"{direction}_bytes"] += event.get("args", {}).get("bytes", 0)
                    figures[f"{direction}_seconds"] += event["dur"] / 1e6
    if not kernels:
        raise RuntimeError("the profiler recorded no kernel")
    figures["computing_seconds"] = _covered(kernels) / 1e6
    return figures


def _covered(intervals: list[tuple[float, float]]) -> float:
    """The length of the union."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
