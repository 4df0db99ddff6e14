import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar import _C
from tests.plan.test_simulator import (
    AFTER_NORM,
    AT_FINALISE,
    BACKWARD,
    FAST,
    FINALISE,
    FORWARD,
    GB,
    GRAD,
    NEVER,
    PARAM,
    PARAM_FIRST,
    READ,
    WRITE,
    access,
    costs_of,
    draw_rates,
    forward,
    one_pass,
    rates_of,
    steps,
)


def arguments_of(accesses, seconds, limit, updates, **more):
    count = 1 + max(chunk for m in accesses for chunk, *_ in m["uses"])
    limit_bytes = _C.UNLIMITED if limit == math.inf else int(limit * GB)
    updates = updates if isinstance(updates, list) else [updates] * count
    problem = _C.PlanProblem(accesses, costs_of(count), limit_bytes=limit_bytes, **more)
    return problem, _C.StepShape(compute_seconds=seconds, updates=updates, numels=[GB] * count)


def choose(accesses, rates, *, seconds, limit, update=NEVER, prefetch=0):
    problem, shape = arguments_of(accesses, seconds, limit, update, prefetch_bytes=int(prefetch * GB))
    return _C.choose_plan(problem, rates, shape)


def with_room(accesses, rates, room_bytes, *, seconds, limit, update=NEVER, prefetch=0):
    problem, shape = arguments_of(accesses, seconds, limit, update, prefetch_bytes=room_bytes)
    plan = _C.make_plan(problem)
    return plan, _C.simulate(problem, plan, rates, shape)


def rooms(problem):
    spare = 2 * len({chunk for m in problem["accesses"] for chunk, *_ in m["uses"]})
    if problem["limit"] != math.inf:
        needs = [len({(c, k) for c, k, mode in m["uses"] if mode != FINALISE}) for m in problem["accesses"]]
        spare = problem["limit"] - max(needs)
    powers = [2**i for i in range(10) if 2**i < spare]
    return sorted({0, problem["prefetch"], *powers, max(spare, 0)})


def cautious(drawn):
    slower = {name: drawn[name] / 1.5 for name in ("upload", "download", "adam")}
    return {**drawn, **slower}


def shortest(tried, rates):
    """Within 0.5 % of the least. 15 % of the time of transfers counts as well."""

    def seconds(entry):
        _, plan, step = entry
        moved = plan["uploaded_bytes"] / rates.upload_gbps + plan["downloaded_bytes"] / rates.download_gbps
        return step["seconds"] + 0.15 * moved / 1e9

    least = min(map(seconds, tried))
    return [entry for entry in tried if seconds(entry) <= least * 1.005]


@settings(max_examples=80, deadline=None)
@given(steps(), st.data(), st.sampled_from([AT_FINALISE, NEVER]))
def test_against_brute_force(problem, data, update):
    """The shortest step on a machine whose transfers and updates take half as long again; within 0.5 % of it
    the shortest on the machine itself; among those within 0.5 % of that the problem's own room, then the fewest bytes,
    then the least room. The prediction is the machine's own step.
    """
    drawn = draw_rates(data)
    rates, slower = rates_of(**drawn), rates_of(**cautious(drawn))
    tried = [
        (room, *with_room(**problem, rates=slower, room_bytes=room * GB, update=update)) for room in rooms(problem)
    ]
    short = shortest(tried, rates)
    short = shortest(
        [(room, *with_room(**problem, rates=rates, room_bytes=room * GB, update=update)) for room, *_ in short], rates
    )
    own = problem["prefetch"] * GB
    room, plan, step = min(
        short, key=lambda e: (e[0] * GB != own, e[1]["uploaded_bytes"] + e[1]["downloaded_bytes"], e[0])
    )
    choice = choose(**problem, rates=rates, update=update)
    updates = [update] * len(choice["updates"])
    expected = {"plan": plan, "prefetch_bytes": room * GB, "predicted": step, "updates": updates}
    assert choice == expected


def delayed(count, first_deferred):
    return [PARAM_FIRST] * first_deferred + [AFTER_NORM] * (count - first_deferred)


@settings(max_examples=50, deadline=None)
@given(steps(), st.data())
def test_updates_that_wait_against_brute_force(problem, data):
    rates = rates_of(**draw_rates(data))
    choice = choose(**problem, rates=rates, update=PARAM_FIRST)
    count = len(choice["updates"])
    first_deferred = choice["updates"].index(AFTER_NORM) if AFTER_NORM in choice["updates"] else count
    assert choice["updates"] == delayed(count, first_deferred)
    given = problem["accesses"], problem["seconds"], problem["limit"]
    posed, shape = arguments_of(*given, choice["updates"])
    assert choice["predicted"] == _C.simulate(posed, choice["plan"], rates, shape)
    earliest = with_room(**problem, rates=rates, room_bytes=choice["prefetch_bytes"], update=PARAM_FIRST)[1]
    assert choice["predicted"]["seconds"] <= earliest["seconds"] * 1.01


def test_the_last_updates_wait_where_updates_bound_the_step():
    """Eight chunks of a second's compute in forward and backward each; an update takes 1.6 s in one pass, 2.4 s in two.
    All in two passes take 19.2 s. The last five chunks have the forward of the first three, and of their own
    predecessors, for updates in one pass.
    """
    accesses = forward(8) + list(reversed(one_pass(8)))
    problem = {"accesses": accesses, "seconds": [1.0] * 16, "limit": math.inf, "update": PARAM_FIRST}
    slow = rates_of(adam=1 / 1.6, param_pass=0.5, states_pass=1.0)
    choice = choose(**problem, rates=slow)
    waiting = choice["updates"].count(AFTER_NORM)
    all_early = with_room(**problem, rates=slow, room_bytes=choice["prefetch_bytes"])[1]
    print(f"{waiting} wait: {choice['predicted']['seconds']:.2f} s, without {all_early['seconds']:.2f} s")
    assert all_early["seconds"] == pytest.approx(8 * 2.4, rel=0.01)
    assert waiting > 0
    assert choice["predicted"]["seconds"] < 0.9 * all_early["seconds"]
    fast = choose(**problem, rates=rates_of(adam=10))  # what compute hides begins as early as it can
    assert fast["updates"] == [PARAM_FIRST] * 8


def burst(count):
    """One long access, then one short one for each of ``count`` other chunks."""
    return [access(FORWARD, (i, PARAM, READ)) for i in range(count + 1)]


def test_an_instant_link_needs_no_room():
    choice = choose(burst(4), rates_of(), seconds=[1.0] * 5, limit=5)
    assert choice["prefetch_bytes"] == 0
    assert choice["predicted"]["seconds"] == pytest.approx(5, rel=1e-6)


def test_enough_room_to_hide_a_burst_and_no_more():
    """Four chunks of a second's upload each are needed at once after four seconds of compute, which hides their
    uploads. Nothing hides the step's first chunk.
    """
    problem = {"seconds": [4.0] + [0.01] * 4, "limit": 20}
    choice = choose(burst(4), rates_of(upload=1), **problem)
    assert choice["prefetch_bytes"] == 4 * GB
    assert choice["predicted"]["seconds"] == pytest.approx(1 + 4 + 0.04)
    assert with_room(burst(4), rates_of(upload=1), 0, **problem)[1]["seconds"] == pytest.approx(1 + 4 + 3 * 1 + 0.01)
    fetched_ahead = choice["plan"]["accesses"][0]["prefetch"]
    assert fetched_ahead == [(i, PARAM) for i in range(1, 5)]


def rounds(count, repeats):
    return [access(FORWARD, (i, PARAM, READ)) for _ in range(repeats) for i in range(count)]


def test_a_link_slower_than_compute_gets_the_fewest_bytes():
    """Six chunks in turn, five in memory. Each byte costs more than its compute, so an early start never pays for a
    byte.
    """
    problem = {"seconds": [0.1] * 30, "limit": 5}
    choice = choose(rounds(6, 5), rates_of(upload=1), **problem)
    tried = [with_room(rounds(6, 5), rates_of(upload=1), room * GB, **problem)[0] for room in range(5)]
    assert choice["plan"]["uploaded_bytes"] == min(plan["uploaded_bytes"] for plan in tried)
    assert choice["plan"]["uploaded_bytes"] < tried[4]["uploaded_bytes"]


def test_room_that_the_link_pays_for():
    """Every chunk of the second half is needed within no time: more bytes, a shorter step."""
    accesses = [access(FORWARD, (0, PARAM, READ)), *[access(FORWARD, (i, PARAM, READ)) for i in range(1, 7)]] * 2
    problem = {"seconds": ([6.0] + [0.01] * 6) * 2, "limit": 6}
    choice = choose(accesses, rates_of(upload=1), **problem)
    kept, step = with_room(accesses, rates_of(upload=1), 0, **problem)
    assert choice["prefetch_bytes"] > 0
    assert choice["plan"]["uploaded_bytes"] > kept["uploaded_bytes"]
    assert choice["predicted"]["seconds"] < step["seconds"]


def test_the_untimed_room_is_tried():
    """The best room lies between two powers of two: three chunks, within the spare room of four."""
    problem = {"seconds": [4.5] + [0.01] * 3, "limit": 9}
    choice = choose(burst(3), rates_of(upload=1), **problem, prefetch=3)
    assert choice["prefetch_bytes"] == 3 * GB
    assert choose(burst(3), rates_of(upload=1), **problem)["prefetch_bytes"] == 4 * GB


def test_without_a_limit():
    choice = choose(burst(4), rates_of(upload=1), seconds=[4.0] + [0.01] * 4, limit=math.inf)
    assert choice["plan"]["uploaded_bytes"] == 5 * GB
    assert choice["prefetch_bytes"] == 4 * GB
    assert choice["predicted"]["seconds"] == pytest.approx(1 + 4 + 0.04)


def test_a_large_step():
    """64 chunks, 900 accesses, recomputation; 100 ms at most."""
    chunks, uses = 64, 300
    order = [i * chunks // uses for i in range(uses)]
    accesses = [access(FORWARD, (c, PARAM, READ)) for c in order]
    for place, c in enumerate(reversed(order)):
        accesses.append(access(BACKWARD, (c, PARAM, READ)))
        leaves = [(c, GRAD, FINALISE)] if c not in order[: uses - place - 1] else []
        accesses.append(access(BACKWARD, (c, PARAM, READ), (c, GRAD, WRITE), *leaves))
    problem = {"seconds": [0.1] * len(accesses), "limit": 24, "update": AT_FINALISE}
    begin = time.perf_counter()
    choice = choose(accesses, rates_of(upload=5, download=5, adam=2), **problem, prefetch=8)
    print(f"chosen in {time.perf_counter() - begin:.3f} s: {choice['prefetch_bytes'] / GB:.0f} chunks of room")
    assert len(choice["plan"]["accesses"]) == 900
    untimed = with_room(accesses, rates_of(upload=5, download=5, adam=2), 8 * GB, **problem)[1]
    assert choice["predicted"]["seconds"] <= untimed["seconds"]


def test_a_rate_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="not positive: upload 0"):
        choose(burst(1), rates_of(upload=0, download=FAST), seconds=[1.0] * 2, limit=2)


def with_round_trips(rates, round_trip_bytes=GB, limit=8):
    accesses = [
        *forward(8),
        *(access(_C.Phase.BACKWARD, (i, GRAD, WRITE), (i, GRAD, FINALISE)) for i in range(7, -1, -1)),
    ]
    costs_each = [(3 * GB, 3 * GB, 0)] * 8  # moments of 8 bits, beside gradients of 16
    committed = _C.Recipe.HOST_COMMITTED
    problem, shape = arguments_of(accesses, [0.1] * 16, limit, committed, round_trip_costs=costs_each)
    choice = _C.choose_plan(problem, rates, shape, round_trip_bytes)
    return choice, choice["updates"].count(_C.Recipe.ROUND_TRIP)


def test_the_device_makes_updates_where_the_host_bounds_the_step():
    bound = rates_of(upload=50, download=50, adam=1)
    (at_rest, none), (visiting, some) = with_round_trips(bound, round_trip_bytes=0), with_round_trips(bound)
    assert none == 0 < some < 8
    assert visiting["predicted"]["seconds"] < 0.98 * at_rest["predicted"]["seconds"]
    assert visiting["predicted"]["host_adam_seconds"] == 8 - some


@pytest.mark.parametrize(
    ("rates", "limit"),
    [
        pytest.param({"upload": 50, "download": 50, "adam": 100}, 8, id="a host that keeps up"),
        pytest.param({"upload": 0.1, "download": 0.1, "adam": 1}, 8, id="a slow link"),
        pytest.param({"upload": 50, "download": 50, "adam": 1}, 1, id="no room for visitors"),
    ],
)
def test_nobody_round_trips_where_that_gains_nothing(rates, limit):
    assert with_round_trips(rates_of(**rates), limit=limit)[1] == 0
