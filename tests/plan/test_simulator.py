import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar import _C

PARAM, GRAD = _C.ArrayKind.PARAM, _C.ArrayKind.GRAD
READ, WRITE, FINALISE = _C.ArrayUseMode.READ, _C.ArrayUseMode.WRITE, _C.ArrayUseMode.FINALISE
FORWARD, BACKWARD = _C.Phase.FORWARD, _C.Phase.BACKWARD
AT_FINALISE, AFTER_NORM = _C.Recipe.HOST_AHEAD, _C.Recipe.HOST
PARAM_FIRST = _C.Recipe.HOST_TWO_PASSES_AHEAD
ON_DISK_AFTER_NORM, ON_DISK_AT_FINALISE = _C.Recipe.DISK, _C.Recipe.DISK_COMMITTED
NEVER, ON_DEVICE = _C.Recipe.NEVER, _C.Recipe.DEVICE
GB = 10**9  # a rate of 1 GB/s and chunks of 1 GB make bytes seconds
FAST = 1e9


def rates_of(upload=FAST, download=FAST, adam=FAST, device_adam=FAST, gather=FAST, scatter=FAST, **seconds):
    """GB/s, and chunks (of GB elements) per second."""
    rates = _C.Rates()
    rates.upload_gbps = upload
    rates.download_gbps = download
    rates.gather_gbps = gather
    rates.scatter_gbps = scatter
    rates.host_adam_params_per_second = adam * GB
    rates.device_adam_params_per_second = device_adam * GB
    for name, value in seconds.items():
        setattr(rates, name, value)
    return rates


def access(phase, *uses, activation_memory=0):
    return {"phase": phase, "uses": list(uses), "activation_peak_bytes": activation_memory}


def one_pass(count):
    """Each chunk is read, and its gradient is made and leaves, in one moment."""
    return [access(BACKWARD, (i, PARAM, READ), (i, GRAD, WRITE), (i, GRAD, FINALISE)) for i in range(count)]


def forward(count):
    return [access(FORWARD, (i, PARAM, READ)) for i in range(count)]


def costs_of(count, device_states=(), ranks=1):
    """With several ranks, as csrc/plan/placement.cpp poses it: shards go up and down, no value outlives a step."""
    costs = {}
    for i in range(count):
        on_device = i in device_states
        costs[i, PARAM] = (GB, 0 if on_device else GB // ranks, 0, 0, on_device and ranks == 1)
        costs[i, GRAD] = (GB, GB, GB, 0 if on_device and ranks > 1 else GB // ranks, False)
    return costs


def simulate(
    accesses,
    rates,
    *,
    seconds,
    update=NEVER,
    limit=math.inf,
    prefetch=0,
    prefetches=True,
    spare=0,
    device_states=(),
    fixed=0,
    ranks=1,
):
    """``limit``, ``prefetch`` and ``spare`` (beyond the plan's own) in chunks; ``seconds`` per access, or one for all.
    Checks that the step moves the plan's bytes.
    """
    count = 1 + max(chunk for m in accesses for chunk, *_ in m["uses"])
    limits = {"limit_bytes": _C.UNLIMITED if limit == math.inf else int(limit * GB), "fixed_bytes": fixed}
    costs = costs_of(count, device_states, ranks)
    plan = _C.make_plan(_C.PlanProblem(accesses, costs, **limits, prefetch_bytes=int(prefetch * GB)))
    if not prefetches:
        for planned in plan["accesses"]:
            planned["prefetch"] = []
    if limit != math.inf:
        limits["limit_bytes"] += spare * GB
    shape = _C.StepShape(
        compute_seconds=seconds if isinstance(seconds, list) else [seconds] * len(accesses),
        updates=[ON_DEVICE if i in device_states else update for i in range(count)],
        numels=[GB // ranks] * count,
        num_ranks=ranks,
        disk_bytes=[GB // ranks] * count,
    )
    step = _C.simulate(_C.PlanProblem(accesses, costs, **limits), plan, rates, shape)
    assert (step["uploaded_bytes"], step["downloaded_bytes"]) == (plan["uploaded_bytes"], plan["downloaded_bytes"])
    return step


def test_compute_bound():
    step = simulate(forward(4), rates_of(upload=10), seconds=1.0, limit=4, prefetch=3)
    assert step["seconds"] == pytest.approx(4 + 0.1)  # the first chunk has nothing to hide behind
    assert step["compute_seconds"] == pytest.approx(4)
    assert step["upload_seconds"] == pytest.approx(0.4)
    assert step["stall_seconds"]["upload"] == pytest.approx(0.1)


def test_upload_bound():
    """Uploads follow each other from the step's begin on; the last chunk computes after its upload."""
    step = simulate(forward(4), rates_of(upload=1), seconds=0.25, limit=4, prefetch=3, update=NEVER)
    assert step["seconds"] == pytest.approx(4 * 1 + 0.25)
    assert step["stall_seconds"]["upload"] == pytest.approx(4 - 3 * 0.25)


def test_download_bound():
    """Room for one parameter and two gradients: one is written while the other leaves."""
    accesses = [access(BACKWARD, (i, GRAD, WRITE), (i, GRAD, FINALISE)) for i in range(5)]
    step = simulate(accesses, rates_of(download=1), seconds=0.25, limit=2)
    assert step["seconds"] == pytest.approx(5 * 1)
    assert step["download_seconds"] == pytest.approx(5)
    assert step["stall_seconds"]["memory"] == pytest.approx(5 - 5 * 0.25)


def test_adam_bound():
    """An update takes as long as two accesses; each chunk is needed again when its update has just ended."""
    step = simulate(one_pass(6), rates_of(adam=1), seconds=0.5, update=AT_FINALISE)
    assert step["seconds"] == pytest.approx(6 * 1, abs=1e-6)
    assert step["host_adam_seconds"] == pytest.approx(6)
    assert step["stall_seconds"]["host_update"] == pytest.approx(6 - 3, abs=1e-6)


def test_updates_after_the_norm():
    """One chunk: compute, then the later of the norm and the download, then the update, then the upload."""
    rates = rates_of(upload=1, download=2, adam=0.5, synchronize_seconds=0.125)
    step = simulate(one_pass(1), rates, seconds=3.0, update=AFTER_NORM)
    assert step["seconds"] == pytest.approx(3 + 0.5 + 2 + 1)
    rates.synchronize_seconds = 0.75
    assert simulate(one_pass(1), rates, seconds=3.0, update=AFTER_NORM)["seconds"] == pytest.approx(3 + 0.75 + 2 + 1)


def test_updates_during_backward_hide_behind_it():
    """Three chunks of one second's update each. After the norm the forward of each waits for its update: 1 + 0.1, 1 +
    0.1, ... During backward only chunk 0, whose gradient is last, is waited for.
    """
    accesses = [*forward(3), *reversed(one_pass(3))]
    seconds = [0.1] * 3 + [1.0] * 3
    late = simulate(accesses, rates_of(adam=1), seconds=seconds, update=AFTER_NORM)
    assert late["seconds"] == pytest.approx(3 + 0.1 + 3, abs=1e-6)
    early = simulate(accesses, rates_of(adam=1), seconds=seconds, update=AT_FINALISE)
    assert early["seconds"] == pytest.approx(1 + 0.3 + 3, abs=1e-6)


def test_disk_bound():
    """Reads of six chunks' states take longest and follow each other, from the beginning of backward on."""
    rates = rates_of(disk_read_gbps=1, disk_write_gbps=4)
    step = simulate(one_pass(6), rates, seconds=0.25, update=ON_DISK_AT_FINALISE)
    assert step["seconds"] == pytest.approx(6 * 1, abs=0.3)
    assert (step["disk_read_seconds"], step["disk_write_seconds"]) == (pytest.approx(6), pytest.approx(1.5))
    assert step["disk_read_bytes"] == step["disk_written_bytes"] == 6 * GB
    rates = rates_of(disk_read_gbps=4, disk_write_gbps=1)
    written = simulate(one_pass(6), rates, seconds=0.25, update=ON_DISK_AT_FINALISE)
    assert written["seconds"] == pytest.approx(6 * 1, abs=0.3)


def test_one_chunk_on_the_disk_after_the_norm():
    """Its states are read while it computes; after the norm they are updated, then its value goes up. The write is over
    before the next backward begins.
    """
    rates = rates_of(upload=1, adam=0.5, disk_read_gbps=1, disk_write_gbps=1, synchronize_seconds=0.5)
    accesses = [*forward(1), *one_pass(1)]
    step = simulate(accesses, rates, seconds=[1.0, 3.0], update=ON_DISK_AFTER_NORM)
    assert step["seconds"] == pytest.approx(1 + 3 + 0.5 + 2 + 1, abs=1e-6)
    rates.disk_read_gbps = 0.25  # four seconds, of which the backward hides three and the norm half a second
    step = simulate(accesses, rates, seconds=[1.0, 3.0], update=ON_DISK_AFTER_NORM)
    assert step["seconds"] == pytest.approx(1 + 3 + 0.5 + 0.5 + 2 + 1, abs=1e-6)


def test_a_set_is_free_when_its_states_are_written():
    """Seven chunks: after the norm the first three are read before; each other one waits for the write three places
    before it.
    """
    rates = rates_of(disk_read_gbps=FAST, disk_write_gbps=1)
    accesses = [*forward(7), *reversed(one_pass(7))]
    step = simulate(accesses, rates, seconds=[0.01] * 7 + [1.0] * 7, update=ON_DISK_AFTER_NORM)
    assert step["stall_seconds"]["host_update"] == pytest.approx(7 - 3, abs=0.1)


def test_a_disk_without_a_rate_is_refused():
    with pytest.raises(ValueError, match="states are on the disk, which reads 0 GB/s and writes 0 GB/s"):
        simulate(one_pass(1), rates_of(), seconds=1.0, update=ON_DISK_AT_FINALISE)


def test_without_room_for_prefetches_everything_is_one_after_the_other():
    step = simulate(forward(5), rates_of(upload=2), seconds=1.0, limit=1)
    assert step["seconds"] == pytest.approx(5 * (0.5 + 1))
    assert step["stall_seconds"]["upload"] == pytest.approx(5 * 0.5)


def test_latency_bound():
    step = simulate(forward(5), rates_of(transfer_latency_seconds=0.5), seconds=1e-6, limit=1)
    assert step["seconds"] == pytest.approx(5 * 0.5, rel=1e-4)


def test_updates_on_the_device():
    step = simulate(one_pass(4), rates_of(device_adam=4), seconds=1.0, device_states=range(4))
    assert step["seconds"] == pytest.approx(4 + 1)
    assert step["device_adam_seconds"] == pytest.approx(1)
    assert step["uploaded_bytes"] == 0


def test_gradients_that_have_waited_on_the_host_come_back_for_their_updates():
    """One of four stays beside each access's needs; the others come back when the norm is known."""
    accesses = [access(BACKWARD, (i, PARAM, READ), (i, GRAD, WRITE)) for i in range(4)]
    problem = _C.PlanProblem(accesses, costs_of(4, range(4)), limit_bytes=3 * GB)
    plan = _C.make_plan(problem)
    shape = _C.StepShape(compute_seconds=[1.0] * 4, updates=[ON_DEVICE] * 4, numels=[GB] * 4, disk_bytes=[GB] * 4)
    step = _C.simulate(problem, plan, rates_of(upload=2), shape)
    assert step["downloaded_bytes"] == plan["downloaded_bytes"] == step["uploaded_bytes"] > 0
    assert step["seconds"] == pytest.approx(4 + step["uploaded_bytes"] / (2 * GB))
    assert step["stall_seconds"]["upload"] == pytest.approx(step["upload_seconds"])


def test_codes_are_dequantised_where_they_come_from():
    costs = {(i, PARAM): (GB, 0 if i < 2 else GB // 4, 0, 0, True) for i in range(4)}
    problem = _C.PlanProblem(forward(4), costs, limit_bytes=2 * GB)
    plan = _C.make_plan(problem)

    def simulated(rates, bytes_each):
        shape = {"updates": [NEVER] * 4, "numels": [GB] * 4, "compute_seconds": [1.0] * 4}
        return _C.simulate(problem, plan, rates, _C.StepShape(**shape, dequantized_bytes=bytes_each))

    rates = rates_of(upload=1)
    rates.device_memory_gbps = 5.0
    free, timed = (simulated(rates, bytes_each) for bytes_each in ([], [GB, GB // 2, GB, GB]))
    fetched = timed["uploaded_bytes"] / (GB // 4)
    assert timed["uploaded_bytes"] == free["uploaded_bytes"]
    assert timed["upload_seconds"] == pytest.approx(free["upload_seconds"] + fetched * 0.2)
    assert free["compute_seconds"] == pytest.approx(4)
    assert 4 < timed["compute_seconds"] <= 4.3 + 1e-9
    assert timed["seconds"] >= free["seconds"] + (timed["compute_seconds"] - 4) - 1e-9
    with pytest.raises(ValueError, match="dequantised by memory that moves 0"):
        simulated(rates_of(upload=1), [GB] * 4)
    with pytest.raises(ValueError, match="known of 1 chunks of 4"):
        simulated(rates, [GB])


def test_chunks_that_take_nothing_need_no_costs():
    costs = {key: cost for key, cost in costs_of(3).items() if key[0] < 1}
    problem = _C.PlanProblem(one_pass(3), costs, limit_bytes=4 * GB)
    shape = _C.StepShape(compute_seconds=[1.0] * 3, updates=[NEVER] * 3, numels=[GB] * 3, disk_bytes=[GB] * 3)
    choice = _C.choose_plan(problem, rates_of(), shape)
    assert choice["predicted"]["seconds"] == pytest.approx(3)


def test_the_norm_leaves_the_device_idle():
    rates = rates_of(synchronize_seconds=0.5)
    step = simulate(one_pass(4), rates, seconds=1.0, device_states=range(4))
    assert step["seconds"] == pytest.approx(4 + 0.5, abs=1e-6)
    assert step["stall_seconds"]["launch"] == pytest.approx(0.5, abs=1e-6)


def test_a_launching_thread_that_runs_ahead_starts_transfers_earlier():
    rates = rates_of(upload=2)
    assert simulate(forward(4), rates, seconds=1.0, prefetches=False)["seconds"] == pytest.approx(4 * (0.5 + 1))
    rates.launch_ahead_seconds = 1.0
    assert simulate(forward(4), rates, seconds=1.0, prefetches=False)["seconds"] == pytest.approx(0.5 + 4 * 1)


def test_gather_bound():
    """Two ranks: half of each chunk comes from the other one, and the gathers follow each other."""
    step = simulate(forward(4), rates_of(gather=1), seconds=0.25, limit=4, prefetch=3, ranks=2)
    assert step["seconds"] == pytest.approx(4 * 0.5 + 0.25)
    assert step["gather_seconds"] == pytest.approx(4 * 0.5)
    assert step["gathered_bytes"] == 4 * GB // 2
    assert step["stall_seconds"]["collective"] == pytest.approx(4 * 0.5 - 3 * 0.25)


def test_a_gather_follows_its_shard():
    """Four ranks: a quarter goes up in a second, then three quarters are gathered in half of one, beside the next one's
    upload.
    """
    rates = rates_of(upload=0.25, gather=1.5)
    step = simulate(forward(4), rates, seconds=0.125, limit=4, prefetch=3, ranks=4)
    assert step["seconds"] == pytest.approx(4 * 1 + 0.5 + 0.125)
    assert step["upload_seconds"] == pytest.approx(4)
    rates.gather_gbps = 0.5  # a second and a half: the gathers are slower
    step = simulate(forward(4), rates, seconds=0.125, limit=4, prefetch=3, ranks=4)
    assert step["seconds"] == pytest.approx(1 + 4 * 1.5 + 0.125)


@pytest.mark.parametrize("update", [AT_FINALISE, AFTER_NORM])
def test_a_scatter_comes_before_the_norm_the_way_down_and_the_update(update):
    """One chunk, two ranks: compute 3, scatter 0.5, then the shard: 0.25 down, 1 of update, 0.5 up; gather 0.25."""
    rates = rates_of(upload=1, download=2, adam=0.5, gather=2, scatter=1)
    step = simulate(one_pass(1), rates, seconds=3.0, update=update, ranks=2)
    assert step["seconds"] == pytest.approx(3 + 0.5 + 0.25 + 1 + 0.5 + 0.25)
    assert step["scatter_seconds"] == pytest.approx(0.5)
    assert step["scattered_bytes"] == GB // 2
    rates.synchronize_seconds = 0.75
    begin = {AT_FINALISE: 0.25, AFTER_NORM: 0.75}[update]
    step = simulate(one_pass(1), rates, seconds=3.0, update=update, ranks=2)
    assert step["seconds"] == pytest.approx(3 + 0.5 + begin + 1 + 0.5 + 0.25)


def test_scatters_hold_memory():
    """Room for two gradients: the third waits until the first is scattered, though nothing goes down."""
    accesses = [access(BACKWARD, (i, GRAD, WRITE), (i, GRAD, FINALISE)) for i in range(5)]
    step = simulate(accesses, rates_of(scatter=0.5), seconds=0.25, limit=2, device_states=range(5), ranks=2)
    assert step["seconds"] == pytest.approx(5 * 1 + 0.25)  # the first one's compute has nothing to hide behind
    assert step["downloaded_bytes"] == 0


def test_states_on_the_device_of_several_ranks():
    step = simulate(one_pass(4), rates_of(device_adam=4, gather=1), seconds=1.0, device_states=range(4), ranks=2)
    assert step["uploaded_bytes"] == 0
    assert step["device_adam_seconds"] == pytest.approx(4 / 2 / 4)
    # The first gather has nothing to hide behind; the others run beside the access before theirs.
    assert step["seconds"] == pytest.approx(0.5 + 4 * 1 + 0.5)
    assert step["stall_seconds"]["collective"] == pytest.approx(0.5)


def test_the_latency_of_collectives():
    step = simulate(forward(5), rates_of(collective_latency_seconds=0.5), seconds=1e-6, limit=1, ranks=8)
    assert step["seconds"] == pytest.approx(5 * 0.5, rel=1e-4)


def test_one_rank_gathers_nothing():
    step = simulate(one_pass(3), rates_of(gather=1e-9, scatter=1e-9, collective_latency_seconds=9.0), seconds=1.0)
    assert step["seconds"] == pytest.approx(3, rel=1e-4)
    assert step["gathered_bytes"] == step["scattered_bytes"] == step["gather_seconds"] == 0


def test_peak():
    accesses = [
        access(FORWARD, (0, PARAM, READ), activation_memory=5),
        access(FORWARD, (1, PARAM, READ), (2, PARAM, READ), activation_memory=7),
    ]
    step = simulate(accesses, rates_of(), seconds=1.0, limit=2.5, fixed=11)
    assert step["peak_bytes"] == 2 * GB + 7 + 11


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"compute_seconds": [1.0]}, "2 accesses"),
        ({"updates": []}, "0 updates"),
        ({"rates": rates_of(upload=0)}, "not positive: upload 0"),
        ({"rates": rates_of(gather=-1)}, "gathers at -1 GB/s"),
        ({"num_ranks": 0}, "between 0 ranks"),
    ],
)
def test_what_does_not_agree_is_refused(change, match):
    problem = _C.PlanProblem(forward(2), costs_of(2), limit_bytes=_C.UNLIMITED)
    shape = {"compute_seconds": [1.0, 1.0], "updates": [NEVER] * 2, "numels": [1, 1]} | change
    rates = shape.pop("rates", rates_of())
    with pytest.raises(ValueError, match=match):
        _C.simulate(problem, _C.make_plan(problem), rates, _C.StepShape(**shape))


@st.composite
def steps(draw):
    count = draw(st.integers(2, 6))
    order = [i for i in range(count) for _ in range(draw(st.integers(1, 2)))]
    accesses = [access(FORWARD, (i, PARAM, READ)) for i in order]
    for place, i in enumerate(reversed(order)):
        last = i not in list(reversed(order))[place + 1 :]
        uses = [(i, PARAM, READ), (i, GRAD, WRITE)] + ([(i, GRAD, FINALISE)] if last else [])
        accesses.append(access(BACKWARD, *uses))
    limit = draw(st.one_of(st.just(math.inf), st.integers(3, 2 * count)))
    return {
        "accesses": accesses,
        "seconds": [draw(st.floats(0.01, 2.0)) for _ in accesses],
        "limit": limit,
        "prefetch": draw(st.integers(0, 2)) if limit != math.inf and limit >= 5 else 0,
    }


RANKS = st.sampled_from([1, 2, 4])


def draw_rates(data):
    rate = st.floats(0.2, 20.0)
    names = ("upload", "download", "adam", "device_adam", "gather", "scatter")
    rates = {name: data.draw(rate, name) for name in names}
    rates["synchronize_seconds"] = data.draw(st.floats(0, 0.5))
    rates["launch_ahead_seconds"] = data.draw(st.floats(0, 2.0))
    return rates


def test_an_update_in_two_passes_counts_both():
    """16 and 26 bytes where one pass moves 28: the next forward waits for the first pass, which runs in backward; the
    second runs beside it, before the next backward's updates.
    """
    rates = rates_of(adam=1)
    whole = simulate(one_pass(1), rates, seconds=3.0, update=AT_FINALISE)
    two = simulate(one_pass(1), rates, seconds=3.0, update=PARAM_FIRST)
    assert whole["host_adam_seconds"] == pytest.approx(1)
    assert two["host_adam_seconds"] == pytest.approx((16 + 26) / 28)
    # The gradient is down at the end of the access; what then lies between two steps is the update that they wait for.
    assert whole["seconds"] == pytest.approx(3 + 1)
    assert two["seconds"] == pytest.approx(3 + 16 / 28)
    # With little else to do the host's work bounds the step.
    busy = simulate(one_pass(1), rates, seconds=0.25, update=PARAM_FIRST)
    assert busy["seconds"] == pytest.approx((16 + 26) / 28)


@settings(max_examples=80, deadline=None)
@given(steps(), st.data(), st.sampled_from([AT_FINALISE, PARAM_FIRST, AFTER_NORM]), RANKS)
def test_between_the_roofline_and_the_sum(problem, data, update, ranks):
    rates = draw_rates(data)
    step = simulate(**problem, rates=rates_of(**rates), update=update, ranks=ranks)
    busy = [step[f"{name}_seconds"] for name in ("upload", "download", "host_adam", "gather", "scatter")]
    compute = step["compute_seconds"] + step["device_adam_seconds"]
    assert step["seconds"] >= max(*busy, compute) - 1e-9
    assert step["seconds"] <= sum(busy) + compute + rates["synchronize_seconds"] + 1e-9
    # The compute queue works or waits.
    assert step["seconds"] == pytest.approx(compute + sum(step["stall_seconds"].values()), rel=1e-6)


@settings(max_examples=80, deadline=None)
@given(
    steps(),
    st.data(),
    st.sampled_from(["upload", "download", "adam", "gather", "scatter"]),
    st.sampled_from([NEVER, AT_FINALISE, AFTER_NORM]),
    RANKS,
)
def test_faster_is_not_slower(problem, data, name, update, ranks):
    """Host updates start by urgency and are not interrupted: work that arrives sooner may delay urgent work by one."""
    rates = draw_rates(data)
    slow = simulate(**problem, rates=rates_of(**rates), update=update, ranks=ranks)["seconds"]
    delay = 1 / (ranks * rates["adam"]) if update == AT_FINALISE else 0
    rates[name] *= data.draw(st.floats(1, 10), "factor")
    fast = simulate(**problem, rates=rates_of(**rates), update=update, ranks=ranks)["seconds"]
    assert fast <= (slow + delay) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(steps(), st.data(), st.integers(1, 5))
def test_the_same_plan_in_more_memory_is_not_slower(problem, data, more):
    rates = rates_of(**draw_rates(data))
    scarce = simulate(**problem, rates=rates, update=AT_FINALISE)["seconds"]
    assert simulate(**problem, rates=rates, update=AT_FINALISE, spare=more)["seconds"] <= scarce * (1 + 1e-9)


def test_activations_share_the_queues():
    """2 GB leave in the first moment and are back in the third: compute hides one of two seconds."""
    copies = [[2 * GB, 0, 0], [0, 2 * GB, 0], [0, 0, 2 * GB]]

    def step_with(activations):
        problem = _C.PlanProblem(forward(1) * 3, costs_of(1), limit_bytes=_C.UNLIMITED)
        shape = _C.StepShape(compute_seconds=[1.0] * 3, updates=[NEVER], numels=[GB], activations=activations)
        return _C.simulate(problem, _C.make_plan(problem), rates_of(upload=1, download=1), shape)

    without, step = step_with([]), step_with(copies)
    assert step["stall_seconds"]["upload"] - without["stall_seconds"]["upload"] == pytest.approx(1.0)
    assert step["seconds"] - without["seconds"] == pytest.approx(1.0)
    assert step["uploaded_bytes"] - without["uploaded_bytes"] == 2 * GB
    assert step["downloaded_bytes"] - without["downloaded_bytes"] == 2 * GB
    with pytest.raises(ValueError, match="3 accesses and activations are copied in 2"):
        step_with(copies[:2])


THERE_AND_BACK = [*forward(3), *(access(BACKWARD, (i, GRAD, WRITE), (i, GRAD, FINALISE)) for i in (2, 1, 0))]


def there_and_back(rates, update=AT_FINALISE, **options):
    """Three chunks: a second of forward each, a backward that takes no time, and updates."""
    problem = _C.PlanProblem(THERE_AND_BACK, costs_of(3), limit_bytes=_C.UNLIMITED, **options)
    seconds = [1.0] * 3 + [0.0] * 3
    shape = _C.StepShape(compute_seconds=seconds, updates=[update] * 3, numels=[GB] * 3)
    return _C.simulate(problem, _C.make_plan(problem), rates, shape)


def test_updates_in_the_order_of_need():
    """The last chunk's gradient comes first. When its update is over the others are there, and the forward needs the
    first one first.
    """
    step = there_and_back(rates_of(adam=1))
    assert step["seconds"] == pytest.approx(2 + 3)
    assert step["stall_seconds"]["host_update"] == pytest.approx(2)


def test_a_gradient_waits_for_host_memory_that_an_update_leaves():
    """With room for one, updates follow the gradients one by one, and the last one is needed first."""
    for chunks, seconds in ((1, 3 + 3), (3, 2 + 3)):
        step = there_and_back(rates_of(adam=1), gradient_room_bytes=chunks * GB)
        assert step["seconds"] == pytest.approx(seconds)


def test_two_passes_after_the_norm():
    """The forward waits for the first pass alone; the second runs beside it, in the order of the next backward."""
    one, two = (there_and_back(rates_of(adam=1), recipe) for recipe in (AFTER_NORM, _C.Recipe.HOST_TWO_PASSES))
    assert one["host_adam_seconds"] == pytest.approx(3) and one["seconds"] == pytest.approx(1 + 3)
    assert two["host_adam_seconds"] == pytest.approx(3 * (16 + 26) / 28)
    assert two["seconds"] == pytest.approx(two["host_adam_seconds"])


def test_updates_that_the_device_makes_for_the_host():
    """Up and down at 2 GB/s, both ways at once. A value that the device has need not go up."""
    for value, uploaded in ((0, 9), (GB // 2, 7.5)):
        costs = [(2 * GB, 2 * GB, value)] * 3
        rates = rates_of(adam=0.1, upload=2, download=2)
        step = there_and_back(rates, _C.Recipe.ROUND_TRIP, gradient_room_bytes=GB, round_trip_costs=costs)
        assert step["host_adam_seconds"] == 0
        assert step["round_trip_seconds"] == pytest.approx(3)
        assert step["downloaded_bytes"] == 6 * GB and step["uploaded_bytes"] == uploaded * GB
        assert step["seconds"] < 10
    with pytest.raises(ValueError, match="round trips"):
        there_and_back(rates_of(), _C.Recipe.ROUND_TRIP)
