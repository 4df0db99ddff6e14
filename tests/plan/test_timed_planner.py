import pytest
import torch

from patrickstar import _C
from patrickstar.plan import Plan, predict
from patrickstar.runtime import initialize_engine
from tests.engine.test_offloaded_activations import DEEP, least, offloading
from tests.models import MODELS, Case, gpt2, token_batch
from tests.profiling.traces import median_gbps
from tests.training import assert_same, least_device_memory, make_config, train, train_once, two_passes

STEPS = 6
MEASURED = 1  # the second step
PLANNED = MEASURED + 2  # the first step that can replay the chosen plan
LAYERS = Case(lambda: gpt2(hidden=64, layers=6), token_batch)


def linked(gbps=0.2, latency_us=0.0, speculation="never", **config):
    """States on the host and a link of so many GB/s, so that a step's transfers show."""
    result = make_config("bf16", **{"default_chunk_size": 16 * 1024, **config})
    result["optimizer"] |= {"speculation": speculation}
    result["optimizer"]["params"]["use_hybrid_adam"] = False
    return {**result, "delays": {"link_gbps": gbps, "link_latency_us": latency_us}}


@pytest.fixture(scope="module")
def budget():
    return 2 * least_device_memory(LAYERS, make_config("bf16", default_chunk_size=16 * 1024))


def plans_of(case, config, steps=STEPS, before_step=None, **kwargs):
    plans = []

    def look(engine, step):
        if step > 0:
            plans.append(engine.plan())
        if before_step is not None:
            before_step(engine, step)

    return train(case, config, steps=steps + 1, before_step=look, **kwargs), plans


@pytest.mark.parametrize("name", ["mlp", "gpt2", "shared", "mixture_of_experts", "t5", "frozen"])
def test_no_number_depends_on_it(name):
    case = MODELS[name]
    expected = train_once(case, make_config("bf16"), steps=STEPS)
    least = least_device_memory(case, make_config("bf16", default_chunk_size=4096), steps=STEPS)
    for device_memory in (least, 3 * least // 2, 4 * least):
        run = train(case, linked(1.0, default_chunk_size=4096, device_memory=device_memory), steps=STEPS)
        assert_same(run, expected)
        predicted = [report["predicted_step_seconds"] for report in run.chunk_reports]
        assert predicted[: PLANNED - 1] == [0] * (PLANNED - 1)
        if name != "mixture_of_experts":  # whose steps differ
            assert all(seconds > 0 for seconds in predicted[PLANNED - 1 :])
            assert run.report["device_peak_bytes"] <= device_memory


@pytest.mark.parametrize(("speculation", "accumulate"), [("always", 1), ("always", 2), ("commit", 1)])
def test_no_number_depends_on_it_with_updates_in_backward(budget, speculation, accumulate):
    expected = train_once(LAYERS, make_config("bf16"), steps=STEPS, accumulate=accumulate)
    config = linked(device_memory=budget, speculation=speculation)
    run, plans = plans_of(LAYERS, config, steps=STEPS - 1, accumulate=accumulate)
    assert_same(run, expected)
    early = {"always": "HOST_AHEAD", "commit": "HOST_COMMITTED"}[speculation]
    assert set(plans[-1].times.updates) == {early if accumulate == 1 else "HOST_TWO_PASSES"}


def test_clipping_that_always_acts_is_planned_for(budget):
    config = linked(device_memory=budget, speculation="always", gradient_clipping=1e-3)
    run, plans = plans_of(LAYERS, config)
    assert set(plans[-1].times.updates) == {"HOST_TWO_PASSES_AHEAD"}
    assert_same(run, train_once(LAYERS, make_config("bf16", gradient_clipping=1e-3), steps=STEPS + 1))


def test_updates_that_wait_change_no_number(budget, tmp_path):
    """Updates bound this host's step: those of the last chunks wait for the norm and take one pass (by a plan, since
    the engine measures itself later). Clipping acts, so the others take two passes.
    """
    config = linked(device_memory=budget, speculation="always", gradient_clipping=1e-3)
    expected, plans = plans_of(LAYERS, config)
    times = plans[-1].times
    updated = sum(chunk.shard_numel for chunk in plans[-1].chunks)
    times.rates["host_adam_params_per_second"] = updated / plans[-1].prediction.seconds
    times.rates.update(param_pass=0.8, states_pass=0.9)
    path = tmp_path / "plan.json"
    plans[-1].save(path)
    seen = []

    def look(engine, step):
        if step > 0:
            plan, report = engine.plan(), engine.report()
            early = plan.times.updates.count("HOST_TWO_PASSES_AHEAD")
            seen.append((early, report["num_speculated_updates"], two_passes(report)))

    run = train(LAYERS, {**config, "plan": str(path)}, steps=STEPS + 1, before_step=look)
    assert_same(run, expected)
    early = seen[1][0]  # what clipping does is known from the second step on
    print(f"{early} of {len(plans[-1].chunks)} chunks are updated in backward: {seen}")
    assert 0 < early < len(plans[-1].chunks)
    # The third step goes by that, and the fourth, in which what was expected comes true: the only updates in two passes
    # are those that began in backward.
    assert seen[2][1] - seen[1][1] == early
    assert [now - before for before, now in zip(seen[2][1:], seen[3][1:], strict=True)] == [seen[2][0]] * 2


def reference_times(trace):
    spans = trace["spans"]
    adam = [s for s in spans if s["track"] == _C.Track.HOST_ADAM and s["owner"] == _C.SpanOwner.THIS_STEP]
    optimizer = trace["optimizer_begin_seconds"]
    kept = (_C.StallCause.NORM, _C.StallCause.HOST_WORK)
    stalls = [s for s in spans if s["track"] == _C.Track.STALL and s["cause"] not in kept]
    tail = trace["seconds"] - optimizer - sum(s["seconds"] for s in stalls if s["begin_seconds"] >= optimizer)
    compute = []
    for access in trace["accesses"]:
        end = access["begin_seconds"] + access["seconds"]
        waits = (s["seconds"] for s in stalls if access["begin_seconds"] <= s["begin_seconds"] < min(end, optimizer))
        compute.append(access["seconds"] - sum(waits))
    rates = {
        "upload_gbps": median_gbps(spans, _C.Track.UPLOAD),
        "download_gbps": median_gbps(spans, _C.Track.DOWNLOAD),
        "transfer_latency_seconds": 0.0,
        "gather_gbps": 1e9,  # one rank has none
        "scatter_gbps": 1e9,
        "collective_latency_seconds": 0.0,
        "disk_read_gbps": 1e9,  # there is no disk
        "disk_write_gbps": 1e9,
        "host_adam_params_per_second": sum(s["numel"] for s in adam) / sum(s["seconds"] for s in adam),
        "param_pass": 16 / 28,  # by bytes: all in one pass
        "states_pass": 26 / 28,
        "device_adam_params_per_second": 1e18,  # none was seen
        "synchronize_seconds": tail + trace["accesses"][0]["begin_seconds"],
        "device_memory_gbps": 0.0,  # accesses' times hold what is dequantised
        "launch_ahead_seconds": max(max(m["begin_seconds"] - m["launched_seconds"], 0) for m in trace["accesses"]),
    }
    return rates, compute


@pytest.mark.parametrize("asked_in", [MEASURED, MEASURED - 1, "backward before"])
def test_the_user_and_the_planner_may_have_the_same_step(budget, asked_in):
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(LAYERS.build, 0, linked(device_memory=budget))
    generator = torch.Generator().manual_seed(1)
    runtime = engine._session.runtime
    traces = []
    with engine:
        for step in range(STEPS):
            if step == asked_in:
                runtime.start_trace()
            loss = engine(**token_batch(generator))["loss"]
            if asked_in == "backward before" and step == MEASURED - 1:
                runtime.start_trace()
            engine.backward(loss)
            optimizer.step()
            traces.append(runtime.take_trace())
        plan = engine.plan()
    asked = MEASURED if asked_in == "backward before" else asked_in
    assert [index for index, trace in enumerate(traces) if trace is not None] == [asked]
    if asked == MEASURED:
        rates, compute = reference_times(traces[asked])
        assert plan.times.rates == pytest.approx(rates, rel=1e-9, abs=1e-9)
        assert plan.times.compute_seconds == pytest.approx(compute, abs=1e-9)
        print({name: f"{rate:.4g}" for name, rate in plan.times.rates.items()})
    assert plan.prediction is not None


def test_the_user_goes_first(budget):
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(LAYERS.build, 0, linked(device_memory=budget))
    generator = torch.Generator().manual_seed(1)
    runtime = engine._session.runtime
    traces, predicted = [], []
    with engine:
        for step in range(STEPS + 1):
            loss = engine(**token_batch(generator))["loss"]
            if step == MEASURED:
                runtime.start_trace()
            engine.backward(loss)
            optimizer.step()
            traces.append(runtime.take_trace())
            predicted.append(engine.report()["predicted_step_seconds"])
        rates, _ = reference_times(traces[MEASURED + 1])
        assert engine.plan().times.rates == pytest.approx(rates, rel=1e-9, abs=1e-9)
    assert [trace is not None for trace in traces] == [step == MEASURED + 1 for step in range(STEPS + 1)]
    assert [value > 0 for value in predicted] == [step >= MEASURED + 2 for step in range(STEPS + 1)]


def test_a_later_profile_is_complete(budget, tmp_path):
    config = linked(device_memory=budget, profile={"step": MEASURED + 2, "output": str(tmp_path)})
    run = train(LAYERS, config, steps=STEPS)
    assert (tmp_path / f"step{MEASURED + 2}.txt").exists()
    assert run.report["predicted_step_seconds"] > 0


@pytest.fixture(scope="module")
def chosen(budget):
    found = {}

    def look(engine, step):
        if step == STEPS:
            found.update(plan=engine.plan(), layout=engine._session.layout, report=engine.report())

    train(LAYERS, linked(0.02, device_memory=budget), steps=STEPS + 1, before_step=look)
    plan = found["plan"]
    limits = _C.DeviceBudget()
    limits.limit_bytes, limits.follows_activations, limits.prefetches_far = budget, True, True
    on_device = [chunk.states_on_device for chunk in plan.chunks]
    rule = _C.pose_problem(found["layout"], plan.timeline, on_device, limits)
    assert rule["prefetch_bytes"] > 0
    assert found["report"]["predicted_step_seconds"] == plan.prediction.seconds
    assert found["report"]["planned_uploaded_bytes"] == plan.uploaded_bytes
    return plan, rule, [chunk.numel for chunk in plan.chunks]


def simulated(plan, rule, planned, times, numels):
    problem, rates, shape = posed(plan, rule, times, numels)
    return _C.simulate(problem, planned, rates, shape)


def posed(plan, rule, times, numels):
    shape = {name: value for name, value in times.items() if name != "rates"}
    return _C.PlanProblem(plan.timeline, **rule), times["rates"], _C.StepShape(**shape, numels=numels)


def cost(plan, rule, planned, times, numels, rates):
    """Seconds by which plans are compared: transfers count though computation hides them."""
    seconds = simulated(plan, rule, planned, times | {"rates": rates}, numels)["seconds"]
    up, down = (planned[f"{way}_bytes"] for way in ("uploaded", "downloaded"))
    return seconds + 0.15e-9 * (up / times["rates"].upload_gbps + down / times["rates"].download_gbps)


def test_the_plan_is_the_choice_by_the_measured_times(chosen):
    plan, rule, numels = chosen
    times = plan.times.as_core()
    choice = _C.choose_plan(*posed(plan, rule, times, numels))
    assert plan.problem == {**rule, "prefetch_bytes": choice["prefetch_bytes"]}
    assert plan.as_core() == choice["plan"]
    assert choice["predicted"]["seconds"] == plan.prediction.seconds
    plans = [choice["plan"], _C.make_plan(_C.PlanProblem(plan.timeline, **rule))]
    costs = [
        [cost(plan, rule, planned, times, numels, rates) for planned in plans]
        for rates in (_C.cautious(times["rates"]), times["rates"])
    ]
    print(f"{plan.prediction.roofline_line()}; costs of the choice and of the rule: {costs}")
    assert any(chosen_cost <= rule_cost * 1.005 for chosen_cost, rule_cost in costs)


@pytest.mark.parametrize("gbps", [1e-6, 1e6])
def test_no_more_bytes_than_the_rule_where_they_do_not_pay(chosen, gbps):
    plan, rule, numels = chosen
    times = plan.times.as_core()
    times["rates"].upload_gbps = times["rates"].download_gbps = gbps
    choice = _C.choose_plan(*posed(plan, rule, times, numels))["plan"]
    by_rule = _C.make_plan(_C.PlanProblem(plan.timeline, **rule))
    moved, moved_by_rule = (p["uploaded_bytes"] + p["downloaded_bytes"] for p in (choice, by_rule))
    print(f"{gbps} GB/s: {moved} bytes, by the rule {moved_by_rule}")
    assert moved <= moved_by_rule
    chosen_step, rule_step = (simulated(plan, rule, p, times, numels)["seconds"] for p in (choice, by_rule))
    assert chosen_step <= rule_step * 1.005


def test_predictions_come_in_the_order_of_the_links(budget, chosen):
    plan, rule, numels = chosen
    steps = []
    for gbps in (1.0, 0.01):
        times = plans_of(LAYERS, linked(gbps, device_memory=budget), steps=PLANNED)[1][-1].times.as_core()
        rates = times["rates"]
        assert rates.upload_gbps <= gbps  # the link's own rates are upper bounds
        assert rates.download_gbps <= gbps
        times["compute_seconds"] = plan.times.compute_seconds
        step = _C.choose_plan(*posed(plan, rule, times, numels))["predicted"]
        print(f"{gbps} GB/s, measured {rates.upload_gbps:.3f}: {step['seconds']:.4f} s")
        steps.append((rates.upload_gbps, step["upload_seconds"], step["seconds"]))
    fast, slow = steps
    assert slow[0] < fast[0]
    assert slow[1] > fast[1]
    assert slow[2] > fast[2] * 0.995  # choices within the tolerance of the simulator


def test_a_plan_keeps_its_times(budget, tmp_path):
    config = linked(device_memory=budget)
    run, plans = plans_of(LAYERS, config)
    assert plans[MEASURED].times is None
    assert "bounds the step" not in str(plans[MEASURED])
    plan = plans[-1]
    assert f"{plan.prediction.bound.replace('_', ' ')} bounds the step of {plan.prediction.seconds:.3f} s" in str(plan)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    first = {}

    def look(engine, step):
        if step == 0:
            first.update(plan=engine.plan(), report=engine.report())

    replayed = train(LAYERS, {**config, "plan": str(path)}, steps=STEPS + 1, before_step=look)
    assert first["plan"] == plan
    assert first["report"]["predicted_step_seconds"] == plan.prediction.seconds
    assert_same(replayed, run)
    rates = plan.times.as_core()["rates"]
    assert predict(plan, plan.times.compute_seconds, rates, num_speculated_chunks=0) == plan.prediction


def test_times_of_other_accesses_are_refused(budget, tmp_path):
    _run, plans = plans_of(LAYERS, linked(device_memory=budget), steps=PLANNED)
    path = tmp_path / "plan.json"
    plans[-1].times.compute_seconds.pop()
    plans[-1].save(path)
    with pytest.raises(ValueError, match="damaged plan"):
        Plan.load(path)


def test_another_sequence_is_measured_anew(budget):
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(LAYERS.build, 0, linked(device_memory=budget))
    generator = torch.Generator().manual_seed(1)
    lengths, losses = [], []
    with engine:
        for step in range(11):
            for _ in range(1 if step < 5 else 2):
                loss = engine(**token_batch(generator))["loss"]
                engine.backward(loss)
                losses.append(loss.item())
            optimizer.step()
            times = engine.plan().times
            lengths.append(len(times.compute_seconds) if times is not None else 0)
            assert (engine.report()["predicted_step_seconds"] == 0) == (times is None)
            assert not times or lengths[-1] == len(engine.plan().timeline)
    assert lengths[:2] == [0] * 2
    assert lengths[2] == lengths[3] == lengths[4] > 0
    assert lengths[5] == 0
    assert lengths[10] > lengths[4]


@pytest.mark.parametrize("multiple", [1, 2])
def test_states_that_move_to_the_device_leave_times_what_they_are(budget, multiple):
    config = linked(device_memory=multiple * budget)
    config["optimizer"]["params"]["use_hybrid_adam"] = True
    run, plans = plans_of(LAYERS, config, steps=12)
    finalised = [[mode for access in plan.timeline for *_, mode in access["uses"]] for plan in plans]
    finalised = [modes.count(_C.ArrayUseMode.FINALISE) for modes in finalised]
    assert finalised[0] > finalised[1] == finalised[-1]
    assert run.report["num_device_state_chunks"] == finalised[0] - finalised[1]
    times = [plan.times and plan.times.compute_seconds for plan in plans]
    assert times[:2] == [None, None]
    assert times[2] == times[8] != times[9] == times[11]


def test_nothing_is_measured_where_time_decides_nothing(budget):
    """Fetches of the simulated device take no time without delays."""
    config = linked(device_memory=budget)
    del config["delays"]
    run, plans = plans_of(LAYERS, config)
    assert run.report["predicted_step_seconds"] == 0
    assert all(plan.times is None and plan.prediction is None for plan in plans)


def test_without_a_limit():
    run, plans = plans_of(LAYERS, linked())
    assert plans[-1].prediction is not None
    assert plans[-1].uploaded_bytes == sum(
        cost[0] for (_, kind), cost in plans[-1].problem["costs"].items() if kind == _C.ArrayKind.PARAM
    )
    assert_same(run, train_once(LAYERS, make_config("bf16"), steps=STEPS + 1))


def test_activations_that_leave_are_part_of_the_choice():
    plans, offloaded = [], []

    def look(engine, step):
        plans.append(engine.plan() if step else None)
        offloaded.append(engine.report()["offloaded_bytes"])

    config = offloading("auto", delays={"link_gbps": 0.02}, device_memory=int(1.2 * least("auto")))
    train(DEEP, config, steps=STEPS + 1, before_step=look, checkpointing=False)
    plan = plans[-1]
    forward = [access["phase"] == _C.Phase.FORWARD for access in plan.timeline]
    leaving, coming, needed = zip(*plan.times.activations, strict=True)
    assert 0 < sum(leaving) == offloaded[MEASURED + 1] - offloaded[MEASURED]
    assert sum(coming) == sum(needed) >= sum(leaving)  # what is asked for twice comes twice
    assert not any(bytes for bytes, is_forward in zip(leaving, forward, strict=True) if not is_forward)
    assert not any(coming[: sum(forward) - 1])  # the backward of the loss belongs to the last access of forward
    times, numels = plan.times.as_core(), [chunk.numel for chunk in plan.chunks]
    choice = _C.choose_plan(*posed(plan, plan.problem, times, numels))
    assert choice["predicted"]["seconds"] == plan.prediction.seconds
    stays = simulated(plan, plan.problem, plan.as_core(), {**times, "activations": []}, numels)
    assert plan.prediction.seconds > stays["seconds"]
    assert plan.prediction.uploaded_bytes == stays["uploaded_bytes"] + sum(coming)
