"""Draws a traced step: device memory by owner, and the work of each queue, over time. Needs matplotlib."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from patrickstar import _C
from patrickstar.profiling.layers import ChunkLayers, short_names
from patrickstar.profiling.summary import CAUSES, show_seconds

_STATES = (_C.ArrayKind.MASTER, _C.ArrayKind.MOMENTUM, _C.ArrayKind.VARIANCE)
_VALUES = (
    _C.ArrayKind.PARAM,
    _C.ArrayKind.GRAD,
    _C.ArrayKind.GRAD_SUM,
    _C.ArrayKind.PARAM_SHARD,
    _C.ArrayKind.GRAD_SHARD,
    _C.ArrayKind.QUANTIZED,
)
_COLORS = {
    "optimizer states": "#4e5d94",
    "param": "#7aa6c2",
    "grad": "#e0a458",
    "grad_sum": "#c9712f",
    "param_shard": "#a9c9db",
    "grad_shard": "#ecc791",
    "quantized": "#8d9b6a",
    "idle buffers": "#d9d9d9",
    "activations": "#9fd3c7",
}
_BUDGET_COLOR = "#c0392b"
_COMPUTE_COLOR = "#8fa396"
_STALL_COLORS = dict(
    zip(CAUSES.values(), ("#d1495b", "#edae49", "#8f2d56", "#6b4c9a", "#a26769", "#30638e", "#3d7068"), strict=True)
)
_QUEUES = {
    "upload": ((_C.Track.UPLOAD,), "#7aa6c2"),
    "download": ((_C.Track.DOWNLOAD,), "#e0a458"),
    "gather": ((_C.Track.GATHER,), "#a9c9db"),
    "scatter": ((_C.Track.SCATTER,), "#ecc791"),
    "Adam on the host": ((_C.Track.HOST_ADAM, _C.Track.HOST_STATES, _C.Track.HOST_OPEN), "#4e5d94"),
    "Adam on the device": ((_C.Track.DEVICE_ADAM,), "#4e5d94"),
    "disk reads": ((_C.Track.DISK_READ,), "#7aa6c2"),
    "Adam of states on disk": ((_C.Track.DISK_ADAM,), "#4e5d94"),
    "disk writes": ((_C.Track.DISK_WRITE,), "#e0a458"),
    "visits of states": ((_C.Track.ROUND_TRIP,), "#7aa6c2"),
}
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_LABELS_PER_INCH = 4.5
"""Layer names that fit side by side, per inch of the picture's width."""


def draw(trace: dict[str, Any], step: int, path: Path, layers: ChunkLayers) -> None:
    """Writes the picture; the suffix of ``path`` selects the format (svg, png, pdf).

    Upper part: device memory by owner at each access's peak of activation memory, with layer names. Lower part: the
    work of each queue and the stalls of the compute queue. The time axis is in milliseconds.
    """
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    memory, queues = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    draw_memory(memory, trace)
    draw_queues(queues, trace)
    name_layers(memory, trace, layers)
    figure.suptitle(f"step {step}: {show_seconds(trace['seconds'])}")
    figure.savefig(path)


def memory_bands(trace: dict[str, Any]) -> dict[str, list[int]]:
    """Returns bytes by owner for each access, in stacking order."""
    bands: dict[str, list[int]] = {name: [] for name in _COLORS}
    for access in trace["accesses"]:
        chunk_buffers = access["chunk_buffer_bytes"]
        bands["optimizer states"].append(sum(chunk_buffers[kind] for kind in _STATES))
        for kind in _VALUES:
            bands[kind.name.lower()].append(chunk_buffers[kind])
        bands["idle buffers"].append(access["idle_bytes"])
        bands["activations"].append(access["activation_bytes"])
    return bands


def layer_spans(trace: dict[str, Any], layers: ChunkLayers) -> list[tuple[str, float, float]]:
    """Returns (label, begin, end) in milliseconds for each run of accesses with the same layers, within forward or
    backward.
    """
    accesses = trace["accesses"]
    labels = map(short_names, layers.of_accesses(accesses))
    named = [(access["phase"], label, access) for access, label in zip(accesses, labels, strict=True)]
    spans = []
    for (_, label), group in itertools.groupby(named, lambda entry: entry[:2]):
        together = [access for *_, access in group]
        end = together[-1]["begin_seconds"] + together[-1]["seconds"]
        spans.append((label, together[0]["begin_seconds"] * 1e3, end * 1e3))
    return spans


def thinned(spans: Iterable[tuple[str, float, float]], least_distance: float) -> list[tuple[str, float]]:
    """Returns (label, middle) of the spans whose middles are at least ``least_distance`` apart, from the left. Spans
    without a label are skipped.
    """
    kept: list[tuple[str, float]] = []
    for label, begin, end in spans:
        middle = (begin + end) / 2
        if label and (not kept or middle - kept[-1][1] >= least_distance):
            kept.append((label, middle))
    return kept


def draw_memory(axes: Axes, trace: dict[str, Any]) -> None:
    """Draws the owners of device memory, access by access, and the budget."""
    bands = memory_bands(trace)
    limit = trace["device_limit_bytes"]
    limited = limit != _C.UNLIMITED
    highest = max([sum(column) for column in zip(*bands.values(), strict=True)] + [limit if limited else 1])
    unit, size = next((unit, size) for unit, size in _UNITS if highest >= size)
    shown = {name: [value / size for value in values] for name, values in bands.items() if any(values)}
    if shown:
        edges = [access["begin_seconds"] * 1e3 for access in trace["accesses"]]
        axes.stackplot(
            [*edges, trace["optimizer_begin_seconds"] * 1e3],
            *([*values, values[-1]] for values in shown.values()),
            labels=list(shown),
            colors=[_COLORS[name] for name in shown],
            step="post",
            linewidth=0,
        )
    if limited:
        axes.axhline(limit / size, color=_BUDGET_COLOR, linestyle="--", linewidth=1.5, label="device budget")
    axes.set_ylabel(f"device memory, {unit}")
    axes.set_ylim(0, highest / size * 1.08)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, reverse=True)
    _mark_backward(axes, trace)


def draw_queues(axes: Axes, trace: dict[str, Any]) -> None:
    """Draws the work of each queue, one row per queue, compute at the top."""
    rows = ["compute"]
    axes.broken_barh([_bar(access) for access in trace["accesses"]], (-0.4, 0.8), color=_COMPUTE_COLOR, linewidth=0)
    optimizer = (trace["optimizer_begin_seconds"] * 1e3, (trace["seconds"] - trace["optimizer_begin_seconds"]) * 1e3)
    axes.broken_barh([optimizer], (-0.4, 0.8), color=_COMPUTE_COLOR, linewidth=0, label="compute")
    for cause, name in CAUSES.items():
        waits = [_bar(span) for span in trace["spans"] if span["track"] == _C.Track.STALL and span["cause"] == cause]
        if waits:
            axes.broken_barh(waits, (-0.4, 0.8), color=_STALL_COLORS[name], linewidth=0, label=f"waits: {name}")
    for name, (tracks, color) in _QUEUES.items():
        bars = [_bar(span) for span in trace["spans"] if span["track"] in tracks]
        if bars:
            axes.broken_barh(bars, (len(rows) - 0.4, 0.8), color=color, linewidth=0)
            rows.append(name)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    ends = [span["begin_seconds"] + span["seconds"] for span in trace["spans"]]
    axes.set_xlim(0, max([trace["seconds"], *ends]) * 1e3)
    axes.axvline(trace["seconds"] * 1e3, color=_ink(), linewidth=1)
    axes.set_xlabel("time, ms; the line is the end of the step")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def name_layers(axes: Axes, trace: dict[str, Any], layers: ChunkLayers) -> None:
    """Names the layers above ``axes``, whose limits must be set; as many as fit."""
    begin, end = axes.get_xlim()
    most = _LABELS_PER_INCH * axes.figure.get_size_inches()[0]
    kept = thinned(layer_spans(trace, layers), (end - begin) / most)
    above = axes.secondary_xaxis("top")
    above.set_xticks([middle for _, middle in kept], [label for label, _ in kept], rotation=90, fontsize=8)


def _bar(span: dict[str, Any]) -> tuple[float, float]:
    return span["begin_seconds"] * 1e3, span["seconds"] * 1e3


def _ink() -> str:
    return str(matplotlib.rcParams["text.color"])


def _mark_backward(axes: Axes, trace: dict[str, Any]) -> None:
    for before, access in itertools.pairwise(trace["accesses"]):
        if before["phase"] != access["phase"]:
            begin = access["begin_seconds"] * 1e3
            axes.axvline(begin, color=_ink(), linestyle=":", linewidth=1)
            name = access["phase"].name.lower()
            axes.text(begin, 0.985, f" {name}", transform=axes.get_xaxis_transform(), va="top", fontsize=9)
