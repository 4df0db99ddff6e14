"""What the GPU does in one step, from PyTorch's profiler: how long it computes, and what is copied.

A moment is *computing* when at least one kernel other than a collective runs on the GPU. What is left of a step is time
in which the GPU waits: for a transfer, for a collective, for an optimizer on the host, or for the launching thread.
This is measured in the same way for every system, whatever it calls its streams. NCCL's kernels occupy the GPU while
they wait for other ranks, so they are no computing; the time in which nothing but them runs is a figure of its own.
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

_LAUNCH_MICROSECONDS = 20  # of a gap: longer ones are not the pause between two kernels that were queued
_NUM_GAPS = 24
_NUM_KERNELS = 15
_COLLECTIVE_PREFIX = "nccl"
_DIRECTIONS = {"HtoD": "uploaded", "DtoH": "downloaded"}

NUM_PROFILED_STEPS = 2
"""How often :func:`profile_step` runs a step."""


def profile_step(step: Callable[[], None]) -> dict[str, Any]:
    """Runs ``step`` twice, the second time under the profiler, and returns :func:`summarize` of that, with
    ``"kernels"``, the :func:`longest_kernels`. ``step`` has to synchronise.
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
    """Seconds of computing and of nothing but collectives, bytes and seconds of copies by direction, and the longest
    gaps between kernels other than collectives, of a trace in Chrome's format.

    Raises:
        RuntimeError: there is no kernel in it.
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
    """The kernels, collectives too, that took most of the time of a trace in Chrome's format: ``name``, ``seconds`` of
    all that have it, which may have run side by side, and their ``number``; the longest first.
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
    """Seconds that the union of all kernels takes, and seconds without any, by the kernels on both sides and by whether
    the gap is longer than a launch takes.
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
    """The kernel's name without namespaces' and templates' arguments, as far as it tells kernels apart."""
    functor = re.search(r"(\w*[Ff]unctor\w*|\w+_kernel_cuda\w*)", kernel)
    return functor.group(1) if functor else re.split(r"[<(]", kernel.removeprefix("void "), maxsplit=1)[0][-60:]
