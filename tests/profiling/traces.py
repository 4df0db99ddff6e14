import dataclasses
import statistics
from typing import Any

import pytest
import torch

from patrickstar import _C
from patrickstar.profiling import ChunkLayers
from tests.models import Case
from tests.training import Run, train

QUEUES = (_C.Track.STALL, _C.Track.UPLOAD, _C.Track.DOWNLOAD, _C.Track.HOST_ADAM, _C.Track.DEVICE_ADAM)
ROUNDING = 1e-9  # seconds: differences and sums of float64
CLOCKS = 1e-3 if torch.cuda.is_available() else ROUNDING  # seconds: the host's clock on the axis of the device's


@dataclasses.dataclass
class Traced:
    run: Run
    trace: dict[str, Any]
    before: dict[str, Any]
    """The engine's report when the step began; its peaks are of the step alone."""
    after: dict[str, Any]
    timeline: list[dict[str, Any]]
    layers: ChunkLayers


def traced(case: Case, config: dict[str, Any], step: int = 4, before_step=None, **kwargs: Any) -> Traced:
    """Trains for ``step + 2`` steps with the ``step``-th (from 0) traced."""
    found: dict[str, Any] = {}

    def observe(engine, index):
        runtime = engine._session.runtime
        if index == step + 1:
            found.update(after=engine.report(), timeline=runtime.timeline(), trace=runtime.take_trace())
            found.update(layers=engine._session.chunk_layers)
            assert runtime.take_trace() is None
        if before_step is not None:
            before_step(engine, index)
        if index == step:
            assert runtime.take_trace() is None
            runtime.start_trace()
            engine.reset_report()
            found["before"] = engine.report()

    run = train(case, config, steps=step + 2, before_step=observe, **kwargs)
    return Traced(run, **found)


def total_bytes(sample: dict[str, Any]) -> int:
    return sample["activation_bytes"] + sample["idle_bytes"] + sum(sample["chunk_buffer_bytes"].values())


def check(result: Traced) -> None:
    trace = result.trace
    check_spans(trace)
    check_accesses(trace, result.timeline)
    check_memory(result)
    check_order(trace)
    for track, counter in ((_C.Track.UPLOAD, "uploaded_bytes"), (_C.Track.DOWNLOAD, "downloaded_bytes")):
        moved = sum(span["num_bytes"] for span in trace["spans"] if span["track"] == track)
        assert moved == result.after[counter] - result.before[counter]


def check_spans(trace: dict[str, Any]) -> None:
    for track in QUEUES:
        end = 0.0
        for span in (span for span in trace["spans"] if span["track"] == track):
            assert span["begin_seconds"] >= end - ROUNDING
            assert span["seconds"] >= 0
            end = span["begin_seconds"] + span["seconds"]
            if track in (_C.Track.STALL, _C.Track.DEVICE_ADAM):
                assert end <= trace["seconds"] + ROUNDING
            assert (span["cause"] == _C.StallCause.NONE) == (track != _C.Track.STALL)
            if track in (_C.Track.UPLOAD, _C.Track.DOWNLOAD):
                assert span["num_bytes"] > 0
                assert span["chunk"] >= 0
            if track in (_C.Track.HOST_ADAM, _C.Track.DEVICE_ADAM):
                assert span["numel"] > 0


def check_accesses(trace: dict[str, Any], timeline: list[dict[str, Any]]) -> None:
    accesses = trace["accesses"]
    assert [access["phase"] for access in accesses] == [access["phase"] for access in timeline]
    assert [access["activation_peak_bytes"] for access in accesses] == [
        access["activation_peak_bytes"] for access in timeline
    ]
    ends = [access["begin_seconds"] for access in accesses[1:]] + [trace["optimizer_begin_seconds"]]
    assert accesses[0]["begin_seconds"] >= 0
    assert trace["optimizer_begin_seconds"] <= trace["seconds"]
    stalls = [span for span in trace["spans"] if span["track"] == _C.Track.STALL]
    for access, end in zip(accesses, ends, strict=True):
        begin = access["begin_seconds"]
        assert begin + access["seconds"] == pytest.approx(end, abs=ROUNDING)
        inside = sum(span["seconds"] for span in stalls if begin <= span["begin_seconds"] < end)
        assert access["stalled_seconds"] == pytest.approx(inside, abs=ROUNDING)
        assert access["compute_seconds"] == pytest.approx(access["seconds"] - inside, abs=ROUNDING)
        assert access["compute_seconds"] >= 0
        acquired = {(chunk, kind) for chunk, kind in access["acquired"]}
        assert acquired


def is_of(span: dict[str, Any], other: dict[str, Any]) -> bool:
    return (span["chunk"], span["kind"]) == (other["chunk"], other["kind"])


def check_order(trace: dict[str, Any]) -> None:
    """An update on the host begins when its gradient has come down; a wait for an upload ends when that is over."""
    spans = trace["spans"]
    gradients = (_C.ArrayKind.GRAD, _C.ArrayKind.GRAD_SUM)
    arrived = {
        span["chunk"]: span["begin_seconds"] + span["seconds"]
        for span in spans
        if span["track"] == _C.Track.DOWNLOAD and span["kind"] in gradients
    }
    for span in spans:
        mine = span["owner"] == _C.SpanOwner.THIS_STEP and not span["dropped"]
        if span["track"] == _C.Track.HOST_ADAM and mine:
            assert span["begin_seconds"] >= arrived[span["chunk"]] - CLOCKS
        if span["cause"] == _C.StallCause.UPLOAD:
            uploads = [s for s in spans if s["track"] == _C.Track.UPLOAD and is_of(s, span)]
            ends = [upload["begin_seconds"] + upload["seconds"] for upload in uploads]
            assert not ends or min(ends) <= span["begin_seconds"] + span["seconds"] + CLOCKS


def check_memory(result: Traced) -> None:
    """Activation memory and device buffers never exceed the budget, at each instant and at each access's highest."""
    peak, limit = result.after["device_peak_bytes"], result.trace["device_limit_bytes"]
    assert limit == result.after["device_budget_bytes"]
    for sample in [*result.trace["samples"], *result.trace["accesses"]]:
        assert total_bytes(sample) <= peak <= limit
        assert all(num_bytes >= 0 for num_bytes in sample["chunk_buffer_bytes"].values())


def median_gbps(spans, track):
    """The median rate of a track's transfers that are at least half as large as its largest."""
    moved = [(s["num_bytes"], s["seconds"]) for s in spans if s["track"] == track]
    largest = max(num_bytes for num_bytes, _ in moved)
    return statistics.median_high(n / s / 1e9 for n, s in moved if 2 * n >= largest)
