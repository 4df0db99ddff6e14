import pytest
import torch

from patrickstar import _C
from patrickstar.machine import state_scheme
from patrickstar.session import core_setup
from tests.bits import assert_same_bits
from tests.engine.test_equality import WIDE, short_batch, wide_gpt2
from tests.engine.test_speculation import (
    INTERFERENCES,
    check_closing_between_backward_and_step,
    interfered,
    nothing,
    on_host,
    second_backward,
    some_weight,
    updates,
)
from tests.models import MODELS, VARIED, Case
from tests.training import (
    ADAM,
    assert_same,
    go_on,
    least_device_memory,
    make_config,
    taken_over,
    train,
    train_once,
    two_passes,
)

CHUNK = 16 * 1024


def plain(**config):
    return on_host("bf16", "never", default_chunk_size=CHUNK, **config)


def scarce(case, **config):
    """Host memory for the states and half a byte per parameter."""
    report = train(case, plain(), steps=2).report
    host_memory = report["host_peak_bytes"] + report["num_chunk_elements"] // 2
    return on_host("bf16", "always", default_chunk_size=CHUNK, host_memory=host_memory, **config)


@pytest.fixture(scope="module")
def wide():
    return scarce(WIDE)


def changed(config, **more):
    return {**config, **more}


def fine_tuning(config):
    params = {**ADAM, "lr": 1e-5, "use_hybrid_adam": False}
    return changed(config, optimizer={**config["optimizer"], "params": params})


def test_all_updates_begin_in_backward(wide):
    """14.5 bytes per parameter; separate new parameters would take 16."""
    run = train(WIDE, wide, steps=10)
    started, taken = updates(run)
    num_values = 9 * run.report["num_chunk_elements"]
    in_place = run.report["num_values_in_place"]
    print(f"{in_place / num_values:.1%} of all values in place, host peak {run.report['host_peak_bytes']}")
    assert started == taken == 9 * run.report["num_chunks"]
    assert two_passes(run.report) == taken
    assert in_place > num_values / 2  # the learning rate is 1e-3, and the model 64 wide
    assert run.report["host_peak_bytes"] <= wide["host_memory"]
    assert_same(run, train_once(WIDE, plain(), steps=10))


def test_nearly_all_values_are_in_place_in_fine_tuning(wide):
    config = fine_tuning(wide)
    run = train(WIDE, config, steps=10)
    num_values = 9 * run.report["num_chunk_elements"]
    assert run.report["num_values_in_place"] > 0.9 * num_values
    assert_same(run, train_once(WIDE, fine_tuning(plain()), steps=10))


def test_room_enough_changes_the_way_and_no_number(wide):
    run = train(WIDE, changed(wide, host_memory=4 * wide["host_memory"]), steps=10)
    assert run.report["num_values_in_place"] == 0
    assert_same(run, train_once(WIDE, wide, steps=10))


def half_frozen():
    model = wide_gpt2()
    model.transformer.h[:2].requires_grad_(False)
    return model


def test_frozen_parameters_keep_no_update_waiting(monkeypatch):
    monkeypatch.setattr(state_scheme, "lacks_room_ahead", lambda layout, **budgets: True)
    case = Case(half_frozen, short_batch)

    def thaw(engine, step):
        engine.module.transformer.h[1].requires_grad_(step >= 4)

    run = train(case, on_host("bf16", "always", default_chunk_size=CHUNK), steps=8, before_step=thaw)
    in_place = [report["num_values_in_place"] for report in run.chunk_reports]
    print(f"values in place by step: {in_place}")
    assert 0 < in_place[3] < in_place[5] and in_place[3] < in_place[7] - in_place[3]
    assert_same(run, train(case, plain(), steps=8, before_step=thaw))


@pytest.mark.parametrize("rank", [1, 4, 7])
def test_clipping_that_acts_now_and_then(wide, rank):
    norms = sorted(train(WIDE, plain(gradient_clipping=1e9), steps=8).grad_norms)
    clipping = {"gradient_clipping": norms[rank]}
    run = train(WIDE, changed(wide, **clipping), steps=8)
    started, taken = updates(run)
    print(f"{started} started, {taken} taken over, {run.report['num_scale_independent_updates']} independent")
    assert run.report["num_values_in_place"] > 0
    assert_same(run, train_once(WIDE, plain(**clipping), steps=8))


def test_clipping_that_always_acts(wide):
    config = fine_tuning(changed(wide, gradient_clipping=1e-3))
    run = train(WIDE, config, steps=16)
    started, taken = updates(run)
    print(f"{started} started, {taken} taken over, {run.report['num_scale_independent_updates']} independent")
    assert taken == run.report["num_scale_independent_updates"] >= 8 * run.report["num_chunks"]
    assert run.report["num_values_in_place"] > 0
    assert_same(run, train_once(WIDE, fine_tuning(plain(gradient_clipping=1e-3)), steps=16))


def another_forward(engine, optimizer, data, step):
    if step % 3 == 1:
        with torch.no_grad():
            engine(**data)


def looked_at(engine, optimizer, data, step):
    if step % 4 == 1:
        engine.state_dict()
    elif step % 4 == 2:
        optimizer.state_dict()
    elif step % 4 == 3:
        some_weight(engine).sum()


def forgotten_backward(engine, optimizer, data, step):
    if step % 3 == 2:
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="on purpose"):
            engine.backward(stop_in_backward(engine(**data)["loss"]))
        engine.backward(engine(**data)["loss"])


class _Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("on purpose")


def stop_in_backward(loss):
    return _Stop.apply(loss)


# There is no room for float32 sums of gradients.
WITHOUT_SUMS = [interfere for interfere in INTERFERENCES if interfere is not second_backward]


@pytest.mark.parametrize("interfere", [*WITHOUT_SUMS, another_forward, looked_at, forgotten_backward])
def test_what_changes_between_backward_and_step(interfere, wide):
    losses, state, report = interfered(wide, interfere, case=WIDE)
    expected_losses, expected_state, _ = interfered(plain(), interfere, case=WIDE)
    print(f"{report['num_speculated_updates']} started, {taken_over(report)} taken over")
    assert taken_over(report) > 0
    assert report["num_values_in_place"] > 0
    assert_same_bits((losses, state), (expected_losses, expected_state))


def test_gradients_that_are_not_finite(wide):
    def spoil(engine, optimizer, data, step):
        if step % 3 == 1:
            optimizer.zero_grad()
            engine.backward(engine(**data)["loss"] * float("inf"))

    losses, state, report = interfered(wide, spoil, case=WIDE)
    expected_losses, expected_state, expected_report = interfered(plain(), spoil, case=WIDE)
    assert report["num_skipped_steps"] == expected_report["num_skipped_steps"] == 4
    assert report["num_values_in_place"] > 0
    assert_same_bits((losses, state), (expected_losses, expected_state))


@pytest.mark.parametrize("num_steps", [1, 3])
def test_closing_between_backward_and_step(num_steps, wide):
    check_closing_between_backward_and_step(wide, num_steps)


@pytest.mark.parametrize("name", VARIED)
def test_models(name):
    case, small = MODELS[name], {"default_chunk_size": 4096, "gradient_clipping": 1.0}
    plain_run = train(case, {**plain(), **small}, steps=8)
    report = plain_run.report
    reserved = 4 * 2 * report["chunk_numel"]  # for gradients on their way
    config = {
        **scarce(case),
        **small,
        "host_memory": report["host_peak_bytes"] + reserved + report["num_chunk_elements"],
    }
    least = least_device_memory(case, config, steps=3)
    run = train(case, changed(config, device_memory=least), steps=8)
    print(f"{name}: {run.report['num_values_in_place']} of 7 x {report['num_chunk_elements']} in place")
    assert_same(run, plain_run)


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_states_on_both_sides(share):
    config = make_config("bf16", default_chunk_size=CHUNK)
    least = least_device_memory(WIDE, config, steps=3)
    report = train(WIDE, plain(), steps=2).report
    states = 14 * report["num_chunk_elements"]
    host_memory = report["host_peak_bytes"] - int(share * states) + report["num_chunk_elements"] // 2
    budgets = {"device_memory": least + int(1.1 * share * states), "host_memory": host_memory}
    config["optimizer"]["speculation"] = "always"
    run = train(WIDE, changed(config, **budgets), steps=10)
    print(f"{run.report['num_device_state_chunks']} of {run.report['num_chunks']} chunks on the device")
    assert 0 < run.report["num_device_state_chunks"] < run.report["num_chunks"]
    assert run.report["num_values_in_place"] > 0
    assert_same(run, train_once(WIDE, plain(), steps=10))


@pytest.fixture
def full(monkeypatch):
    monkeypatch.setattr(state_scheme, "lacks_room_ahead", lambda layout, **budgets: True)
    make_options = core_setup.make_engine_options
    config = make_config("bf16", default_chunk_size=CHUNK)
    least = least_device_memory(WIDE, config, steps=3)
    report = train(WIDE, plain(), steps=2).report
    states = 14 * report["num_chunk_elements"]
    config["optimizer"]["speculation"] = "always"

    def make(left_share, device_share=0.5, **more):
        def make_generous_options(*args):
            options = make_options(*args)
            options.device.left_by_activations_bytes = int(left_share * 2 * report["num_chunk_elements"])
            return options

        monkeypatch.setattr(core_setup, "make_engine_options", make_generous_options)
        host_memory = report["host_peak_bytes"] - states // 3 + report["num_chunk_elements"] // 2
        budgets = {"device_memory": least + int(device_share * states), "host_memory": host_memory}
        return changed(config, **budgets, **more)

    return make


def gradients_with_device_buffers(engine):
    runtime = engine._session.runtime
    costs = runtime.plan_problem()["costs"]
    on_device = [
        chunk for chunk in range(engine.report()["num_chunks"]) if runtime.resting_tier(chunk) == _C.Tier.DEVICE
    ]
    assert on_device
    return sum((chunk, _C.ArrayKind.GRAD) in costs for chunk in on_device) / len(on_device)


@pytest.mark.parametrize("left_share", [0.1, 0.3, 1.0])
def test_gradients_wait_where_activations_were(full, left_share):
    run = train(WIDE, full(left_share), steps=8)
    assert run.report["num_device_state_chunks"] > 0 < run.report["num_values_in_place"]
    assert_same(run, train_once(WIDE, plain(), steps=8))


def test_plans_reckon_what_lies_where_activations_were_as_nothing(full):
    shares = {}
    for left_share in (0.0, 0.1, 1.0):

        def look(engine, step, left_share=left_share):
            if step == 5:
                shares[left_share] = gradients_with_device_buffers(engine)

        train(WIDE, full(left_share), steps=6, before_step=look)
    assert shares[0.0] == 1 > shares[0.1] > shares[1.0] == 0


@pytest.mark.parametrize("interference", ["clipping", "all_evicted", "accumulating", "looked at"])
def test_gradients_where_activations_were_survive(full, interference):
    more = {"gradient_clipping": 1e-3} if interference == "clipping" else {}

    def interfere(engine, step):
        if interference == "all_evicted" and step in (3, 4):
            engine._session.runtime.evict_all_from_device(_C.EvictionScope.VALUES)
        elif interference == "looked at":
            engine.state_dict()

    accumulate = 2 if interference == "accumulating" else 1
    config = full(0.3, 0.6, **more)
    config["host_memory"] *= accumulate  # for sums
    run = train(WIDE, config, steps=6, before_step=interfere, accumulate=accumulate)
    assert_same(run, train_once(WIDE, plain(**more), steps=6, accumulate=accumulate))


def test_checkpoints_do_not_know_of_it(tmp_path, wide):
    runs = {}
    for name, first, second in (("there", wide, plain()), ("back", plain(), wide), ("never", plain(), plain())):
        folder = tmp_path / name
        torch.manual_seed(0)
        go_on(WIDE, first, 4, folder, load=False, save=True)
        runs[name] = go_on(WIDE, second, 5, folder, load=True)
    assert_same_bits(runs["there"], runs["never"])
    assert_same_bits(runs["back"], runs["never"])


def test_gradients_that_accumulate(wide):
    run = train(WIDE, changed(wide, host_memory=2 * wide["host_memory"]), steps=6, accumulate=2)
    assert_same(run, train_once(WIDE, plain(), steps=6, accumulate=2))


def test_memory_that_others_need(wide):
    counts = []

    def evict_all(engine, step):
        if step == 4:
            engine._session.runtime.evict_all_from_device(_C.EvictionScope.EVERYTHING)
        counts.append(engine.report()["num_speculated_updates"])

    config = make_config("bf16", default_chunk_size=CHUNK)
    least = least_device_memory(WIDE, config, steps=2)
    config["optimizer"]["speculation"] = "always"
    budgets = {"device_memory": least + 2_000_000, "host_memory": wide["host_memory"]}
    run = train(WIDE, changed(config, **budgets), steps=24, before_step=evict_all)
    assert counts[-1] > counts[5]
    assert_same(run, train_once(WIDE, plain(), steps=24))


@pytest.mark.slow
@pytest.mark.parametrize("clipping", [0.0, 0.05, 1e-3])
def test_random_delays_change_no_number(wide, clipping):
    expected = train_once(WIDE, plain(gradient_clipping=clipping), steps=6)
    for seed in range(4):
        config = changed(wide, gradient_clipping=clipping, delays={"max_random_us": 2000, "seed": seed})
        assert_same(train(WIDE, config, steps=6), expected)


def test_nothing_is_in_place_beside_what_cannot_be(wide):
    half = on_host("fp16", "always", default_chunk_size=CHUNK, host_memory=wide["host_memory"])
    assert train(WIDE, half, steps=3).report["num_values_in_place"] == 0
    lion = changed(wide, optimizer={"type": "Lion", "params": {"lr": 1e-4}, "speculation": "always"})
    assert train(WIDE, lion, steps=3).report["num_values_in_place"] == 0


def test_the_step_before_is_whole_when_nothing_interferes(wide):
    losses, _, report = interfered(wide, nothing, case=WIDE)
    assert losses[-1] < losses[0]
    assert report["num_steps"] == 12


def test_updates_ahead_keep_their_memory_where_chunks_take_more_than_their_limit(wide, monkeypatch):
    make_options = core_setup.make_engine_options
    config = make_config("bf16", default_chunk_size=CHUNK)
    least = least_device_memory(WIDE, config, steps=3)
    report = train(WIDE, plain(), steps=2).report
    states = 14 * report["num_chunk_elements"]
    host_memory = report["host_peak_bytes"] - states // 2 + report["num_chunk_elements"] // 2
    budgets = {"device_memory": least + int(0.6 * states), "host_memory": host_memory}
    config["optimizer"]["speculation"] = "always"

    def make_limited_options(*args):
        options = make_options(*args)
        options.residency.chunk_buffer_limit_bytes = (
            12 * states // 28
        )  # of states, not of gradients and values beside them
        return options

    monkeypatch.setattr(core_setup, "make_engine_options", make_limited_options)
    run = train(WIDE, changed(config, **budgets), steps=10)
    started, taken = updates(run)
    print(f"{started} started, {taken} taken over, {run.report['num_evictions']} evictions")
    assert taken > 5 * (run.report["num_chunks"] - run.report["num_device_state_chunks"])
    assert_same(run, train_once(WIDE, plain(), steps=10))


@pytest.mark.parametrize("share", [0.55, 0.7])
def test_leading_states_leave_last(share, monkeypatch):
    """The host has room for some arrays of a chunk alone. With two of these amounts a chunk's leading state once found
    room there and its value none.
    """
    make_options = core_setup.make_engine_options

    def make_limited_options(*args):
        options = make_options(*args)
        options.residency.chunk_buffer_limit_bytes = int(0.15 * states)
        return options

    config = make_config("bf16", default_chunk_size=CHUNK)
    least = least_device_memory(WIDE, config, steps=3)
    report = train(WIDE, plain(), steps=2).report
    states = 14 * report["num_chunk_elements"]
    config["optimizer"]["speculation"] = "always"
    monkeypatch.setattr(state_scheme, "lacks_room_ahead", lambda layout, **budgets: True)
    monkeypatch.setattr(core_setup, "make_engine_options", make_limited_options)
    expected = train_once(WIDE, plain(), steps=5)
    for num_bytes in range(0, 16 * CHUNK, CHUNK):
        host_memory = report["host_peak_bytes"] - states // 2 + num_bytes
        budgets = {"device_memory": least + int(share * states), "host_memory": host_memory}
        assert_same(train(WIDE, changed(config, **budgets), steps=5), expected)
