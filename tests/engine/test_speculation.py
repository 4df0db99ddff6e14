import itertools

import pytest
import torch

from patrickstar import _C
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.engine.test_equality import PRECISIONS, WIDE
from tests.models import MODELS, VARIED, Case
from tests.training import (
    assert_same,
    least_device_memory,
    make_config,
    num_committed,
    taken_over,
    train,
    train_once,
    two_passes,
)


def on_host(precision, speculation, **config):
    result = make_config(precision, **config)
    result["optimizer"]["params"]["use_hybrid_adam"] = False
    result["optimizer"]["speculation"] = speculation
    return result


def updates(run):
    return run.report["num_speculated_updates"], taken_over(run.report)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_update_is_taken_over(precision):
    run = train(WIDE, on_host(precision, "always"), steps=10)
    started, taken = updates(run)
    assert started == taken == 9 * run.report["num_chunks"]
    never = train(WIDE, on_host(precision, "never"), steps=10)
    assert updates(never) == (0, 0)
    assert_same(run, never)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_clipping_that_acts_now_and_then(precision):
    norms = sorted(train(WIDE, on_host(precision, "never", gradient_clipping=1e9)).grad_norms)
    config = {"gradient_clipping": norms[7]}
    run = train(WIDE, on_host(precision, "always", **config))
    started, taken = updates(run)
    print(f"{precision}: {started} started, {taken} taken over")
    assert 0 < taken <= started
    assert (run.report["num_scale_independent_updates"] > 0) == (precision != "fp32")
    assert_same(run, train_once(WIDE, on_host(precision, "never", **config)))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_clipping_that_always_acts(precision):
    norms = train(WIDE, on_host(precision, "never", gradient_clipping=1e9)).grad_norms
    config = {"gradient_clipping": min(norms) / 4}
    run = train(WIDE, on_host(precision, "always", **config), steps=16)
    report = run.report
    started, taken = updates(run)
    print(f"{precision}: {started} started, {taken} taken over, {report['num_scale_independent_updates']} independent")
    assert taken == report["num_scale_independent_updates"] >= 8 * report["num_chunks"]
    assert_same(run, train_once(WIDE, on_host(precision, "never", **config), steps=16))


def test_clipping_that_always_acts_ends_speculation_in_32_bits():
    run = train(WIDE, on_host("fp32", "always", gradient_clipping=1e-3), steps=24)
    started, taken = updates(run)
    assert taken == 0
    assert started <= 6 * run.report["num_chunks"]
    assert_same(run, train_once(WIDE, on_host("fp32", "never", gradient_clipping=1e-3), steps=24))


def test_factors_that_nobody_foresaw():
    def limit(engine, optimizer, data, step):
        engine.clip_grad_norm_([0.05, 0.06, 1e-4, 0.05, 1e9, 0.04][step % 6])

    losses, state, report = interfered(on_host("bf16", "always"), limit, steps=24)
    expected_losses, expected_state, _ = interfered(on_host("bf16", "never"), limit, steps=24)
    started, taken = report["num_speculated_updates"], taken_over(report)
    print(f"{started} started, {taken} taken over, {report['num_scale_independent_updates']} independent")
    assert 0 < report["num_scale_independent_updates"] <= taken < started
    assert_same_bits((losses, state), (expected_losses, expected_state))


def test_overflow():
    config = {"initial_scale_power": 24, "hysteresis": 1}
    runs = []
    for speculation in ("always", "never"):
        settings = on_host("fp16", speculation)
        settings["fp16"] |= config
        runs.append(train(MODELS["gpt2"], settings, steps=20))
    assert runs[0].report["num_skipped_steps"] == runs[1].report["num_skipped_steps"] > 3
    assert updates(runs[0])[1] > 0
    assert_same(*runs)


@pytest.mark.parametrize("name", VARIED)
def test_models(name):
    config = on_host("bf16", "always", gradient_clipping=1.0, device_memory="1MB")
    run = train(MODELS[name], config, steps=8)
    assert_same(run, train(MODELS[name], on_host("bf16", "never", gradient_clipping=1.0), steps=8))


def interfered(config, interfere, steps=12, case=MODELS["mlp"]):
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(case.build, 0, config)
    generator = torch.Generator().manual_seed(1)
    losses = []
    with engine:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        for step in range(steps):
            optimizer.zero_grad()
            data = case.batch(generator)
            loss = engine(**data)["loss"]
            engine.backward(loss)
            interfere(engine, optimizer, data, step)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        return losses, engine.state_dict(), engine.report()


def some_weight(engine):
    return next(param for param in engine.module.parameters() if param.dim() == 2)


def second_backward(engine, optimizer, data, step):
    if step % 4 == 2:
        engine.backward(engine(**data)["loss"])


def forgotten_gradients(engine, optimizer, data, step):
    if step % 3 == 1:
        optimizer.zero_grad()
        engine.backward(engine(**data)["loss"])


def other_rate(engine, optimizer, data, step):
    if step % 3 == 1:
        optimizer.param_groups[0]["lr"] *= 0.5


def other_values(engine, optimizer, data, step):
    if step % 3 == 1:
        engine.load_state_dict({name: value * 0.5 for name, value in engine.state_dict().items()})


def other_states(engine, optimizer, data, step):
    if step == 4:
        state = optimizer.state_dict()
        for entry in state["state"].values():
            entry["exp_avg"] = entry["exp_avg"] * 0.5
        optimizer.load_state_dict(state)


def written_parameter(engine, optimizer, data, step):
    if step == 5:
        with torch.no_grad():
            some_weight(engine).mul_(0.9)


def nothing(engine, optimizer, data, step):
    pass


INTERFERENCES = [
    nothing, second_backward, forgotten_gradients, other_rate, other_values, other_states, written_parameter,
]  # fmt: skip


@pytest.mark.parametrize("interfere", INTERFERENCES)
def test_what_changes_between_backward_and_step(interfere):
    losses, state, report = interfered(on_host("bf16", "always"), interfere)
    expected_losses, expected_state, _ = interfered(on_host("bf16", "never"), interfere)
    print(f"{report['num_speculated_updates']} started, {taken_over(report)} taken over")
    assert taken_over(report) > 0
    assert_same_bits((losses, state), (expected_losses, expected_state))


def check_closing_between_backward_and_step(config, num_steps):
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(WIDE.build, 0, config)
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        engine.backward(engine(**WIDE.batch(generator))["loss"])
        optimizer.step()
    before = engine.state_dict()
    engine.backward(engine(**WIDE.batch(generator))["loss"])
    module = engine.module
    engine.close()
    assert_same_bits(module.state_dict(), before)


@pytest.mark.parametrize("num_steps", [0, 3])
def test_closing_between_backward_and_step(num_steps):
    check_closing_between_backward_and_step(on_host("bf16", "always"), num_steps)


def test_host_memory_bounds_it():
    never = train(WIDE, on_host("fp16", "never"))  # bfloat16: test_values_in_place.py
    least = never.report["host_peak_bytes"]
    for budget, some in ((least + 2**17, False), (least * 3 // 2, True), (4 * least, True)):
        run = train(WIDE, on_host("fp16", "always", host_memory=budget, default_chunk_size=32 * 1024))
        print(f"budget {budget}: {updates(run)}, host peak {run.report['host_peak_bytes']}")
        assert run.report["host_peak_bytes"] <= budget
        assert (updates(run)[1] > 0) == some
        assert_same(run, never)


@pytest.fixture(scope="module")
def frugal():
    """Host memory for all states and for ``share`` of two copies of the compute values; speculation takes the
    second.
    """

    def config(precision, share, accumulate=1, **options):
        never = on_host(precision, "never", default_chunk_size=32 * 1024)
        plain = train(WIDE, never, steps=2, accumulate=accumulate).report
        values = plain["num_chunk_elements"] * (4 if precision == "fp32" else 2)
        budget = plain["host_peak_bytes"] + int(2 * share * values)
        return on_host(precision, "always", host_memory=budget, default_chunk_size=32 * 1024, **options)

    return config


@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_phase_updates_where_memory_is_short(precision, frugal):
    run = train(WIDE, frugal(precision, 1.0), steps=8)
    started, taken = updates(run)
    print(f"{precision}: {started} started, {taken} taken over, {two_passes(run.report)} passes of states")
    assert started == taken >= 6 * run.report["num_chunks"]
    assert two_passes(run.report) >= taken / 2
    assert_same(run, train_once(WIDE, on_host(precision, "never"), steps=8))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_two_phase_updates_where_clipping_acts(precision, share, frugal):
    norms = sorted(train(WIDE, on_host(precision, "never", gradient_clipping=1e9), steps=8).grad_norms)
    run = train(WIDE, frugal(precision, share, gradient_clipping=norms[4]), steps=8)
    assert two_passes(run.report) > 0
    assert_same(run, train_once(WIDE, on_host(precision, "never", gradient_clipping=norms[4]), steps=8))


def test_two_phase_updates_with_accumulation(frugal):
    run = train(WIDE, frugal("bf16", 1.0, accumulate=2), steps=8, accumulate=2)
    assert two_passes(run.report) > 0
    assert_same(run, train_once(WIDE, on_host("bf16", "never"), steps=8, accumulate=2))


def test_it_comes_back_after_memory_was_needed():
    counts = []

    def evict_all(engine, step):
        if step == 4:
            engine._session.runtime.evict_all_from_device(_C.EvictionScope.EVERYTHING)
        counts.append(engine.report()["num_speculated_updates"])

    config = make_config("bf16", default_chunk_size=32 * 1024)
    never = {**config, "optimizer": {**config["optimizer"], "speculation": "never"}}
    least = train(WIDE, on_host("bf16", "never", default_chunk_size=32 * 1024), steps=2).report["host_peak_bytes"]
    budget = {"device_memory": least_device_memory(WIDE, config) + 4_000_000, "host_memory": least * 21 // 20}
    always = {**config, "optimizer": {**config["optimizer"], "speculation": "always"}, **budget}
    run = train(WIDE, always, steps=16, before_step=evict_all)
    print(f"{run.report['num_device_state_chunks']} chunks on the device; {counts}")
    assert counts[4] == counts[6] < counts[-1]  # host memory is prepared in the background
    assert_same(run, train_once(WIDE, never, steps=16))
    assert run.report["num_device_state_chunks"] > 0  # they have come back by now


def test_choice_of_chunks_follows_from_sizes():
    counts = []

    def choose_anew(engine, step):
        counts.append(engine.report()["num_speculated_updates"])
        if step >= 5:
            engine._session.runtime.plan_anew()

    # A forward of one row is shorter than a pass over states.
    case = Case(
        lambda: torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))),
        lambda generator: {"input": torch.randn(1, 1024, generator=generator)},
        lambda output: output.square().mean(),
    )
    never = on_host("fp32", "never", default_chunk_size=2**20)
    plain = train(case, never, steps=2).report
    budget = plain["host_peak_bytes"] + 8 * plain["num_chunk_elements"]
    always = on_host("fp32", "always", host_memory=budget, default_chunk_size=2**20)
    train(case, always, steps=12, before_step=choose_anew)
    started = [after - before for before, after in itertools.pairwise(counts)]
    # Sizes give the most. A plan may defer updates by the times that it measured.
    assert started[3] == max(started[4:]) and min(started[4:]) > 0, started


@pytest.mark.parametrize("name", VARIED)
def test_committed_updates_change_no_number(name):
    case = MODELS[name]
    expected = train(case, make_config(), steps=5)
    config = on_host("fp32", "commit", default_chunk_size=4096)
    run = train(case, {**config, "device_memory": least_device_memory(case, make_config(), steps=2)}, steps=5)
    assert_same(run, expected)
    assert num_committed(run.report) > 0
    assert run.report["num_speculated_updates"] == 0
    config["optimizer"]["params"]["use_hybrid_adam"] = True
    on_device = train(case, config, steps=5)
    assert_same(on_device, expected)
    assert on_device.report["num_device_state_chunks"] > 0
    assert num_committed(on_device.report) > 0


def committing_engine():
    config = on_host("fp32", "commit", default_chunk_size=4096)
    engine, optimizer = initialize_engine(MODELS["mlp"].build, 0, config)
    data = MODELS["mlp"].batch(torch.Generator().manual_seed(0))
    engine.backward(engine(**data)["loss"])
    optimizer.step()  # makes the states
    engine.backward(engine(**data)["loss"])
    assert engine._session.runtime.num_committed > 0
    return engine, optimizer, data


def test_what_would_break_the_promise_is_refused():
    engine, optimizer, data = committing_engine()
    with engine:
        parameter = next(engine.parameters())
        for breach in (
            lambda: engine.backward(engine(**data)["loss"]),
            optimizer.zero_grad,
            lambda: engine.load_state_dict(engine.state_dict()),
            lambda: optimizer.param_groups[0].update(lr=0.5) or optimizer.step(),
        ):
            with pytest.raises(RuntimeError, match='set optimizer.speculation to "auto"'):
                breach()
        assert parameter.requires_grad
        optimizer.param_groups[0]["lr"] = 1e-3
        optimizer.step()
        assert engine.report()["num_steps"] == 2


def test_a_checkpoint_replaces_a_step_whose_backward_has_updated(tmp_path):
    engine, optimizer, data = committing_engine()
    with engine:
        optimizer.step()
        engine.save_checkpoint(tmp_path)
        saved = engine.state_dict(), optimizer.state_dict()["state"]
        engine.backward(engine(**data)["loss"])
        with pytest.raises(_C.StateError, match="save_checkpoint between backward and step"):
            engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
        assert_same_bits((engine.state_dict(), optimizer.state_dict()["state"]), saved)
        losses = [engine(**data)["loss"]]
        engine.backward(losses[0])
        optimizer.step()
        after = engine.state_dict()
        engine.load_checkpoint(tmp_path)
        losses.append(engine(**data)["loss"])
        engine.backward(losses[1])
        optimizer.step()
        assert_same_bits((losses[1], engine.state_dict()), (losses[0], after))


def test_commit_and_gradients_that_are_not_finite(caplog):
    engine, optimizer, data = committing_engine()
    with engine:
        optimizer.step()
        engine.backward(engine(**data)["loss"] * float("nan"))
        optimizer.step()
        assert "are applied" in caplog.text
        assert engine.state_dict()["embed.weight"].isnan().any()


@pytest.mark.parametrize("more", [{"gradient_clipping": 1.0}, {"fp16": {"enabled": True}}])
def test_commit_needs_a_factor_that_is_known(more):
    with pytest.raises(ValueError, match="before the norm of all gradients is known"):
        initialize_engine(MODELS["mlp"].build, 0, {"optimizer": {"speculation": "commit"}, **more})


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_states_that_move_while_they_are_updated(precision):
    case = MODELS["gpt2"]

    def part(before, **more):
        config = make_config(precision, default_chunk_size=4096, **more)
        config["optimizer"]["speculation"] = "always"
        torch.manual_seed(0)
        engine, optimizer = initialize_engine(case.build, 0, config)
        with engine:
            if before is not None:
                engine.load_state_dict(before[0])
                optimizer.load_state_dict(before[1])
            generator = torch.Generator().manual_seed(0)
            for _ in range(2):
                engine.backward(case.loss(engine(**case.batch(generator))))
                optimizer.step()
                optimizer.zero_grad()
            return (engine.state_dict(), optimizer.state_dict()), engine.report()

    before, _ = part(None)
    expected, _ = part(before)
    tight, report = part(before, device_memory="1MB")
    assert report["num_device_state_chunks"] > 0
    assert_same_bits(tight, expected)
