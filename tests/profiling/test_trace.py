import pytest
import torch

from patrickstar import _C
from patrickstar.runtime import initialize_engine
from tests.models import MODELS, VARIED, Case, gpt2, token_batch
from tests.profiling.traces import check, total_bytes, traced
from tests.training import assert_same, least_device_memory, make_config, make_host_config, train, train_once

WIDE = Case(lambda: gpt2(hidden=64, layers=4), token_batch)


def updated(result, track):
    return sum(s["numel"] for s in result.trace["spans"] if s["track"] == track and not s["dropped"])


@pytest.mark.parametrize(
    "precision", ["bf16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp32", "fp16"))]
)
def test_budgets(precision):
    config = make_config(precision, gradient_clipping=1.0)
    plain = train_once(WIDE, config, steps=6)
    least = least_device_memory(WIDE, config)
    for budget in (least, 3 * least // 2, 2 * least, None):
        result = traced(WIDE, {**config, "device_memory": budget})
        check(result)
        assert_same(result.run, plain)
        highest = max(map(total_bytes, result.trace["accesses"]))
        print(f"{precision}, {budget}: {len(result.trace['spans'])} spans, highest {highest}")
        assert highest >= 0.99 * result.after["device_peak_bytes"]  # in between accesses a little more
        on_host, on_device = (updated(result, track) for track in (_C.Track.HOST_ADAM, _C.Track.DEVICE_ADAM))
        assert on_host + on_device == plain.report["num_parameters"]
        uploads = [span for span in result.trace["spans"] if span["track"] == _C.Track.UPLOAD]
        assert bool(uploads) == (on_host > 0)


@pytest.mark.parametrize("name", VARIED)
def test_models(name):
    config = make_config("bf16", gradient_clipping=1.0, device_memory="1MB")
    result = traced(MODELS[name], config)
    check(result)
    assert_same(result.run, train(MODELS[name], config, steps=6))


@pytest.mark.parametrize("speculation", ["always", pytest.param("never", marks=pytest.mark.slow)])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_accumulation_and_speculation(accumulate, speculation):
    config = make_host_config("bf16", gradient_clipping=1e9, device_memory="1200KB")
    config["optimizer"]["speculation"] = speculation
    result = traced(WIDE, config, accumulate=accumulate)
    check(result)
    assert_same(result.run, train_once(WIDE, config, steps=6, accumulate=accumulate))
    phases = [access["phase"] for access in result.trace["accesses"]]
    changes = sum(before != after for before, after in zip(phases, phases[1:], strict=False))
    assert changes == 2 * accumulate - 1
    assert updated(result, _C.Track.HOST_ADAM) == result.run.report["num_parameters"]


def test_dropped_speculation():
    config = make_host_config("fp32", gradient_clipping=1e-3, device_memory="2400KB")
    config["optimizer"]["speculation"] = "always"
    result = traced(WIDE, config, step=1)
    check(result)
    assert any(span["dropped"] for span in result.trace["spans"])
    assert updated(result, _C.Track.HOST_ADAM) == result.run.report["num_parameters"]


def test_scale_independent_values():
    config = make_host_config("bf16", gradient_clipping=1e-3, device_memory="1200KB")
    config["optimizer"]["speculation"] = "always"
    result = traced(WIDE, config, step=1)
    check(result)
    assert not any(span["dropped"] for span in result.trace["spans"])
    assert updated(result, _C.Track.HOST_OPEN) > 0
    assert updated(result, _C.Track.HOST_ADAM) == result.run.report["num_parameters"]


def test_skipped_step():
    config = make_config("fp16", device_memory="1200KB")
    config["fp16"] |= {"initial_scale_power": 24, "hysteresis": 1}
    result = traced(WIDE, config, step=1)
    assert result.after["num_skipped_steps"] == 1
    assert result.trace["outcome"] == _C.StepOutcome.SKIPPED
    assert updated(result, _C.Track.HOST_ADAM) == 0
    check(result)


def test_managed_parameters():
    config = make_config("bf16", use_cpu_embedding=True, gradient_clipping=1.0)
    result = traced(WIDE, config)
    check(result)
    assert_same(result.run, train_once(WIDE, config, steps=6))


def evaluate(engine, step):
    engine.eval()
    with torch.no_grad():
        engine(**token_batch(torch.Generator().manual_seed(step)))
    engine.train()


def test_evaluation_between_steps():
    config = make_config("bf16", device_memory="1200KB")
    result = traced(WIDE, config, before_step=evaluate)
    check(result)
    assert_same(result.run, train(WIDE, config, steps=6, before_step=evaluate))


def test_updates_of_the_step_before():
    torch.manual_seed(0)
    config = make_config("bf16", device_memory="16MB", default_chunk_size=256 * 1024)
    big = Case(lambda: gpt2(hidden=256, layers=4), token_batch)
    engine, optimizer = initialize_engine(big.build, 0, config)
    generator = torch.Generator().manual_seed(1)
    runtime = engine._session.runtime
    with engine:
        for step in range(4):
            loss = engine(**token_batch(generator))["loss"]
            if step == 2:
                runtime.start_trace()
            engine.backward(loss)
            optimizer.step()
            if step == 2:
                assert runtime.take_trace() is None
        trace = runtime.take_trace()
    before = [span for span in trace["spans"] if span["owner"] == _C.SpanOwner.STEP_BEFORE]
    print(f"{len(before)} updates ran on")
    host = (_C.Track.HOST_ADAM, _C.Track.HOST_STATES, _C.Track.HOST_OPEN)
    assert all(span["track"] in host and span["begin_seconds"] >= 0 for span in before)
    assert len(trace["accesses"]) > 0


class InterruptionError(Exception):
    pass


def test_an_interrupted_step_is_not_traced():
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(WIDE.build, 0, make_config("bf16", device_memory="1200KB"))
    generator = torch.Generator().manual_seed(1)
    runtime = engine._session.runtime
    with engine:
        for step in range(6):
            if step == 3:
                runtime.start_trace()

                def fail(*_):
                    raise InterruptionError

                handle = engine.module.transformer.h[1].register_forward_pre_hook(fail)
                with pytest.raises(InterruptionError):
                    engine(**token_batch(generator))
                handle.remove()
                engine.backward(engine(**token_batch(generator))["loss"])
                optimizer.zero_grad()
                assert runtime.take_trace() is None
            before = engine.report()
            engine.backward(engine(**token_batch(generator))["loss"])
            optimizer.step()
            if step == 3:
                trace = runtime.take_trace()
                uploaded = sum(s["num_bytes"] for s in trace["spans"] if s["track"] == _C.Track.UPLOAD)
                assert uploaded == engine.report()["uploaded_bytes"] - before["uploaded_bytes"] > 0
                assert len(trace["accesses"]) == len(runtime.timeline())


@pytest.mark.parametrize("stage", ["armed", "forward", "backward", "complete"])
def test_closing_with_a_trace(stage):
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(WIDE.build, 0, make_config("bf16", device_memory="1200KB"))
    generator = torch.Generator().manual_seed(1)
    engine.backward(engine(**token_batch(generator))["loss"])
    optimizer.step()
    engine._session.runtime.start_trace()
    if stage != "armed":
        loss = engine(**token_batch(generator))["loss"]
        if stage != "forward":
            engine.backward(loss)
        if stage == "complete":
            optimizer.step()
    module = engine.module
    engine.close()
    assert all(torch.isfinite(param).all() for param in module.parameters())
    with pytest.raises(_C.StateError):
        engine._session.runtime.take_trace()
