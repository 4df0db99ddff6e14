import pytest

from patrickstar import _C
from patrickstar.profiling import PlayedInstruction
from patrickstar.profiling.program import compare
from tests.plan.test_timed_planner import LAYERS, MEASURED, linked
from tests.training import least_device_memory, make_config, train

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
    moments = [
        {"begin_seconds": one.begin_seconds, "seconds": one.seconds + 0.004, "stalled_seconds": 0.004}
        for one in program
        if one.op == "compute"
    ]
    return {"spans": spans, "moments": moments, "seconds": 0.11}


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
