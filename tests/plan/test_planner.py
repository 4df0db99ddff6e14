import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark.schemes import SCHEMES
from patrickstar import _C
from patrickstar.config import OptimizerType
from patrickstar.planning.machines import H200, given_host
from patrickstar.planning.update_costs import ADAM, update_cost
from tests.plan.belady import least_uploaded_bytes

PARAM, GRAD = _C.ArrayKind.PARAM, _C.ArrayKind.GRAD
READ, WRITE, FINALISE = _C.ArrayUseMode.READ, _C.ArrayUseMode.WRITE, _C.ArrayUseMode.FINALISE


def accesses_of(uses, activation_levels):
    return [
        {
            "phase": _C.Phase.FORWARD,
            "activation_peak_bytes": activation_memory,
            "uses": [(array, PARAM, READ) for array in sorted(arrays)],
        }
        for arrays, activation_memory in zip(uses, activation_levels, strict=True)
    ]


def read_costs(sizes):
    return {(array, PARAM): (size, size, 0, 0, False) for array, size in enumerate(sizes)}


def replay(plan, uses, sizes, room):
    """Executes a plan; uploaded bytes. Checks that every access has its arrays and stays within its room."""
    resident, uploaded = set(), 0
    for access, (steps, arrays) in enumerate(zip(plan["accesses"], uses, strict=True)):
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
        assert sum(sizes[array] for array in resident) <= room[access]
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
    activation_levels = [
        10 * draw(st.integers(0, (limit - sum(size_list[a] for a in arrays)) // 10)) for arrays in uses
    ]
    return uses, size_list, activation_levels, limit


@settings(max_examples=100, deadline=None)
@given(problems(st.just(10)))
def test_optimal_for_equal_sizes(problem):
    uses, sizes, activation_levels, limit = problem
    room = [limit - activation_memory for activation_memory in activation_levels]
    plan = _C.make_plan(_C.PlanProblem(accesses_of(uses, activation_levels), read_costs(sizes), limit_bytes=limit))
    uploaded = replay(plan, uses, sizes, room)
    assert uploaded == plan["uploaded_bytes"]
    assert abs(uploaded - least_uploaded_bytes(uses, sizes, room)) < 1e-6


@settings(max_examples=80, deadline=None)
@given(problems(st.integers(1, 50)))
def test_valid_for_any_sizes(problem):
    uses, sizes, activation_levels, limit = problem
    room = [limit - activation_memory for activation_memory in activation_levels]
    plan = _C.make_plan(_C.PlanProblem(accesses_of(uses, activation_levels), read_costs(sizes), limit_bytes=limit))
    uploaded = replay(plan, uses, sizes, room)
    assert uploaded == plan["uploaded_bytes"]
    assert uploaded >= least_uploaded_bytes(uses, sizes, room) - 1e-6


def forward_backward(count):
    return [{array} for array in [*range(count), *reversed(range(count))]]


def test_a_training_step():
    """Forward and backward over n chunks with room for k: n + (n - k) uploads, by hand."""
    for room in range(2, 9):
        plan = _C.make_plan(
            _C.PlanProblem(accesses_of(forward_backward(8), [0] * 16), read_costs([10] * 8), limit_bytes=10 * room)
        )
        assert plan["uploaded_bytes"] == 10 * (8 + (8 - room))


def test_prefetch_looks_one_access_ahead():
    plan = _C.make_plan(
        _C.PlanProblem(accesses_of([{0}, {1}, {2}, {3}], [0] * 4), read_costs([10] * 4), limit_bytes=20)
    )
    assert [steps["fetch"] for steps in plan["accesses"]] == [[(0, PARAM)], [], [], []]
    assert [steps["prefetch"] for steps in plan["accesses"]] == [[(1, PARAM)], [(2, PARAM)], [(3, PARAM)], []]


def test_surviving_copies_are_not_fetched_again():
    costs = {(array, PARAM): (10, 10, 0, 0, True) for array in range(4)}
    uses = forward_backward(4)
    assert _C.make_plan(_C.PlanProblem(accesses_of(uses, [0] * 8), costs, limit_bytes=40))["uploaded_bytes"] == 0
    assert _C.make_plan(_C.PlanProblem(accesses_of(uses, [0] * 8), costs, limit_bytes=20))["uploaded_bytes"] > 0


def test_gradients_finalise_or_are_evicted_last():
    accesses = [
        {"phase": _C.Phase.FORWARD, "activation_peak_bytes": 0, "uses": [(0, PARAM, READ)]},
        {"phase": _C.Phase.FORWARD, "activation_peak_bytes": 0, "uses": [(1, PARAM, READ)]},
        {
            "phase": _C.Phase.BACKWARD,
            "activation_peak_bytes": 0,
            "uses": [(1, PARAM, READ), (1, GRAD, WRITE), (1, GRAD, FINALISE)],
        },
        {
            "phase": _C.Phase.BACKWARD,
            "activation_peak_bytes": 0,
            "uses": [(0, PARAM, READ), (0, GRAD, WRITE), (0, GRAD, FINALISE)],
        },
    ]
    costs = {(c, PARAM): (10, 10, 0, 0, False) for c in range(2)} | {
        (c, GRAD): (10, 10, 10, 10, False) for c in range(2)
    }
    plan = _C.make_plan(_C.PlanProblem(accesses, costs, limit_bytes=30))
    assert plan["uploaded_bytes"] == 20
    assert plan["downloaded_bytes"] == 20
    assert plan["accesses"][3]["evict"] == []
    assert plan["least_limit_bytes"] == 20
    tight = _C.make_plan(_C.PlanProblem(accesses, costs, limit_bytes=20))
    assert tight["uploaded_bytes"] == 30
    assert tight["downloaded_bytes"] == 20


def test_the_activation_memory_decides():
    uses = [{0}, {1}, {2}, {0}, {1}]
    flat = _C.make_plan(_C.PlanProblem(accesses_of(uses, [0] * 5), read_costs([10] * 3), limit_bytes=30))
    peak = _C.make_plan(_C.PlanProblem(accesses_of(uses, [0, 0, 20, 0, 0]), read_costs([10] * 3), limit_bytes=30))
    assert flat["uploaded_bytes"] == 30
    assert peak["uploaded_bytes"] == 50
    assert peak["least_limit_bytes"] == 30


@settings(max_examples=100, deadline=None)
@given(st.one_of(problems(st.integers(1, 20)), problems(st.just(10))), st.integers(1, 60))
def test_room_for_prefetches(problem, prefetch_bytes):
    uses, sizes, activation_levels, limit = problem
    room = [limit - activation_memory for activation_memory in activation_levels]
    accesses, costs = accesses_of(uses, activation_levels), read_costs(sizes)
    plan = _C.make_plan(_C.PlanProblem(accesses, costs, limit_bytes=limit, prefetch_bytes=prefetch_bytes))
    assert replay(plan, uses, sizes, room) == plan["uploaded_bytes"]
    if len(set(sizes)) == 1:  # else the rule is a heuristic
        without = _C.make_plan(_C.PlanProblem(accesses, costs, limit_bytes=limit - prefetch_bytes))
        assert plan["uploaded_bytes"] == without["uploaded_bytes"]


def test_prefetches_start_as_early_as_they_fit():
    uses = [{0}, {1}, {2}, {3}]
    plan = _C.make_plan(
        _C.PlanProblem(accesses_of(uses, [0] * 4), read_costs([10] * 4), limit_bytes=30, prefetch_bytes=20)
    )
    assert [step["prefetch"] for step in plan["accesses"]] == [[(1, PARAM), (2, PARAM)], [(3, PARAM)], [], []]
    assert [step["fetch"] for step in plan["accesses"]] == [[(0, PARAM)], [], [], []]


AHEADS = (_C.Ahead.NOTHING, _C.Ahead.PARAM, _C.Ahead.EVERYTHING)
SCALES = (_C.ExpectedScale.EXACT, _C.ExpectedScale.BETWEEN)


def starts(states, start, scale, dtype=_C.DType.BFLOAT16):
    return [_C.earliest_recipe(True, dtype, states, start, ahead, scale).name for ahead in AHEADS]


@pytest.mark.parametrize("scale", SCALES)
def test_what_does_not_depend_on_memory(scale):
    host, disk, after = _C.Tier.HOST, _C.Tier.DISK, _C.UpdateStart.AFTER_NORM
    for start in (after, _C.UpdateStart.SPECULATIVE, _C.UpdateStart.COMMITTED):
        on_device = "DEVICE_COMMITTED" if start == _C.UpdateStart.COMMITTED else "DEVICE"
        assert starts(_C.Tier.DEVICE, start, scale) == [on_device] * 3
        frozen = _C.earliest_recipe(False, _C.DType.BFLOAT16, host, start, _C.Ahead.EVERYTHING, scale)
        assert frozen == _C.Recipe.NEVER
    assert starts(host, after, scale) == ["HOST", "HOST_TWO_PASSES", "HOST_TWO_PASSES"]
    assert starts(disk, after, scale) == starts(disk, _C.UpdateStart.SPECULATIVE, scale) == ["DISK"] * 3
    assert starts(host, _C.UpdateStart.COMMITTED, scale) == ["HOST_COMMITTED"] * 3
    assert starts(disk, _C.UpdateStart.COMMITTED, scale) == ["DISK_COMMITTED"] * 3


def test_speculative_updates_begin_as_far_as_there_is_memory():
    exact, between = ((_C.Tier.HOST, _C.UpdateStart.SPECULATIVE, scale) for scale in SCALES)
    assert starts(*exact) == ["HOST", "HOST_TWO_PASSES_AHEAD", "HOST_AHEAD"]
    assert starts(*between) == ["HOST", "HOST_TWO_PASSES_AHEAD", "HOST_TWO_PASSES_AHEAD"]


def test_in_32_bits_none_begins_while_clipping_acts():
    exact, between = ((_C.Tier.HOST, _C.UpdateStart.SPECULATIVE, scale) for scale in SCALES)
    assert starts(*exact, _C.DType.FLOAT32) == starts(*exact)
    assert starts(*between, _C.DType.FLOAT32) == ["HOST", "HOST_TWO_PASSES", "HOST_TWO_PASSES"]


def test_new_parameters_of_all_come_before_new_states_of_any():
    numel = 1024
    layout = _C.Layout.pack([numel] * 3, [_C.DType.BFLOAT16] * 3, [True, False, True], numel)
    values, states = 2 * numel, 12 * numel

    def chosen(room, resting_tiers=(_C.Tier.HOST,) * 3):
        return [ahead.name for ahead in _C.choose_ahead(layout, list(resting_tiers), room)]

    assert chosen(values - 1) == ["NOTHING"] * 3
    assert chosen(values) == ["PARAM", "NOTHING", "NOTHING"]
    assert chosen(2 * values + states - 1) == ["PARAM", "NOTHING", "PARAM"]
    assert chosen(2 * values + states) == ["EVERYTHING", "NOTHING", "PARAM"]
    elsewhere = (_C.Tier.DEVICE, _C.Tier.HOST, _C.Tier.DISK)
    assert chosen(2**40, elsewhere) == ["NOTHING"] * 3


RECORD = Path(__file__).parents[2] / "benchmark" / "results" / "cpu-schemes.json"
RULES = {None: OptimizerType.ADAMW, _C.MomentumRule.LION: OptimizerType.LION, _C.MomentumRule.SGD: OptimizerType.SGD}


# ns per parameter of 15 hyper-threads beside an H200 (benchmark/results/h200-fewer-bytes.txt).
FIFTEEN_THREADS = {"adam, 8bit": 0.148, "adam, 8bit, no master": 0.145, "lion, 8bit, no master": 0.091}


def cost_of(scheme):
    return update_cost(_C.StateFormat(scheme.master, scheme.momentum, scheme.variance), RULES[scheme.rule])


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_costs_are_those_that_were_measured(scheme):
    rows = {row["name"]: row for row in json.loads(RECORD.read_text())["schemes"]}
    cost, row = cost_of(scheme), rows[scheme.name]
    assert cost.traffic_bytes == row["bytes_per_param"]
    if scheme.name in FIFTEEN_THREADS:
        assert cost.core_seconds * 1e9 / 15 == pytest.approx(FIFTEEN_THREADS[scheme.name], rel=0.08)
    else:
        assert cost.core_seconds * 1e9 / 2 == pytest.approx(row["ns_per_param"], rel=0.06)


def test_memory_or_cores_hold_updates_up():
    costs = {scheme.name: cost_of(scheme) for scheme in SCHEMES}
    many = {name: H200.host_params_per_second(cost) for name, cost in costs.items()}
    assert many["adam, bf16"] == pytest.approx(5.2e9 * 28 / 20)
    assert many["adam, 8bit, no master"] == pytest.approx(15 / costs["adam, 8bit, no master"].core_seconds)
    few = given_host(H200, cores=3)
    assert few.host_params_per_second(costs["adam, 8bit"]) == pytest.approx(2 / costs["adam, 8bit"].core_seconds)
    assert few.host_params_per_second(costs["adam, 8bit"]) < few.host_params_per_second(ADAM)


NEVER, AT_FINALISE = _C.Recipe.NEVER, _C.Recipe.HOST_AHEAD
AFTER_NORM, ON_DEVICE = _C.Recipe.HOST, _C.Recipe.DEVICE
LOWER_IS_SLOWER = ("upload_gbps", "download_gbps", "host_adam_params_per_second", "device_adam_params_per_second",
                   "launch_ahead_seconds")  # fmt: skip
HIGHER_COUNTS = ("transfer_latency_seconds", "collective_latency_seconds", "synchronize_seconds", "gather_gbps",
                 "scatter_gbps", "param_pass", "states_pass")  # fmt: skip


def vote(rate=None, seconds=(), updates=(), **flags):
    rates = None
    if rate is not None:
        rates = _C.Rates()
        for name in (*LOWER_IS_SLOWER, *HIGHER_COUNTS):
            setattr(rates, name, rate)
    return {"can_measure": True, "has_plan": True, "updates": list(updates),
            "awaits_trace": False, "timed_path": 1, "rates": rates, "compute_seconds": list(seconds),
            "activations": [], **flags}  # fmt: skip


def test_one_rank_agrees_with_itself():
    mine = vote(3.0, [1.0, 2.0], [NEVER, AT_FINALISE])
    found = _C.agreed_vote([mine])
    assert {name: found[name] for name in found if name != "rates"} == {n: mine[n] for n in mine if n != "rates"}
    assert all(getattr(found["rates"], name) == 3.0 for name in (*LOWER_IS_SLOWER, *HIGHER_COUNTS))


def test_the_slowest_rank_counts():
    found = _C.agreed_vote([vote(2.0, [1.0, 5.0]), vote(4.0, [2.0, 3.0]), vote(3.0, [0.5, 4.0])])
    assert found["compute_seconds"] == [2.0, 5.0]
    assert all(getattr(found["rates"], name) == 2.0 for name in LOWER_IS_SLOWER)
    assert all(getattr(found["rates"], name) == 4.0 for name in HIGHER_COUNTS)


def test_the_rank_counts_whose_activations_leave():
    votes = [
        vote(1.0, [1.0, 1.0], activations=activations)
        for activations in ([[8, 0, 0], [0, 8, 4]], [], [[2, 0, 0], [0, 9, 9]])
    ]
    for order in (votes, votes[::-1], [votes[1], votes[0], votes[2]]):
        assert _C.agreed_vote(order)["activations"] == [[8, 0, 0], [0, 9, 9]]
    assert _C.agreed_vote([votes[1], votes[1]])["activations"] == []
    with pytest.raises(_C.StateError, match="activations of other accesses"):
        _C.agreed_vote([vote(1.0, [1.0], activations=[[1, 1, 1]] * 2)])


def test_an_update_that_is_deferred_on_any_rank_is_deferred():
    late = [NEVER, AT_FINALISE, AFTER_NORM, ON_DEVICE]
    found = _C.agreed_vote([vote(updates=[NEVER, AT_FINALISE, AT_FINALISE, AFTER_NORM]), vote(updates=late)])
    assert found["updates"] == late


@pytest.mark.parametrize("flag", ["can_measure", "has_plan"])
def test_what_holds_for_all(flag):
    assert _C.agreed_vote([vote(), vote()])[flag]
    assert not _C.agreed_vote([vote(), vote(**{flag: False})])[flag]


def test_ranks_that_left_accesses_out_have_no_times():
    timed = vote(1.0, [1.0, 2.0])
    for order in ([timed, vote()], [vote(), timed]):
        found = _C.agreed_vote(order)
        assert found["compute_seconds"] == [1.0, 2.0]
        assert found["rates"].upload_gbps == 1.0
    assert _C.agreed_vote([vote(), vote()])["rates"] is None


def test_disturbances_of_either_measurement_do_not_count():
    def measured(rate, seconds, param_pass):
        rates = vote(rate, seconds)["rates"]
        rates.param_pass = param_pass
        return {"rates": rates, "compute_seconds": seconds, "updates": [], "activations": []}

    for earlier, later in ((4.0, 2.0), (2.0, 4.0)):
        found = _C.undisturbed_times(measured(earlier, [1.0, 5.0], earlier), measured(later, [3.0, 4.0], later))
        assert found["compute_seconds"] == [1.0, 4.0]
        assert all(getattr(found["rates"], name) == 4.0 for name in LOWER_IS_SLOWER)
        assert found["rates"].synchronize_seconds == 2.0
        assert found["rates"].param_pass == 4.0  # of the measurement with the faster host
    other = _C.undisturbed_times(measured(4.0, [1.0], 1.0), measured(2.0, [3.0, 4.0], 1.0))
    assert other["compute_seconds"] == [3.0, 4.0]
    assert other["rates"].upload_gbps == 2.0


def test_times_wait_for_a_rank_whose_trace_is_put_off():
    for order in ([vote(1.0, [1.0]), vote(awaits_trace=True)], [vote(awaits_trace=True), vote(1.0, [1.0])]):
        found = _C.agreed_vote(order)
        assert found["rates"] is None
        assert found["awaits_trace"]


def test_times_of_different_paths_are_dropped():
    for other in (vote(1.0, [1.0, 2.0]), vote(1.0, [1.0], timed_path=2)):
        assert _C.agreed_vote([vote(1.0, [1.0]), other])["rates"] is None
