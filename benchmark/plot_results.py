"""The plot of a comparison's JSON file: ``python -m benchmark.plot_results RESULT.json [--log RESULT.log] PLOT.svg``.

A run that was cut after its timed steps is missing in the JSON file; its step is taken from the call's log.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
from pathlib import Path

from benchmark.common import SHAPES, model_flops

_NAMES = {
    "patrickstar": "PatrickStar", "hf-trainer": "PatrickStar in HF's Trainer", "fsdp2": "FSDP2, resident",
    "fsdp2-offload": "FSDP2, CPUOffloadPolicy", "deepspeed-zero3-offload": "DeepSpeed ZeRO-3, offloaded",
}  # fmt: skip


def step_seconds(result: dict, log: str) -> dict[str, float]:
    """Median of the timed steps by system, from ``result`` or else from ``log``."""
    seconds = {run["system"]: run["step_seconds"] for run in result["systems"] if run["outcome"] == "trained"}
    timed: dict[str, list[float]] = {}
    for system, value in re.findall(r"^(\S+): timed step \d+: ([\d.]+) s", log, re.MULTILINE):
        timed.setdefault(system, []).append(float(value))
    return {**{system: statistics.median(values) for system, values in timed.items()}, **seconds}


def plot(result: dict, log: str, path: Path) -> None:
    """Seconds per step and GPU memory by system, on the largest number of ranks.

    Where the memory's peak is unknown, the system's limit is drawn hollow.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = path.name
    shape = dataclasses.replace(SHAPES[result["model"]], length=result["length"])
    flops = model_flops(shape, result["batch"])
    peaks = {run["system"]: run["device_peak_bytes"] / 2**30 for run in result["systems"] if run["device_peak_bytes"]}
    limits = {run["system"]: run["gpu_limit_bytes"] for run in result["systems"]}
    steps = {system: value for system, value in step_seconds(result, log).items() if system in _NAMES}
    size = (9, 0.5 * len(steps) + 1.3)
    figure, (times, memory) = pyplot.subplots(1, 2, figsize=size, layout="constrained", sharey=True)
    for position, (system, seconds) in enumerate(steps.items()):
        color = "tab:blue" if system == "patrickstar" else "tab:gray"
        times.barh(position, seconds, color=color, height=0.6)
        text = f"{seconds:.2f} s, {flops / seconds / 1e12:.0f} TFLOPS"
        times.text(seconds, position, f" {text}", va="center", fontsize=9)
        gib = peaks.get(system, (limits.get(system) or limits.get("patrickstar") or 0) / 2**30)
        is_measured = system in peaks
        memory.barh(position, gib, color=color if is_measured else "none", edgecolor=color, height=0.6)
        memory.text(
            gib, position, f" {gib:.1f} GiB" if is_measured else f" limit {gib:.0f} GiB", va="center", fontsize=9
        )
    times.set_yticks(range(len(steps)), [_NAMES[system] for system in steps])
    times.invert_yaxis()
    times.set_xlabel("seconds per step, less is better")
    memory.set_xlabel("GPU memory at its peak, GiB")
    for axes in (times, memory):
        axes.set_xlim(right=1.35 * axes.get_xlim()[1] / 1.05)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"GPT {result['num_parameters'] / 1e9:.3g} B on one {result['gpu']}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.plot_results", description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--log", type=Path)
    parser.add_argument("plot", type=Path)
    args = parser.parse_args()
    log = args.log.read_text(encoding="utf-8") if args.log else ""
    plot(json.loads(args.result.read_text(encoding="utf-8")), log, args.plot)


if __name__ == "__main__":
    main()
