import collections
import dataclasses

import pytest

from patrickstar import _C
from patrickstar.planning.simulation import played_instructions
from tests.models import MODELS
from tests.plan.test_timed_planner import LAYERS, MEASURED, linked
from tests.profiling.traces import traced
from tests.training import (
    assert_same,
    least_device_memory,
    make_config,
    make_host_config,
    num_committed,
    taken_over,
    train,
)

STEP = MEASURED + 4
TRACKS = {
    "fetch": _C.Track.UPLOAD,
    "evict": _C.Track.DOWNLOAD,
    "to_host": _C.Track.DOWNLOAD,
    "update_host": _C.Track.HOST_ADAM,
    "update_host_param": _C.Track.HOST_ADAM,
    "update_host_states": _C.Track.HOST_STATES,
    "update_device": _C.Track.DEVICE_ADAM,
    "update_disk": _C.Track.DISK_ADAM,
    "round_trip_up": _C.Track.ROUND_TRIP,
}
MOVES = (_C.Track.UPLOAD, _C.Track.DOWNLOAD)
WAYS = {
    "after the norm": {"speculation": "never"},
    "ahead": {"speculation": "always"},
    "committed": {"speculation": "commit"},
    "without masters": {"speculation": "commit", "master": "stochastic", "states": "8bit"},
}


def step_of(way, room, hybrid=False, plan_of=lambda engine: engine.plan()):
    budget = int(room * least_device_memory(LAYERS, make_config("bf16", default_chunk_size=16 * 1024)))
    programs = []

    def look(engine, step):
        if step == STEP:
            programs.append(played_instructions(plan_of(engine)))

    config = linked(device_memory=budget)
    config["optimizer"] |= WAYS[way]
    config["optimizer"]["params"]["use_hybrid_adam"] = hybrid
    trace = traced(LAYERS, config, step=STEP, before_step=look).trace
    return programs[0], trace


def orders(program, trace):
    """By track, chunks and kinds of arrays in order: planned, and executed. Uploads and host updates are sorted, since
    a value in the making is passed over and updates in backward come in the order of need. After the norm one span,
    named by the first chunk, stands for several small chunks.
    """
    planned, carried_out = collections.defaultdict(list), collections.defaultdict(list)
    spans = collections.defaultdict(list)
    for span in trace["spans"]:
        if span["track"] in TRACKS.values() and span["owner"] == _C.SpanOwner.THIS_STEP:
            spans[span["track"]].append(span)
            carried_out[span["track"]].append((span["chunk"], span["kind"] if span["track"] in MOVES else None))
    covered = collections.Counter()
    for one in program:
        track = TRACKS.get(one.op)
        if track is None or one.amount == 0:
            continue
        if covered[track] > 0:  # covered by another chunk's span
            covered[track] -= one.amount
            continue
        if track not in MOVES:
            numel = next((span["numel"] for span in spans[track] if span["chunk"] == one.chunk), one.amount)
            covered[track] = numel - one.amount if track != _C.Track.ROUND_TRIP else 0
        planned[track].append((one.chunk, one.kind))
    for order in (planned, carried_out):
        order[_C.Track.HOST_ADAM].sort()
        order[_C.Track.UPLOAD].sort(key=str)
    return planned, carried_out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("room", [1.2, pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("hybrid", [False, True], ids=["states on the host", "states on both"])
def test_a_step_is_its_program(way, room, hybrid):
    planned, carried_out = orders(*step_of(way, room, hybrid))
    assert carried_out == planned
    assert planned[_C.Track.UPLOAD] or (hybrid and room == 4)


def test_round_trips():
    def round_trip(engine):
        plan = engine.plan()
        recipes = ["ROUND_TRIP" if chunk % 2 == 0 else one for chunk, one in enumerate(plan.times.updates)]
        engine._session.runtime.set_round_trips([one == "ROUND_TRIP" for one in recipes], 4096)
        return dataclasses.replace(plan, times=dataclasses.replace(plan.times, updates=recipes))

    planned, carried_out = orders(*step_of("committed", 4, plan_of=round_trip))
    assert carried_out == planned
    assert len(planned[_C.Track.ROUND_TRIP]) > 4


@pytest.fixture
def left_out():
    yield _C.leave_out
    _C.leave_out([])


@pytest.mark.parametrize("speculation", ["always", "commit"])
def test_bits_do_not_depend_on_a_mechanism(left_out, speculation):
    clipping = {"gradient_clipping": 0.1} if speculation == "always" else {}
    config = make_host_config("bf16", device_memory=2**20, default_chunk_size=2048, **clipping)
    config["optimizer"]["speculation"] = speculation
    expected = train(MODELS["llama"], config, steps=4)
    assert taken_over(expected.report) + num_committed(expected.report) > 0
    for mechanism in _C.Mechanism.__members__.values():
        left_out([mechanism])
        assert_same(train(MODELS["llama"], config, steps=4), expected)
