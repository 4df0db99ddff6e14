"""The plot of a recorded comparison: ``python -m benchmark.plot_results RESULT.json [--log RESULT.log] PLOT.svg``.

A system whose run was cut after its timed steps is missing in the JSON file; its step is taken from the call's log.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path

from benchmark.common import SHAPES, model_flops

_NAMES = {
    "patrickstar": "PatrickStar",
    "fsdp2": "FSDP2, resident",
    "fsdp2-offload": "FSDP2, CPUOffloadPolicy",
    "deepspeed-zero3-offload": "DeepSpeed ZeRO-3, offloaded",
}


def step_seconds(result: dict, log: str) -> dict[str, float]:
    """Median of the timed steps by system, of those in ``result`` and of those that only ``log`` has."""
    seconds = {run["system"]: run["step_seconds"] for run in result["systems"] if run["outcome"] == "trained"}
    timed: dict[str, list[float]] = {}
    for system, value in re.findall(r"^(\S+): timed step \d+: ([\d.]+) s", log, re.MULTILINE):
        timed.setdefault(system, []).append(float(value))
    return {**{system: statistics.median(values) for system, values in timed.items()}, **seconds}


def plot(result: dict, log: str, path: Path) -> None:
    """Model TFLOPS by system."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    flops = model_flops(SHAPES[result["model"]], result["batch"])
    peaks = {run["system"]: run["device_peak_bytes"] / 2**30 for run in result["systems"]}
    steps = {system: value for system, value in step_seconds(result, log).items() if system in _NAMES}
    figure, axes = pyplot.subplots(figsize=(8, 0.6 * len(steps) + 1.2), layout="constrained")
    for position, (system, seconds) in enumerate(steps.items()):
        tflops = flops / seconds / 1e12
        axes.barh(position, tflops, color="tab:blue" if system == "patrickstar" else "tab:gray", height=0.6)
        peak = f", {peaks[system]:.0f} GiB GPU" if system in peaks else ""
        axes.text(4, position, f"{tflops:.0f} TFLOPS, {seconds:.2f} s{peak}", va="center", color="white", fontsize=9)
    axes.set_yticks(range(len(steps)), [_NAMES[system] for system in steps])
    axes.invert_yaxis()
    axes.set_xlabel(f"model TFLOPS: GPT {result['num_parameters'] / 1e9:.3g} B, one {result['gpu']}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
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
