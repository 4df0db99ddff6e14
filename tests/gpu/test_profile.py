import json

import pytest
import torch

from patrickstar import _C
from patrickstar.profiling import summarize
from tests.gpu.test_equality import MIB, WIDE
from tests.profiling.traces import check, traced
from tests.training import assert_same, make_config, train

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


def on_track(trace, track):
    return [span for span in trace["spans"] if span["track"] == track]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("speculation", ["always", "never"])
def test_budgets(speculation, accumulate):
    config = make_config("bf16", default_chunk_size=2 * MIB, gradient_clipping=1.0)
    config["optimizer"]["speculation"] = speculation
    plain = train(WIDE, config, steps=6, accumulate=accumulate)
    for share in (4, None):
        torch.cuda.empty_cache()
        budget = plain.report["num_parameters"] * 14 // share if share else None
        result = traced(WIDE, {**config, "device_memory": budget}, accumulate=accumulate)
        check(result)
        assert_same(result.run, plain)
        print(summarize(result.trace).text(5))
        updates = (_C.Track.HOST_ADAM, _C.Track.DEVICE_ADAM)
        updated = sum(s["numel"] for track in updates for s in on_track(result.trace, track) if not s["dropped"])
        assert updated == plain.report["num_parameters"]
        if share:
            for track in (_C.Track.UPLOAD, _C.Track.DOWNLOAD, _C.Track.HOST_ADAM):
                assert on_track(result.trace, track)


def test_config(tmp_path):
    config = make_config("bf16", default_chunk_size=2 * MIB, device_memory="400MiB", gradient_clipping=1.0)
    run = train(WIDE, {**config, "profile": {"step": 4, "output": str(tmp_path)}}, steps=8)
    assert_same(run, train(WIDE, config, steps=8))
    events = json.loads((tmp_path / "step4.trace.json").read_text())["traceEvents"]
    assert all(event["ts"] >= 0 for event in events if event["ph"] != "M")
    assert {event["ph"] for event in events} == {"M", "X", "C"}
