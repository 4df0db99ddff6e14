import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar import _C
from patrickstar.plan import main
from tests.plan.test_simulator import BACKWARD, FINALISE, GRAD, PARAM, READ, WRITE, access, costs_of, forward, rates_of

GB = 10**9
UPDATES = {
    "host": [_C.Recipe.HOST, _C.Recipe.HOST_AHEAD, _C.Recipe.HOST_TWO_PASSES, _C.Recipe.HOST_TWO_PASSES_AHEAD],
    "disk": [_C.Recipe.DISK, _C.Recipe.DISK_COMMITTED],
    "round_trip": [_C.Recipe.ROUND_TRIP],
    "device": [_C.Recipe.DEVICE],
}
EXCHANGES = ("gather", "scatter")
EACH_UPDATE = [(where, recipe) for where, recipes in UPDATES.items() for recipe in recipes]


def backward(count):
    return [access(BACKWARD, (i, PARAM, READ), (i, GRAD, WRITE), (i, GRAD, FINALISE)) for i in reversed(range(count))]


def arguments_of(count, limit, recipes, prefetch=0, ranks=1, **more):
    accesses = forward(count) + backward(count)
    costs = costs_of(count, [i for i in range(count) if recipes[i].states == _C.Tier.DEVICE], ranks)
    round_trips = [(6 * GB // ranks, 7 * GB // ranks, 0)] * count
    problem = _C.PlanProblem(
        accesses, costs, limit_bytes=limit * GB, prefetch_bytes=prefetch * GB, round_trip_costs=round_trips
    )
    rates = rates_of(
        upload=1, download=1, adam=2, device_adam=20, gather=4, scatter=4, disk_read_gbps=2, disk_write_gbps=2
    )
    each = [GB // ranks] * count
    options = {"num_ranks": ranks, **more}
    seconds = [0.5] * len(accesses)
    shape = _C.StepShape(compute_seconds=seconds, updates=recipes, numels=each, disk_bytes=each, **options)
    return problem, _C.make_plan(problem), rates, shape


def ops_of(program, chunk):
    return [one["op"] for one in program if one["chunk"] == chunk]


def test_a_chunk_that_leaves_and_comes_back():
    program = _C.play_program(*arguments_of(2, 3, [_C.Recipe.HOST] * 2))
    assert ops_of(program, 0) == [
        *("allocate", "fetch"),
        *("allocate", "free", "to_host", "free"),  # its gradient is made, its value is dead, and the gradient leaves
        "update_host",
    ]
    assert [one["op"] for one in program if one["chunk"] is None and one["op"] != "begin"] == ["compute"] * 4 + ["norm"]


@pytest.mark.parametrize(("where", "recipe"), EACH_UPDATE)
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_recipe_is_carried_out(where, recipe, ranks):
    program = _C.play_program(*arguments_of(3, 4, [recipe] * 3, prefetch=1, ranks=ranks))
    lanes = {
        "host": _C.Lane.HOST,
        "disk": _C.Lane.DISK_HOST,
        "round_trip": _C.Lane.ROUND_TRIP,
        "device": _C.Lane.COMPUTE,
    }
    first = {"round_trip": "round_trip_up"}.get(where, "update_")
    for chunk in range(3):
        updates = [one for one in program if one["chunk"] == chunk and one["op"].startswith(first)]
        assert len(updates) == (2 if "TWO_PASSES" in recipe.name else 1)
        assert {one["lane"] for one in updates} == {lanes[where]}
    assert all(one["seconds"] >= 0 for one in program)
    norm = next(one for one in program if one["op"] == "norm")
    early = [one["begin_seconds"] < norm["begin_seconds"] for one in program if one["op"].startswith(first)]
    assert any(early) == recipe.starts_in_backward


@pytest.mark.parametrize(("where", "recipe"), EACH_UPDATE)
def test_chunks_that_one_rank_has_alone_are_not_exchanged(where, recipe):
    def played(**options):
        return _C.play_program(*arguments_of(3, 4, [recipe] * 3, prefetch=1, ranks=2, **options))

    exchanged = [one["chunk"] for one in played(chunk_ranks=[2, 1, 2]) if one["op"] in EXCHANGES]
    assert set(exchanged) == {0, 2}
    assert played(chunk_ranks=[1] * 3) == played(num_ranks=1)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 6),
    room=st.integers(2, 8),
    prefetch=st.integers(0, 3),
    ranks=st.integers(1, 2),
    names=st.lists(st.sampled_from([recipe for _, recipe in EACH_UPDATE]), min_size=6, max_size=6),
)
def test_bytes(count, room, prefetch, ranks, names):
    arguments = arguments_of(count, room, names[:count], prefetch, ranks)
    program, step = _C.play_program(*arguments), _C.simulate(*arguments)
    held: dict = collections.defaultdict(list)
    for one in program:
        place = one["chunk"], one["kind"]
        if one["op"] in ("allocate", "free"):
            held[place].append(one["op"])
        if one["op"] == "inherit":
            held[place].append("allocate")
            held[one["chunk"], GRAD].append("free")
    for changes in held.values():
        assert all(a != b for a, b in zip(changes, changes[1:], strict=False))
    moved = collections.Counter()
    lanes = collections.defaultdict(list)
    for one in program:
        moved[one["op"]] += one["amount"]
        if one["lane"] not in (_C.Lane.LAUNCH, _C.Lane.ROUND_TRIP) and one["seconds"] > 0:
            lanes[one["lane"]].append((one["begin_seconds"], one["begin_seconds"] + one["seconds"]))
    assert moved["fetch"] + moved["round_trip_up"] == step["uploaded_bytes"]
    assert moved["evict"] + moved["to_host"] + moved["round_trip_down"] == step["downloaded_bytes"]
    assert moved["gather"] == step["gathered_bytes"]
    assert moved["scatter"] == step["scattered_bytes"]
    assert moved["load"] == step["disk_read_bytes"]
    for spans in lanes.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-9 for a, b in zip(spans, spans[1:], strict=False))


def test_the_command_lists_it(capsys):
    flags = ["--model", "gpt:128x4", "--batch-size", "2", "--seq-len", "64", "--host-memory", "4GiB", "--no-advice"]
    assert main([*flags, "--device-memory", "128MiB", "--listing"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = lines[next(i for i, line in enumerate(lines) if line.startswith("program of a step")) :]
    print("\n".join(listed[:40]))
    begins = [float(line.split()[0]) for line in listed if line.split()[2:3] == ["compute"]]
    assert begins == sorted(begins)
    assert sum(line.startswith("access ") for line in listed) == int(listed[0].split()[4])
    assert listed.count("end of the step") == 1
