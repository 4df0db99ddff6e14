"""Converts a traced step to the trace event format of chrome://tracing and https://ui.perfetto.dev.

Format: "Trace Event Format", Google, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Spans are complete events ("X"), memory is counters ("C"), names are metadata ("M"). Times are in microseconds.
"""

from __future__ import annotations

from typing import Any

from patrickstar import _C
from patrickstar.profiling.layers import ChunkLayers, short_names
from patrickstar.profiling.summary import CAUSES

_PID = 1
(
    _COMPUTE,
    _UPLOAD,
    _DOWNLOAD,
    _GATHER,
    _SCATTER,
    _HOST_ADAM,
    _DEVICE_ADAM,
    _DISK_READ,
    _DISK_ADAM,
    _DISK_WRITE,
    _ROUND_TRIP,
) = range(1, 12)
_ROWS = {
    _COMPUTE: "compute",
    _UPLOAD: "upload stream",
    _DOWNLOAD: "download stream",
    _GATHER: "gather stream",
    _SCATTER: "scatter stream",
    _HOST_ADAM: "host Adam",
    _DEVICE_ADAM: "device Adam",
    _DISK_READ: "disk reads",
    _DISK_ADAM: "Adam of states on disk",
    _DISK_WRITE: "disk writes",
    _ROUND_TRIP: "visits of states",
}
_WHERE_USED = (
    _GATHER,
    _SCATTER,
    _DISK_READ,
    _DISK_ADAM,
    _DISK_WRITE,
    _ROUND_TRIP,
)  # rows shown only if used: several ranks, a disk, GPU round-trip updates
_ROW_OF = {
    _C.Track.STALL: _COMPUTE,  # nested in the accesses, which are longer
    _C.Track.UPLOAD: _UPLOAD,
    _C.Track.DOWNLOAD: _DOWNLOAD,
    _C.Track.GATHER: _GATHER,
    _C.Track.SCATTER: _SCATTER,
    _C.Track.HOST_ADAM: _HOST_ADAM,
    _C.Track.HOST_STATES: _HOST_ADAM,
    _C.Track.HOST_OPEN: _HOST_ADAM,
    _C.Track.DEVICE_ADAM: _DEVICE_ADAM,
    _C.Track.DISK_READ: _DISK_READ,
    _C.Track.DISK_ADAM: _DISK_ADAM,
    _C.Track.DISK_WRITE: _DISK_WRITE,
    _C.Track.ROUND_TRIP: _ROUND_TRIP,
}
_TRANSFERS = (
    *(_C.Track.UPLOAD, _C.Track.DOWNLOAD, _C.Track.GATHER, _C.Track.SCATTER),
    *(_C.Track.DISK_READ, _C.Track.DISK_WRITE),
)
_WORK_OF = {
    _C.Track.HOST_STATES: "states",
    _C.Track.HOST_OPEN: "open values",
}  # updates of other tracks are labelled Adam

Event = dict[str, Any]


def chrome_trace(trace: dict[str, Any], step: int, layers: ChunkLayers) -> dict[str, Any]:
    """Returns the JSON object of a trace from ``_C.Runtime.take_trace`` of the engine's ``step``-th step."""
    events = [_name("process_name", 0, f"PatrickStar, step {step}")]
    used = {_ROW_OF[span["track"]] for span in trace["spans"]}
    for row, name in _ROWS.items():
        if row in _WHERE_USED and row not in used:
            continue
        events.append(_name("thread_name", row, name))
        events.append({"name": "thread_sort_index", "ph": "M", "pid": _PID, "tid": row, "args": {"sort_index": row}})
    for index, (access, names) in enumerate(zip(trace["accesses"], layers.of_accesses(trace["accesses"]), strict=True)):
        events.append(_access(index, access, names))
    begin, end = trace["optimizer_begin_seconds"], trace["seconds"]
    skipped = trace["outcome"] == _C.StepOutcome.SKIPPED
    name = "optimizer step (skipped)" if skipped else "optimizer step"
    events.append(_complete(name, "access", _COMPUTE, begin, end - begin, {}))
    events += [_span(span) for span in trace["spans"]]
    for sample in trace["samples"]:
        events.append(_counter("device memory", sample["seconds"], _bands(sample)))
    if trace["device_limit_bytes"] != _C.UNLIMITED:
        for seconds in (0.0, end):
            events.append(_counter("device budget", seconds, {"budget": trace["device_limit_bytes"]}))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"step": step, "seconds": end}}


def _access(index: int, access: dict[str, Any], layers: tuple[str, ...]) -> Event:
    chunks = [chunk for chunk, _ in access["acquired"]]
    args = {
        "access": index,
        "layers": list(layers),
        "chunks": chunks,
        "compute_ms": access["compute_seconds"] * 1e3,
        "stalled_ms": access["stalled_seconds"] * 1e3,
        "activation_peak_bytes": access["activation_peak_bytes"],
    }
    name = f"{access['phase'].name.lower()} {index}: {short_names(layers) or 'no layer'}"
    return _complete(name, "access", _COMPUTE, access["begin_seconds"], access["seconds"], args)


def _span(span: dict[str, Any]) -> Event:
    track = span["track"]
    array = f"chunk {span['chunk']} {span['kind'].name.lower()}" if span["chunk"] >= 0 else ""
    args: dict[str, Any] = {}
    if track == _C.Track.STALL:
        name, category = f"stall: {CAUSES[span['cause']]}", "stall"
        if array:
            args["array"] = array
    elif track in _TRANSFERS:
        whose = f"chunk {span['chunk']} states" if track in (_C.Track.DISK_READ, _C.Track.DISK_WRITE) else array
        name, category = whose or "activation", "transfer"
        args["bytes"] = span["num_bytes"]
        args["GB/s"] = span["num_bytes"] / max(span["seconds"], 1e-9) / 1e9
    else:
        work = _WORK_OF.get(track, "Adam")
        name, category = f"{work} from chunk {span['chunk']}", "adam"
        if span["owner"] == _C.SpanOwner.STEP_BEFORE:
            name += ", of the step before"
        if span["dropped"]:
            name += ", dropped"
        args["parameters"] = span["numel"]
        args["Gparam/s"] = span["numel"] / max(span["seconds"], 1e-9) / 1e9
    return _complete(name, category, _ROW_OF[track], span["begin_seconds"], span["seconds"], args)


def _bands(sample: dict[str, Any]) -> dict[str, int]:
    bands = {kind.name.lower(): num_bytes for kind, num_bytes in sample["chunk_buffer_bytes"].items()}
    return {**bands, "idle buffers": sample["idle_bytes"], "activations": sample["activation_bytes"]}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e9) / 1e3


def _complete(name: str, category: str, row: int, begin: float, seconds: float, args: dict[str, Any]) -> Event:
    # Both ends are rounded, so that adjacent and nested spans stay so in the file.
    start, end = _microseconds(begin), _microseconds(begin + seconds)
    duration = round(end - start, 3)
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": _PID,
        "tid": row,
        "ts": start,
        "dur": duration,
        "args": args,
    }


def _counter(name: str, seconds: float, values: dict[str, int]) -> Event:
    return {"name": name, "ph": "C", "pid": _PID, "tid": 0, "ts": _microseconds(seconds), "args": values}


def _name(what: str, row: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": _PID, "tid": row, "args": {"name": name}}
