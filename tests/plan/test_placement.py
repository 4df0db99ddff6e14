import math

import pytest

from patrickstar import _C

NUM_CHUNKS, NUMEL, ACTIVATION_MEMORY = 64, 1024, 10**6
STATES, VALUES = 12 * NUMEL, 2 * NUMEL
HOME, GRADIENT = STATES + VALUES, VALUES
ALL_VALUES = NUM_CHUNKS * VALUES
IN_PLACE = 20  # chunks whose states have room beside all values
MARGIN = ALL_VALUES + 2 * GRADIENT + IN_PLACE * STATES


@pytest.fixture(scope="module")
def layout():
    one_each = [NUMEL] * NUM_CHUNKS, [_C.DType.BFLOAT16] * NUM_CHUNKS, [True] * NUM_CHUNKS
    layout = _C.Layout.pack(*one_each, NUMEL)
    assert layout.num_chunks == NUM_CHUNKS
    return layout


def num_on_device(layout, host_bytes, margin=MARGIN, **options):
    budget = _C.DeviceBudget()
    budget.limit_bytes, budget.follows_activations = ACTIVATION_MEMORY + margin, True
    budget.host_limit_bytes = host_bytes
    for name, value in options.items():
        setattr(budget, name, value)
    access = {"phase": _C.Phase.FORWARD, "activation_peak_bytes": ACTIVATION_MEMORY, "uses": []}
    return _C.num_device_state_chunks(layout, [access], budget)


ENOUGH = 0.8  # of the new values: the other updates wait for the norm beside the next forward


def host_bytes_ahead(layout, num_on_device):
    others = NUM_CHUNKS - num_on_device
    return _C.reserved_gradient_bytes(layout) + others * HOME + math.ceil(ENOUGH * others) * VALUES


def test_no_more_than_beside_all_values_where_the_host_has_room(layout):
    assert num_on_device(layout, 2**40) == IN_PLACE
    assert num_on_device(layout, host_bytes_ahead(layout, IN_PLACE)) == IN_PLACE


def test_what_device_buffers_of_several_sizes_waste_is_left_where_memory_does_not_follow_the_activation_memory(layout):
    """A twentieth of the headroom, and no more than prefetches have; a given ratio holds beside."""
    prefetched = 16 * VALUES
    assert prefetched > MARGIN // 20
    for margin, waste in ((MARGIN, MARGIN // 20), (40 * prefetched, prefetched)):
        expected = num_on_device(layout, 2**40, margin - waste)
        assert num_on_device(layout, 2**40, margin, follows_activations=False) == expected
    few = num_on_device(layout, 2**40, margin_use_ratio=0.5)
    assert few == IN_PLACE // 2


def test_gradients_leave_the_device_where_enough_updates_can_start_in_backward_then(layout):
    for count in (IN_PLACE + 1, IN_PLACE + 6):
        assert num_on_device(layout, host_bytes_ahead(layout, count)) == count
        assert num_on_device(layout, host_bytes_ahead(layout, count) - 1) == count + 1


def test_gradients_stay_on_the_device_where_updates_wait_for_the_norm_all_the_same(layout):
    count = num_on_device(layout, 0)
    assert count > IN_PLACE
    assert count * (STATES + GRADIENT) < MARGIN < (count + 8) * (STATES + GRADIENT)
    most = max(c for c in range(NUM_CHUNKS) if num_on_device(layout, host_bytes_ahead(layout, c)) == c)
    assert count < most
    assert most * STATES < MARGIN


def test_no_gradient_leaves_where_that_is_not_enough(layout):
    most = max(c for c in range(NUM_CHUNKS) if num_on_device(layout, host_bytes_ahead(layout, c)) == c)
    fewer = num_on_device(layout, 0)
    assert fewer < most
    assert num_on_device(layout, host_bytes_ahead(layout, most)) == most
    assert num_on_device(layout, host_bytes_ahead(layout, most) - 1) == fewer


def test_gradients_that_wait_on_the_host(layout):
    def access(chunk, activation_memory):
        param = (chunk, _C.ArrayKind.PARAM, _C.ArrayUseMode.READ)
        grad = (chunk, _C.ArrayKind.GRAD, _C.ArrayUseMode.WRITE)
        return {"phase": _C.Phase.BACKWARD, "activation_peak_bytes": activation_memory, "uses": [param, grad]}

    accesses = [access(chunk, ACTIVATION_MEMORY) for chunk in reversed(range(NUM_CHUNKS))]
    on_device = [chunk < 10 for chunk in range(NUM_CHUNKS)]
    budget = _C.DeviceBudget()
    budget.prefetches_far = False

    def leaving(room_bytes):
        budget.limit_bytes = ACTIVATION_MEMORY + 10 * STATES + room_bytes
        return _C.leaving_gradient_bytes(layout, accesses, on_device, budget)

    assert leaving(11 * VALUES) == 0
    assert leaving(11 * VALUES - 1) == 1
    assert leaving(4 * VALUES) == 7 * VALUES
    assert leaving(-100 * VALUES) == 10 * VALUES
    budget.gradient_activation_bytes = 3 * VALUES  # these lie where activations were
    assert leaving(8 * VALUES) == 0
    assert leaving(8 * VALUES - 1) == 1
    budget.gradient_activation_bytes = 0
    budget.prefetches_far = True  # half of what is left beside an access's own is kept for that
    assert leaving(12 * VALUES) == 4 * VALUES
    budget.keeps_gradients = False  # updates are committed
    assert leaving(0) == 0


def test_a_share_of_the_values_counts_where_it_is_a_part_of_the_states():
    def count(master):
        states = [_C.StateFormat(master)] * NUM_CHUNKS
        one_each = [NUMEL] * NUM_CHUNKS, [_C.DType.BFLOAT16] * NUM_CHUNKS, [True] * NUM_CHUNKS
        layout = _C.Layout.pack(*one_each, NUMEL, num_ranks=2, states=states)
        budget = _C.DeviceBudget()
        budget.limit_bytes, budget.follows_activations, budget.margin_use_ratio = ACTIVATION_MEMORY + MARGIN, True, 1.0
        budget.keeps_gradients = False  # updates are committed
        access = {"phase": _C.Phase.FORWARD, "activation_peak_bytes": ACTIVATION_MEMORY, "uses": []}
        return _C.num_device_state_chunks(layout, [access], budget)

    assert 0 < count(_C.StateType.LOWER_HALF) == count(_C.StateType.FLOAT32) < NUM_CHUNKS


def resting_tiers(layout, host_bytes, disk_bytes=2**40, device_bytes=0):
    found, on_host, on_disk = _C.initial_placement(layout, host_bytes, device_bytes, _C.Backwards.ONE, disk_bytes)
    return "".join(resting_tier.name[1] for resting_tier in found), on_host, on_disk  # hOst, dEvice, dIsk


def test_the_last_chunks_go_to_the_disk(layout):
    """No more than necessary, beside three chunks' states on their way."""
    _, everything, _ = _C.initial_placement(layout, _C.UNLIMITED, 0)
    each = 3 * 4 * NUMEL  # whole pages
    assert resting_tiers(layout, everything) == ("O" * NUM_CHUNKS, everything, 0)
    found, on_host, taken = resting_tiers(layout, everything - 1)
    assert found == "O" * (NUM_CHUNKS - 4) + "I" * 4
    assert everything - 4 * STATES + 3 * STATES <= on_host <= everything - 1
    assert taken == 4 * each
    for count in (8, 32, NUM_CHUNKS):
        found, on_host, taken = resting_tiers(layout, everything - (count - 4) * STATES)
        assert found == "O" * (NUM_CHUNKS - count) + "I" * count
        assert on_host <= everything - (count - 4) * STATES
        assert taken == count * each


def test_what_host_and_disk_have_no_room_for_goes_to_the_device(layout):
    _, everything, _ = _C.initial_placement(layout, _C.UNLIMITED, 0)
    room = 6 * HOME
    found, on_host, _ = resting_tiers(layout, everything - 10 * STATES, 8 * STATES, room)
    assert found == "E" * 5 + "O" * (NUM_CHUNKS - 13) + "I" * 8
    assert on_host <= everything - 10 * STATES
    _, on_host, _ = resting_tiers(layout, everything - 20 * STATES, 8 * STATES, room)
    assert on_host > everything - 20 * STATES  # which is refused


def test_a_disk_that_gains_nothing_is_left_alone(layout):
    small = _C.Layout.pack([NUMEL] * 2, [_C.DType.BFLOAT16] * 2, [True] * 2, NUMEL)
    found, _, on_disk = resting_tiers(small, 0)
    assert (found, on_disk) == ("OO", 0)


def test_large_chunks_stay_where_others_suffice():
    numels = [NUMEL] * 20 + [16 * NUMEL]
    layout = _C.Layout.pack(numels, [_C.DType.BFLOAT16] * 21, [True] * 21, NUMEL)
    _, everything, _ = _C.initial_placement(layout, _C.UNLIMITED, 0)
    found, _, _ = resting_tiers(layout, everything - 10 * STATES)
    assert found.endswith("IO")


def test_the_first_come_resting_tier_from_the_disk(layout):
    _, everything, _ = _C.initial_placement(layout, _C.UNLIMITED, 0)
    found, taken, _ = _C.initial_placement(layout, everything - 20 * STATES, 0, _C.Backwards.ONE, 2**40)
    first = found.index(_C.Tier.DISK)

    def first_on_disk(host_bytes, num_moved=0):
        moved = [index < num_moved for index in range(NUM_CHUNKS)]
        there = [
            resting_tier == _C.Tier.DISK for resting_tier in _C.later_resting_tiers(layout, found, moved, host_bytes)
        ]
        assert there == sorted(there)
        return there.index(True) if any(there) else NUM_CHUNKS

    assert first_on_disk(taken) == first
    assert first_on_disk(taken + 3 * (STATES + 8192)) == first + 3
    assert first_on_disk(2**40) == NUM_CHUNKS
    assert first_on_disk(taken, num_moved=8) == first + 8 * HOME // (STATES + 8192)


HEAD = 10 * VALUES


@pytest.fixture(scope="module")
def headed():
    numels = [NUMEL] * 15 + [10 * NUMEL]
    layout = _C.Layout.pack(numels, [_C.DType.BFLOAT16] * 16, [True] * 16, NUMEL)
    assert layout.num_chunks == 16
    return layout


def problem_of(layout, uses, room, follows_activations=False):
    """The problem of ``accesses`` (by access the arrays that it reads) with all states on the host."""
    budget = _C.DeviceBudget()
    budget.limit_bytes, budget.follows_activations = ACTIVATION_MEMORY + room, follows_activations
    accesses = [
        {
            "phase": _C.Phase.FORWARD,
            "activation_peak_bytes": ACTIVATION_MEMORY if not index else 0,
            "uses": [(chunk, kind, _C.ArrayUseMode.READ) for chunk, kind in arrays],
        }
        for index, arrays in enumerate(uses)
    ]
    return accesses, _C.pose_problem(layout, accesses, [False] * layout.num_chunks, budget)


PARAM, GRAD = _C.ArrayKind.PARAM, _C.ArrayKind.GRAD
HEADED_STEP = [[(0, PARAM)], [(15, PARAM)], [(15, PARAM), (15, GRAD)], [(0, PARAM), (0, GRAD)]]


def test_device_buffers_of_rare_sizes_have_room_at_all_accesses(headed):
    _, problem = problem_of(headed, HEADED_STEP, room=100 * VALUES)
    assert problem["idle_bytes"] == [2 * HEAD, HEAD, 0, 2 * HEAD]
    # With little room: at most half of an access's free bytes.
    _, problem = problem_of(headed, HEADED_STEP, room=2 * HEAD + 2 * VALUES)
    assert problem["idle_bytes"] == [(2 * HEAD + VALUES) // 2, (HEAD + 2 * VALUES) // 2, 0, HEAD]
    _, problem = problem_of(headed, HEADED_STEP, room=0)
    assert problem["idle_bytes"] == [0] * 4


def test_no_size_is_rare_where_device_buffers_are_cut_to_fit_or_many_chunks_are_large(headed, layout):
    _, problem = problem_of(headed, HEADED_STEP, room=100 * VALUES, follows_activations=True)
    assert problem["idle_bytes"] == []
    _, problem = problem_of(layout, HEADED_STEP, room=100 * VALUES)
    assert problem["idle_bytes"] == []
    two_in_five = _C.Layout.pack([NUMEL] * 3 + [10 * NUMEL] * 2, [_C.DType.BFLOAT16] * 5, [True] * 5, NUMEL)
    _, problem = problem_of(two_in_five, [[(4, PARAM)], [(4, PARAM), (4, GRAD)]], room=100 * VALUES)
    assert problem["idle_bytes"] == []


def highest(plan, accesses, problem):
    """Most bytes of arrays and idle buffers at an access of the second step."""
    resident, costs, found = set(), problem["costs"], []
    for _ in range(2):
        for index, access in enumerate(plan["accesses"]):
            resident -= set(access["evict"])
            resident |= set(access["fetch"]) | {array[:2] for array in accesses[index]["uses"]}
            found.append(sum(costs[array][0] for array in resident) + problem["idle_bytes"][index])
            resident -= set(access["evict_ahead"])
            resident |= set(access["prefetch"])
    return max(found)


def test_plans_leave_idle_device_buffers_their_room(headed):
    layers = [[(chunk, PARAM)] for chunk in range(15)]
    step = [*layers, [(15, PARAM)], [(15, PARAM), (15, GRAD)], *reversed(layers)]
    room = 2 * HEAD + 10 * VALUES
    accesses, problem = problem_of(headed, step, room)
    plan = _C.make_plan(_C.PlanProblem(accesses, **problem))
    without = _C.make_plan(_C.PlanProblem(accesses, **{**problem, "idle_bytes": []}))
    assert highest(plan, accesses, problem) <= room < highest(without, accesses, problem)
    assert plan["least_limit_bytes"] == without["least_limit_bytes"]


def committed_layout(master=_C.StateType.LOWER_HALF):
    one_each = [NUMEL] * NUM_CHUNKS, [_C.DType.BFLOAT16] * NUM_CHUNKS, [True] * NUM_CHUNKS
    return _C.Layout.pack(*one_each, NUMEL, states=[_C.StateFormat(master)] * NUM_CHUNKS)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.7])
def test_where_updates_bound_backward_resting_tiers_take_turns(share):
    layout = committed_layout()
    _, everything, _ = _C.initial_placement(layout, _C.UNLIMITED, 0)
    found, on_host, _ = resting_tiers(layout, int(everything * (1 - share)), 0, 2**40)
    assert on_host <= everything * (1 - share)
    for begin in range(0, NUM_CHUNKS - 20):
        assert abs(found[begin : begin + 20].count("E") - 20 * share) <= 1.5
    whole = committed_layout(_C.StateType.FLOAT32)
    _, everything, _ = _C.initial_placement(whole, _C.UNLIMITED, 0)
    found, *_ = resting_tiers(whole, int(everything * (1 - share)), 0, 2**40)
    assert found.rstrip("O").count("O") == 0


def test_states_that_move_in_beside_those_that_are_there(layout):
    in_turn = [chunk % 2 == 0 for chunk in range(NUM_CHUNKS)]
    half = NUM_CHUNKS // 2
    assert _C.chunks_that_move_in(layout, half, in_turn) == []
    assert _C.chunks_that_move_in(layout, half + 3, in_turn) == [1, 3, 5]
    assert _C.chunks_that_move_in(layout, 4, [False] * NUM_CHUNKS) == [0, 1, 2, 3]


def test_what_resting_tiers_leave_to_gradients_on_the_host():
    layout = committed_layout()
    resting_tier = layout.chunk(0)["resting_tier_bytes"]
    tiers = [_C.Tier.HOST] * 5 + [_C.Tier.DEVICE] * (NUM_CHUNKS - 5)
    assert _C.gradient_room_bytes(layout, tiers, 5 * resting_tier + 1234) == 1234
    assert _C.gradient_room_bytes(layout, tiers, resting_tier) == 0
    assert _C.gradient_room_bytes(committed_layout(_C.StateType.FLOAT32), tiers, 5 * resting_tier) == _C.UNLIMITED
