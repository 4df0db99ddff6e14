"""Updates on the device of states that stay on the host: the same numbers, whoever updates."""

from __future__ import annotations

import pytest

from patrickstar import _C
from tests.models import MODELS, VARIED
from tests.test_equality import PRECISIONS, WIDE
from tests.training import assert_same, least_device_memory, make_config, train


def on_host(precision, streaming, speculation="never", **config):
    """All optimizer states on the host."""
    result = make_config(precision, **config)
    result["optimizer"]["params"]["use_hybrid_adam"] = False
    result["optimizer"] |= {"speculation": speculation, "streaming": streaming}
    return result


@pytest.mark.parametrize("speculation", ["never", "always", "commit"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_update_passes_through_the_device(precision, speculation):
    if precision == "fp16" and speculation == "commit":
        speculation = "always"
    run = train(WIDE, on_host(precision, "always", speculation), steps=4)
    # Without speculation updates of small chunks are batched; with it the first step's are.
    least = 4 if speculation == "never" else 3 * run.report["num_chunks"]
    assert run.report["num_streamed_updates"] >= least
    never = train(WIDE, on_host(precision, "never", speculation), steps=4)
    assert never.report["num_streamed_updates"] == 0
    assert_same(run, never)


@pytest.mark.parametrize("name", VARIED)
def test_models(name):
    """Many small pieces (a buffer is 8 KiB), with unused, shared and frozen parameters, and clipping."""
    config = on_host("fp32", "always", "always", gradient_clipping=1.0, device_memory="2MB")
    run = train(MODELS[name], config, steps=6)
    assert run.report["num_streamed_updates"] > 0
    assert_same(run, train(MODELS[name], on_host("fp32", "never", gradient_clipping=1.0), steps=6))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_accumulation(precision):
    """The gradient is a float32 sum: the parameter has a place of its own."""
    runs = [
        train(WIDE, on_host(precision, streaming, gradient_clipping=0.1), steps=3, accumulate=2)
        for streaming in ("always", "never")
    ]
    assert runs[0].report["num_streamed_updates"] > 0 == runs[1].report["num_streamed_updates"]
    assert_same(*runs)


def test_the_least_device_memory():
    """Buffers are given back when something else needs their memory; nothing fails for their sake."""
    case = MODELS["gpt2"]
    config = on_host("bf16", "always", default_chunk_size=4096)
    least = least_device_memory(case, on_host("bf16", "never", default_chunk_size=4096), steps=6)
    run = train(case, {**config, "device_memory": least}, steps=6)
    assert run.report["device_peak_bytes"] <= least
    assert_same(run, train(case, on_host("bf16", "never"), steps=6))


@pytest.mark.parametrize("speculation", ["never", "always", "commit"])
def test_random_delays(speculation):
    case = MODELS["shared"]
    expected = train(case, make_config("bf16"), steps=4)
    for seed in (1, 2, 3):
        config = on_host("bf16", "always", speculation, default_chunk_size=4096, device_memory="512KiB")
        run = train(case, {**config, "delays": {"max_random_us": 3000, "seed": seed}}, steps=4)
        assert run.report["num_streamed_updates"] > 0
        assert_same(run, expected)


def test_rates():
    """What waits and the measured speed say when an executor would be done."""
    rate = _C.UpdateRate(first_guess=100.0)
    assert rate.seconds_until_done(50) == pytest.approx(0.5)
    rate.submitted(100)
    assert rate.seconds_until_done(50) == pytest.approx(1.5)
    rate.finished(100, 2.0)
    assert rate.params_per_second() == pytest.approx(50)
    assert rate.seconds_until_done(50) == pytest.approx(1)
    rate.submitted(10)
    rate.finished(10, 0.0)  # cancelled: no measurement
    assert rate.params_per_second() == pytest.approx(50)
    for _ in range(100):
        rate.submitted(10)
        rate.finished(10, 0.1)
    assert rate.params_per_second() == pytest.approx(100, rel=1e-3)  # recent updates count
