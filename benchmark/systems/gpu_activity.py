"""The GPU's activity in one step, from PyTorch's profiler: seconds of computing, and copied bytes.

The GPU is *computing* while at least one kernel other than a collective runs. In the rest of a step it waits: for a
transfer, a collective, an optimizer on the host, or the launching thread. The measure is the same for every system,
whatever it calls its streams. NCCL's kernels occupy the GPU while they wait for other ranks, so they do not count as
computing; the time in which only they run is a figure of its own.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

_LAUNCH_MICROSECONDS = 20  # a longer gap is no pause between two queued kernels
_NUM_GAPS = 24
_NUM_KERNELS = 15
_COLLECTIVE_PREFIX = "nccl"
_DIRECTIONS = {"HtoD": "uploaded", "DtoH": "downloaded"}

NUM_PROFILED_STEPS = 2
"""Steps that :func:`profile_step` runs."""


def profile_step(step: Callable[[], None]) -> dict[str, Any]:
    """Runs ``step``, which must synchronise, twice; the second run is profiled.

    Returns:
        :func:`summarize` of the trace, and :func:`longest_kernels` as ``"kernels"``.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with profile(
            activities=[ProfilerActivity.CUDA],
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace)),
        ) as profiler:
            for _ in range(NUM_PROFILED_STEPS):
                step()
                profiler.step()
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        return {**summarize(events), "kernels": longest_kernels(events)}


def summarize(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a trace in Chrome's format.

    Seconds of computing and of collectives alone; bytes and seconds of copies by direction; the longest gaps between
    kernels other than collectives.

    Raises:
        RuntimeError: the trace has no kernel.
    """
    kernels: list[tuple[float, float, str]] = []
    collectives: list[tuple[float, float, str]] = []
    figures: dict[str, Any] = {}
    for direction in _DIRECTIONS.values():
        figures |= {f"{direction}_bytes": 0, f"{direction}_seconds": 0.0}
    for event in events:
        category, name = event.get("cat"), event.get("name", "")
        if event.get("ph") != "X":
            continue
        if category == "kernel":
            into = collectives if name.startswith(_COLLECTIVE_PREFIX) else kernels
            into.append((event["ts"], event["ts"] + event["dur"], name))
        elif category == "gpu_memcpy":
            for key, direction in _DIRECTIONS.items():
                if key in name:
                    figures[f"{direction}_bytes"] += event.get("args", {}).get("bytes", 0)
                    figures[f"{direction}_seconds"] += event["dur"] / 1e6
    if not kernels:
        raise RuntimeError("the profiler recorded no kernel")
    figures["computing_seconds"], gaps = _covered_and_gaps(kernels)
    busy_seconds, _ = _covered_and_gaps(kernels + collectives)
    figures["collectives_only_seconds"] = busy_seconds - figures["computing_seconds"]
    figures["gap_seconds"] = sum(gaps.values())
    figures["gaps"] = dict(gaps.most_common(_NUM_GAPS))
    return figures


def longest_kernels(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Kernels of a trace in Chrome's format by name, collectives included, longest sum first.

    ``seconds`` is the sum over the ``number`` of kernels with this ``name``; they may have overlapped.
    """
    seconds, number = Counter[str](), Counter[str]()
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == "kernel":
            name = _short(event["name"])
            seconds[name] += event["dur"] / 1e6
            number[name] += 1
    longest = seconds.most_common(_NUM_KERNELS)
    return [{"name": name, "seconds": total, "number": number[name]} for name, total in longest]


def _covered_and_gaps(kernels: list[tuple[float, float, str]]) -> tuple[float, Counter[str]]:
    """Seconds of the union of all kernels, and of gaps by the kernels on both sides.

    A gap's name begins with ``long`` if it exceeds the time of a launch.
    """
    microseconds, gaps = 0.0, Counter[str]()
    kernels = sorted(kernels)
    reached, last = kernels[0][0], ""
    for begin, end, name in kernels:
        if begin > reached:
            length = "long" if begin - reached > _LAUNCH_MICROSECONDS else "short"
            gaps[f"{length}: {_short(last)} -> {_short(name)}"] += (begin - reached) / 1e6
        microseconds += max(0.0, end - max(begin, reached))
        if end > reached:
            reached, last = end, name
    return microseconds / 1e6, gaps


def _short(kernel: str) -> str:
    """The kernel's name without namespaces and template arguments."""
    functor = re.search(r"(\w*[Ff]unctor\w*|\w+_kernel_cuda\w*)", kernel)
    return functor.group(1) if functor else re.split(r"[<(]", kernel.removeprefix("void "), maxsplit=1)[0][-60:]
