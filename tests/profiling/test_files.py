import itertools
import json
import logging
import sys

import pytest

from patrickstar import _C
from patrickstar.profiling import ChunkLayers, PlayedInstruction, chrome_trace, summarize, write_profile
from patrickstar.profiling.layers import layer_of, short_names
from patrickstar.profiling.program import compare
from tests.distributed import ROOT, run_python
from tests.models import Case, gpt2, token_batch
from tests.plan.test_timed_planner import LAYERS, MEASURED, linked
from tests.profiling.traces import total_bytes, traced
from tests.training import assert_same, least_device_memory, make_config, make_host_config, train

WIDE = Case(lambda: gpt2(hidden=64, layers=4), token_batch)
PHASES = {"X", "C", "M"}


@pytest.fixture(scope="module")
def result():
    return traced(WIDE, make_host_config("bf16", device_memory="1200KB", gradient_clipping=1.0))


def test_the_format(result):
    data = json.loads(json.dumps(chrome_trace(result.trace, 5, result.layers), allow_nan=False))
    events = data["traceEvents"]
    assert {event["ph"] for event in events} == PHASES
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert isinstance(event["cat"], str)
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(names.values()) == ["compute", "upload stream", "download stream", "host Adam", "device Adam"]
    for row in names:
        spans = sorted(
            ((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == row),
            key=lambda span: (span[0], -span[1]),
        )
        open_ends: list[float] = []
        for begin, end in spans:
            while open_ends and open_ends[-1] <= begin + 1e-6:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 2e-3  # microseconds; times are rounded to nanoseconds
            open_ends.append(end)


def test_the_format_has_everything(result):
    events = chrome_trace(result.trace, 5, result.layers)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(result.trace["spans"]) + len(result.trace["accesses"]) + 1
    for row, counter in (("upload stream", "uploaded_bytes"), ("download stream", "downloaded_bytes")):
        tid = next(e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == row)
        moved = sum(span["args"]["bytes"] for span in spans if span["tid"] == tid)
        assert moved == result.after[counter] - result.before[counter]
    memory = [sum(e["args"].values()) for e in events if e["name"] == "device memory"]
    assert memory == [total_bytes(sample) for sample in result.trace["samples"]]
    budgets = {e["args"]["budget"] for e in events if e["name"] == "device budget"}
    assert budgets == {result.trace["device_limit_bytes"]} == {1_200_000}
    last = max(spans, key=lambda span: span["ts"] if span["cat"] == "access" else -1)
    assert last["name"] == "optimizer step"


def test_the_figures(result):
    trace = result.trace
    summary = summarize(trace)
    on_track = {track: [s for s in trace["spans"] if s["track"] == track] for track in _C.Track.__members__.values()}
    stalls = sorted(on_track[_C.Track.STALL], key=lambda span: span["cause"].name)
    by_cause = [sum(s["seconds"] for s in group) for _, group in itertools.groupby(stalls, lambda s: s["cause"].name)]
    assert sorted(summary.stalled.values()) == pytest.approx(sorted(by_cause))
    assert summary.compute_seconds == pytest.approx(trace["seconds"] - sum(by_cause))
    assert summary.upload.amount == result.after["uploaded_bytes"] - result.before["uploaded_bytes"] > 0
    assert summary.host_adam.amount == result.run.report["num_parameters"]
    assert summary.device_adam.amount == 0 == summary.device_adam.rate
    adam = on_track[_C.Track.HOST_ADAM]
    ends = [s["begin_seconds"] + s["seconds"] for s in adam]
    starts = [max(s["begin_seconds"], trace["seconds"]) for s in adam]
    late = sum(max(end - start, 0) for start, end in zip(starts, ends, strict=True))
    assert summary.deferred_seconds == pytest.approx(late, abs=1e-9)
    assert summary.bound == max(summary.roofline, key=summary.roofline.get)
    text = summary.text(5)
    print(text)
    words = ["step 5", "compute", "stalled", "upload", "download", "host Adam", "device Adam", "roofline"]
    assert [line.strip().split("  ")[0].split(":")[0] for line in text.splitlines()] == words


def test_the_picture(result, tmp_path):
    from patrickstar.profiling.picture import draw, memory_bands

    accesses = result.trace["accesses"]
    columns = [sum(column) for column in zip(*memory_bands(result.trace).values(), strict=True)]
    assert columns == [total_bytes(access) for access in accesses]
    for name, magic in (("step.svg", b"<?xml"), ("step.png", b"\x89PNG")):
        draw(result.trace, 5, tmp_path / name, result.layers)
        assert (tmp_path / name).read_bytes().startswith(magic)


def test_the_picture_names_layers_and_time(result, tmp_path):
    from patrickstar.profiling.picture import draw, layer_spans, thinned

    spans = layer_spans(result.trace, result.layers)
    ends = [begin for _, begin, _ in spans[1:]] + [result.trace["optimizer_begin_seconds"] * 1e3]
    assert [end for *_, end in spans] == pytest.approx(ends)
    names = {end for label, *_ in spans for end in label.split("–")}
    assert names == {"wte", "wpe", "ln_f", *(f"h.{index}" for index in range(4))}
    distance = result.trace["seconds"] * 1e3 / 10
    kept = thinned(spans, distance)
    assert 2 <= len(kept) <= 11
    assert all(after - before >= distance for (_, before), (_, after) in itertools.pairwise(kept))
    draw(result.trace, 5, tmp_path / "step.svg", result.layers)
    text = (tmp_path / "step.svg").read_text()
    assert "<!-- time, ms; the line is the end of the step -->" in text
    assert "<!-- step 5: " in text
    assert sum(text.count(f"<!-- {label} -->") for label in {label for label, *_ in spans}) > 4
    for queue in ("compute", "upload", "download", "Adam on the host"):
        assert f"<!-- {queue} -->" in text


def test_the_layers_of_accesses(result):
    order = ["transformer.wte", "transformer.wpe", *(f"transformer.h.{i}" for i in range(4)), "transformer.ln_f"]
    for phase, way in ((_C.Phase.FORWARD, 1), (_C.Phase.BACKWARD, -1)):
        found = result.layers.of_accesses([m for m in result.trace["accesses"] if m["phase"] == phase])
        assert {layer for layers in found for layer in layers} <= set(order)
        first = [order.index(layers[0]) for layers in found if order[0] not in layers]
        assert first == sorted(first)[::way]
    names = [e["name"] for e in chrome_trace(result.trace, 5, result.layers)["traceEvents"] if e.get("cat") == "access"]
    assert names[0].startswith("forward 0: wte")


@pytest.mark.parametrize(
    ("param", "layer"),
    [
        ("transformer.h.3.attn.c_attn.weight", "transformer.h.3"),
        ("model.layers.10.mlp.experts.7.w1", "model.layers.10"),
        ("lm_head.weight", "lm_head"),
        ("0.weight", "0"),
        ("weight", ""),
    ],
)
def test_the_layer_of_a_parameter(param, layer):
    assert layer_of(param) == layer


def test_layers_that_chunks_share():
    layers = ChunkLayers([["m.h.0.w", "m.h.1.w"], ["m.h.1.w", "m.h.2.w"], ["m.h.3.w"], ["bias"]])

    def of(*accesses, phase=_C.Phase.FORWARD):
        acquired = ([(chunk, _C.ArrayKind.PARAM) for chunk in chunks] for chunks in accesses)
        return layers.of_accesses([{"phase": phase, "acquired": arrays} for arrays in acquired])

    assert of([0, 1], [], [0, 2], [3]) == [("m.h.1",), (), ("m.h.0", "m.h.1", "m.h.3"), ("",)]
    assert of([0], [3], [0]) == [("m.h.0", "m.h.1"), ("",), ("m.h.0", "m.h.1")]
    assert of([0, 1], [1], [2]) == [("m.h.1",), ("m.h.1", "m.h.2"), ("m.h.3",)]
    both = ChunkLayers([["h.0.w"], ["h.1.w"], ["h.0.b", "h.1.b"]])
    accesses = [{"phase": None, "acquired": [(chunk, None)]} for chunk in (0, 2, 1)]
    for phase, layer in ((_C.Phase.FORWARD, "h.1"), (_C.Phase.BACKWARD, "h.0")):
        assert both.of_accesses([{**access, "phase": phase} for access in accesses])[1] == (layer,)
    assert [short_names(names) for names in (("m.h.1",), ("m.h.0", "m.h.1"), ("",), ())] == ["h.1", "h.0–h.1", "", ""]


def test_a_trace_without_transfers(tmp_path):
    result = traced(WIDE, make_config("bf16"))
    trace, layers = result.trace, result.layers
    assert not any(event["name"] == "device budget" for event in chrome_trace(trace, 5, layers)["traceEvents"])
    summary = summarize(trace)
    assert (summary.upload.amount, summary.download.amount, summary.host_adam.amount) == (0, 0, 0)
    assert [file.name for file in write_profile(trace, 5, tmp_path, layers)] == [
        "step5.trace.json",
        "step5.txt",
        "step5.svg",
    ]


def test_without_matplotlib(result, tmp_path, monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "patrickstar.profiling.picture", raising=False)
    for name in ["matplotlib", *(name for name in sys.modules if name.startswith("matplotlib."))]:
        monkeypatch.setitem(sys.modules, name, None)
    files = write_profile(result.trace, 5, tmp_path, result.layers)
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert [file.name for file in files] == ["step5.trace.json", "step5.txt"]
    assert "pip install '.[profile]'" in caplog.text


@pytest.mark.parametrize("step", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_config(step, tmp_path, caplog):
    config = make_config("fp16", device_memory="1200KB", gradient_clipping=1.0)
    output = tmp_path / "deep" / "profile"
    with caplog.at_level(logging.INFO, logger="patrickstar.profiling"), caplog.at_level(logging.INFO, "patrickstar"):
        run = train(WIDE, {**config, "profile": {"step": step, "output": str(output)}}, steps=6)
    names = [f"step{step}{suffix}" for suffix in (".svg", ".trace.json", ".txt")]
    assert sorted(file.name for file in output.iterdir()) == names
    lines = [r.getMessage() for r in caplog.records if "profile" in r.getMessage()]
    assert len(lines) == 1
    assert all(name in lines[0] for name in names)
    trace = json.loads((output / f"step{step}.trace.json").read_text())
    assert trace["otherData"]["step"] == step
    assert_same(run, train(WIDE, config, steps=6))


def test_a_run_that_is_too_short(tmp_path, caplog):
    train(WIDE, make_config(profile={"step": 5, "output": str(tmp_path)}), steps=3)
    assert list(tmp_path.iterdir()) == []
    assert "closed after 3 steps, before step 5 was over" in caplog.text


SCRIPT = """
import sys
import helper
import torch
from patrickstar.runtime import initialize_engine

assert __name__ == "__main__"
steps, status = map(int, sys.argv[1:])
model, optimizer = initialize_engine(helper.make, config={"device_memory": "400KB", "default_chunk_size": 4096})
for step in range(steps):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 64)).square().mean()
    model.backward(loss)
    optimizer.step()
print("trained", steps)
sys.exit(status)
"""
HELPER = """
from torch import nn

def make():
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "helper.py").write_text(HELPER)
    path = tmp_path / "train me.py"
    path.write_text(SCRIPT)
    return path


def profile(*arguments, cwd):
    return run_python("-m", "patrickstar.profile", *arguments, cwd=cwd, environment={"PYTHONPATH": str(ROOT)})


def test_profile(script, tmp_path):
    done = profile("--step", 3, "--output", "out", script, 5, 0, cwd=tmp_path)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "trained 5"
    assert lines[1].startswith("step 3: ")
    assert any(line.strip().startswith("roofline") for line in lines)
    out = tmp_path / "out"
    names = ["step3.svg", "step3.trace.json", "step3.txt"]
    assert sorted(file.name for file in out.iterdir()) == names
    assert all(str(out / name) in lines[-1] for name in names)
    assert json.loads((out / "step3.trace.json").read_text())["otherData"]["step"] == 3


def test_the_status_of_the_script(script, tmp_path):
    done = profile(script, 4, 7, cwd=tmp_path)
    assert done.returncode == 7
    assert (tmp_path / "profile" / "step4.txt").read_text() in done.stdout


def test_a_script_that_ends_too_early(script, tmp_path):
    done = profile(script, 3, 0, cwd=tmp_path)
    assert done.returncode == 1
    assert "no step was profiled" in done.stderr
    assert "trained 3" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"), [(["nowhere.py"], "no script nowhere.py"), (["--step", "0", "x.py"], "--step: it is '0'")]
)
def test_errors(arguments, message, tmp_path):
    done = profile(*arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr


MIB = 2**20
PARAM, GRAD = _C.ArrayKind.PARAM, _C.ArrayKind.GRAD


def instruction(op, lane, chunk=None, kind=None, amount=MIB, begin=0.0, seconds=0.01, at=0):
    return PlayedInstruction(op, lane, at, chunk, kind, amount, begin, seconds)


PROGRAM = [
    instruction("fetch", _C.Lane.UPLOAD, 0, PARAM),
    instruction("fetch", _C.Lane.UPLOAD, 1, PARAM, begin=0.01),
    instruction("compute", _C.Lane.COMPUTE, amount=0, begin=0.02, seconds=0.05),
    instruction("to_host", _C.Lane.DOWNLOAD, 1, GRAD, begin=0.07),
    instruction("load", _C.Lane.DISK_READ, 1, begin=0.08, seconds=0.03),
    instruction("update_host", _C.Lane.HOST, 1, begin=0.08, seconds=0.02, at=None),
    instruction("fetch", _C.Lane.UPLOAD, 0, PARAM, begin=0.09, seconds=0.02),
]
TRACKS = {
    "fetch": _C.Track.UPLOAD,
    "to_host": _C.Track.DOWNLOAD,
    "update_host": _C.Track.HOST_ADAM,
    "load": _C.Track.DISK_READ,
}


def trace_of(program, owner=_C.SpanOwner.THIS_STEP):
    """The trace of a step that goes as predicted; the disk's reads are three each."""
    spans = []
    for one in program:
        parts = 3 if one.op == "load" else 1
        for part in range(parts if one.op in TRACKS else 0):
            seconds = one.seconds / parts
            span = {"track": TRACKS[one.op], "chunk": one.chunk, "owner": owner, "dropped": False, "seconds": seconds}
            spans.append(span | {"begin_seconds": one.begin_seconds + part * seconds, "numel": one.amount})
    accesses = [
        {"begin_seconds": one.begin_seconds, "seconds": one.seconds + 0.004, "stalled_seconds": 0.004}
        for one in program
        if one.op == "compute"
    ]
    return {"spans": spans, "accesses": accesses, "seconds": 0.11}


def test_a_step_as_predicted():
    comparison = compare(trace_of(PROGRAM), PROGRAM)
    assert comparison.first is None
    assert [one.instruction for one in comparison.compared] == PROGRAM
    assert comparison.missing == []
    assert comparison.lines()[0] == "no instruction differs from its prediction by more than 5%"


@pytest.mark.parametrize("index", range(len(PROGRAM)))
def test_the_first_that_differs_is_named(index):
    slower = [
        PlayedInstruction(**{**vars(one), "seconds": one.seconds * (1.06 if place >= index else 1.04)})
        for place, one in enumerate(PROGRAM)
    ]
    comparison = compare(trace_of(slower), PROGRAM)
    assert comparison.first.instruction == PROGRAM[index]
    assert f"{PROGRAM[index].name} (" in comparison.lines()[0]
    assert f"traced {slower[index].seconds * 1e3:.3f} ms" in comparison.lines()[0]


def test_updates_in_one_span():
    updates = [instruction("update_host", _C.Lane.HOST, chunk, at=None) for chunk in (3, 4, 5)]
    trace = trace_of([PlayedInstruction(**{**vars(updates[0]), "seconds": 0.03, "amount": 3 * MIB})])
    comparison = compare(trace, updates)
    assert (len(comparison.compared), comparison.missing, comparison.first) == (1, [], None)
    assert comparison.compared[0].instruction.amount == 3 * MIB


def test_what_the_trace_lacks():
    comparison = compare(trace_of(PROGRAM, _C.SpanOwner.STEP_BEFORE), PROGRAM)
    assert [one.op for one in comparison.missing] == [one.op for one in PROGRAM if one.op != "compute"]
    assert [one.instruction.op for one in comparison.compared] == ["compute"]


def test_a_profile_writes_it(tmp_path):
    budget = 2 * least_device_memory(LAYERS, make_config("bf16", default_chunk_size=16 * 1024))
    step = MEASURED + 4
    train(LAYERS, linked(device_memory=budget, profile={"step": step, "output": str(tmp_path)}), steps=step + 1)
    lines = (tmp_path / f"step{step}.program.txt").read_text().splitlines()
    print("\n".join(lines))
    compared, missing = (int(word) for word in lines[1].split() if word.isdigit())
    assert compared > 10 * missing
    assert {"compute", "upload", "download", "host"} <= {line.split()[4] for line in lines[4:]}
