from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar import _C
from tests.plan.belady import least_uploaded_bytes

PARAM, GRAD = _C.ArrayKind.PARAM, _C.ArrayKind.GRAD
READ, WRITE, RETIRE = _C.AccessMode.READ, _C.AccessMode.WRITE, _C.AccessMode.RETIRE


def moments_of(uses, tides):
    return [
        {
            "phase": _C.Phase.FORWARD,
            "tide_peak_bytes": tide,
            "accesses": [(array, PARAM, READ) for array in sorted(arrays)],
        }
        for arrays, tide in zip(uses, tides, strict=True)
    ]


def read_costs(sizes):
    return {(array, PARAM): (size, size, 0, 0, False) for array, size in enumerate(sizes)}


def replay(plan, uses, sizes, room):
    """Executes a plan; uploaded bytes. Checks that every moment has its arrays and stays within its room."""
    resident, uploaded = set(), 0
    for moment, (steps, arrays) in enumerate(zip(plan["moments"], uses, strict=True)):
        for array, _ in steps["evict"]:
            resident.remove(array)
        for array, _ in steps["fetch"]:
            assert array not in resident
            resident.add(array)
            uploaded += sizes[array]
        assert arrays <= resident
        for array, _ in steps["evict_ahead"]:
            assert array not in arrays
            resident.remove(array)
        for array, _ in steps["prefetch"]:
            assert array not in resident
            resident.add(array)
            uploaded += sizes[array]
        assert sum(sizes[array] for array in resident) <= room[moment]
    return uploaded


@st.composite
def problems(draw, sizes):
    count = draw(st.integers(2, 7))
    size_list = [draw(sizes) for _ in range(count)]
    uses = [
        set(draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=2))) for _ in range(draw(st.integers(1, 30)))
    ]
    limit = 100
    # Whole tens, so that with arrays of 10 the program has a whole optimum.
    tides = [10 * draw(st.integers(0, (limit - sum(size_list[a] for a in arrays)) // 10)) for arrays in uses]
    return uses, size_list, tides, limit


@settings(max_examples=300, deadline=None)
@given(problems(st.just(10)))
def test_optimal_for_equal_sizes(problem):
    uses, sizes, tides, limit = problem
    room = [limit - tide for tide in tides]
    plan = _C.make_plan(moments_of(uses, tides), read_costs(sizes), limit_bytes=limit)
    uploaded = replay(plan, uses, sizes, room)
    assert uploaded == plan["uploaded_bytes"]
    assert abs(uploaded - least_uploaded_bytes(uses, sizes, room)) < 1e-6


@settings(max_examples=200, deadline=None)
@given(problems(st.integers(1, 50)))
def test_valid_for_any_sizes(problem):
    uses, sizes, tides, limit = problem
    room = [limit - tide for tide in tides]
    plan = _C.make_plan(moments_of(uses, tides), read_costs(sizes), limit_bytes=limit)
    uploaded = replay(plan, uses, sizes, room)
    assert uploaded == plan["uploaded_bytes"]
    assert uploaded >= least_uploaded_bytes(uses, sizes, room) - 1e-6


def forward_backward(count):
    return [{array} for array in [*range(count), *reversed(range(count))]]


def test_a_training_step():
    """Forward and backward over n chunks with room for k: n + (n - k) uploads, by hand."""
    for room in range(2, 9):
        plan = _C.make_plan(moments_of(forward_backward(8), [0] * 16), read_costs([10] * 8), limit_bytes=10 * room)
        assert plan["uploaded_bytes"] == 10 * (8 + (8 - room))


def test_prefetch_looks_one_moment_ahead():
    plan = _C.make_plan(moments_of([{0}, {1}, {2}, {3}], [0] * 4), read_costs([10] * 4), limit_bytes=20)
    assert [steps["fetch"] for steps in plan["moments"]] == [[(0, PARAM)], [], [], []]
    assert [steps["prefetch"] for steps in plan["moments"]] == [[(1, PARAM)], [(2, PARAM)], [(3, PARAM)], []]


def test_surviving_copies_are_not_fetched_again():
    costs = {(array, PARAM): (10, 10, 0, 0, True) for array in range(4)}
    uses = forward_backward(4)
    assert _C.make_plan(moments_of(uses, [0] * 8), costs, limit_bytes=40)["uploaded_bytes"] == 0
    assert _C.make_plan(moments_of(uses, [0] * 8), costs, limit_bytes=20)["uploaded_bytes"] > 0


def test_gradients_retire_or_are_evicted_last():
    moments = [
        {"phase": _C.Phase.FORWARD, "tide_peak_bytes": 0, "accesses": [(0, PARAM, READ)]},
        {"phase": _C.Phase.FORWARD, "tide_peak_bytes": 0, "accesses": [(1, PARAM, READ)]},
        {
            "phase": _C.Phase.BACKWARD,
            "tide_peak_bytes": 0,
            "accesses": [(1, PARAM, READ), (1, GRAD, WRITE), (1, GRAD, RETIRE)],
        },
        {
            "phase": _C.Phase.BACKWARD,
            "tide_peak_bytes": 0,
            "accesses": [(0, PARAM, READ), (0, GRAD, WRITE), (0, GRAD, RETIRE)],
        },
    ]
    costs = {(c, PARAM): (10, 10, 0, 0, False) for c in range(2)} | {
        (c, GRAD): (10, 10, 10, 10, False) for c in range(2)
    }
    plan = _C.make_plan(moments, costs, limit_bytes=30)
    assert plan["uploaded_bytes"] == 20
    assert plan["downloaded_bytes"] == 20
    assert plan["moments"][3]["evict"] == []
    assert plan["least_limit_bytes"] == 20
    tight = _C.make_plan(moments, costs, limit_bytes=20)
    assert tight["uploaded_bytes"] == 30
    assert tight["downloaded_bytes"] == 20


def test_the_tide_decides():
    uses = [{0}, {1}, {2}, {0}, {1}]
    flat = _C.make_plan(moments_of(uses, [0] * 5), read_costs([10] * 3), limit_bytes=30)
    peak = _C.make_plan(moments_of(uses, [0, 0, 20, 0, 0]), read_costs([10] * 3), limit_bytes=30)
    assert flat["uploaded_bytes"] == 30
    assert peak["uploaded_bytes"] == 50
    assert peak["least_limit_bytes"] == 30


@settings(max_examples=300, deadline=None)
@given(st.one_of(problems(st.integers(1, 20)), problems(st.just(10))), st.integers(1, 60))
def test_room_for_prefetches(problem, prefetch_bytes):
    uses, sizes, tides, limit = problem
    room = [limit - tide for tide in tides]
    moments, costs = moments_of(uses, tides), read_costs(sizes)
    plan = _C.make_plan(moments, costs, limit_bytes=limit, prefetch_bytes=prefetch_bytes)
    assert replay(plan, uses, sizes, room) == plan["uploaded_bytes"]
    if len(set(sizes)) == 1:  # else the rule is a heuristic
        without = _C.make_plan(moments, costs, limit_bytes=limit - prefetch_bytes)
        assert plan["uploaded_bytes"] == without["uploaded_bytes"]


def test_prefetches_start_as_early_as_they_fit():
    uses = [{0}, {1}, {2}, {3}]
    plan = _C.make_plan(moments_of(uses, [0] * 4), read_costs([10] * 4), limit_bytes=30, prefetch_bytes=20)
    assert [step["prefetch"] for step in plan["moments"]] == [[(1, PARAM), (2, PARAM)], [(3, PARAM)], [], []]
    assert [step["fetch"] for step in plan["moments"]] == [[(0, PARAM)], [], [], []]
