"""The picture of a traced step: device memory under the budget line, and time, over the moments. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from patrickstar import _C
from patrickstar.profiling.summary import CAUSES

_STATES = (_C.ArrayKind.MASTER, _C.ArrayKind.MOMENTUM, _C.ArrayKind.VARIANCE)
_VALUES = (
    _C.ArrayKind.PARAM,
    _C.ArrayKind.GRAD,
    _C.ArrayKind.GRAD_SUM,
    _C.ArrayKind.PARAM_SHARD,
    _C.ArrayKind.GRAD_SHARD,
)
_COLORS = {
    "optimizer states": "#4e5d94",
    "param": "#7aa6c2",
    "grad": "#e0a458",
    "grad_sum": "#c9712f",
    "param_shard": "#a9c9db",
    "grad_shard": "#ecc791",
    "idle slots": "#d9d9d9",
    "tide": "#9fd3c7",
}
_STALL_COLORS = dict(
    zip(CAUSES.values(), ("#d1495b", "#edae49", "#8f2d56", "#6b4c9a", "#a26769", "#30638e", "#3d7068"), strict=True)
)
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def draw(trace: dict[str, Any], step: int, path: Path) -> None:
    """Writes the picture; the suffix of ``path`` says the format (svg, png, pdf).

    Above, for each moment: what held the device's memory when its tide was highest. Below: how long the moment lasted,
    and what it waited for.
    """
    figure = Figure(figsize=(12, 7), layout="constrained")
    FigureCanvasAgg(figure)
    memory, time = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    _draw_memory(memory, trace)
    _draw_time(time, trace)
    _mark_backward(memory, trace)
    memory.set_title(f"step {step}: {trace['seconds']:.3f} s")
    figure.savefig(path)


def memory_bands(trace: dict[str, Any]) -> dict[str, list[int]]:
    """Bytes by what holds them, for each moment, from the bottom of the picture to its top."""
    bands: dict[str, list[int]] = {name: [] for name in _COLORS}
    for moment in trace["moments"]:
        payloads = moment["payload_bytes"]
        bands["optimizer states"].append(sum(payloads[kind] for kind in _STATES))
        for kind in _VALUES:
            bands[kind.name.lower()].append(payloads[kind])
        bands["idle slots"].append(moment["idle_bytes"])
        bands["tide"].append(moment["tide_bytes"])
    return bands


def stall_bands(trace: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds that each moment waited, by cause; causes that did not occur are left out."""
    begins = [moment["begin_seconds"] for moment in trace["moments"]]
    bands: dict[str, list[float]] = {}
    for span in trace["spans"]:
        begin = span["begin_seconds"]
        if span["track"] != _C.Track.STALL or not begins or begin >= trace["optimizer_begin_seconds"]:
            continue
        index = sum(other <= begin for other in begins) - 1
        if index >= 0:
            bands.setdefault(CAUSES[span["cause"]], [0.0] * len(begins))[index] += span["seconds"]
    return bands


def _steps(values: list[float]) -> list[float]:
    return [*values, values[-1]] if values else [0.0]


def _stack(axes: Axes, bands: dict[str, list[float]], colors: dict[str, str]) -> None:
    shown = {name: values for name, values in bands.items() if any(values)}
    if not shown:
        return
    edges = range(len(next(iter(shown.values()))) + 1)
    axes.stackplot(
        edges,
        *map(_steps, shown.values()),
        labels=list(shown),
        colors=[colors[name] for name in shown],
        step="post",
        linewidth=0,
    )


def _draw_memory(axes: Axes, trace: dict[str, Any]) -> None:
    bands = memory_bands(trace)
    limit = trace["device_limit_bytes"]
    limited = limit != _C.UNLIMITED
    highest = max([sum(column) for column in zip(*bands.values(), strict=True)] + [limit if limited else 1])
    unit, size = next((unit, size) for unit, size in _UNITS if highest >= size)
    _stack(axes, {name: [value / size for value in values] for name, values in bands.items()}, _COLORS)
    if limited:
        axes.axhline(limit / size, color="#c0392b", linestyle="--", linewidth=1.5, label="device budget")
    axes.set_ylabel(f"device memory, {unit}")
    axes.set_ylim(0, highest / size * 1.08)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, reverse=True)


def _draw_time(axes: Axes, trace: dict[str, Any]) -> None:
    seconds = {"compute": [moment["compute_seconds"] for moment in trace["moments"]], **stall_bands(trace)}
    milliseconds = {name: [value * 1e3 for value in values] for name, values in seconds.items()}
    _stack(axes, milliseconds, {"compute": "#b8c4bb", **_STALL_COLORS})
    axes.set_ylabel("time, ms")
    axes.set_xlabel("moment")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, reverse=True)


def _mark_backward(axes: Axes, trace: dict[str, Any]) -> None:
    phases = [moment["phase"] for moment in trace["moments"]]
    axes.set_xlim(0, max(len(phases), 1))
    for index, (before, phase) in enumerate(zip(phases, phases[1:], strict=False), start=1):
        if before != phase:
            axes.axvline(index, color="#444444", linestyle=":", linewidth=1)
            name = phase.name.lower()
            axes.text(index, 1.0, f" {name}", transform=axes.get_xaxis_transform(), va="top", fontsize=9)
