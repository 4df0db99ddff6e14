import functools

import pytest
import torch

from patrickstar import _C
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.engine.test_equality import WIDE
from tests.models import MODELS
from tests.training import Run, assert_same, go_on, least_device_memory, make_config, promised, train, two_passes

STATES = ["bf16", "8bit"]
STEPS = 6


def config_of(states, precision="bf16", *, on_device=True, speculation="auto", **more):
    config = make_config(precision, **more)
    config["optimizer"] |= {"states": states, "speculation": speculation}
    config["optimizer"]["params"]["use_hybrid_adam"] = on_device
    return config


@functools.cache
def expected(states, precision="bf16", clipping=0.0) -> Run:
    return train(WIDE, config_of(states, precision, speculation="never", gradient_clipping=clipping), steps=STEPS)


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_budgets_and_sides(states, precision):
    roomy = expected(states, precision)
    least = least_device_memory(WIDE, config_of(states, precision))
    for config in (
        config_of(states, precision, device_memory=least),
        config_of(states, precision, on_device=False, default_chunk_size=4096),
        config_of(states, precision, on_device=False, speculation="always", device_memory=2 * least),
    ):
        assert_same(train(WIDE, config, steps=STEPS), roomy)


def bytes_per_parameter(config):
    engine, _ = initialize_engine(WIDE.build, 0, config)
    with engine:
        chunks = [engine._session.layout.chunk(i) for i in range(engine._session.layout.num_chunks)]
    return sum(chunk["home_bytes"] for chunk in chunks) / sum(chunk["numel"] for chunk in chunks)


@pytest.mark.parametrize(("states", "expects"), [("bf16", 8), ("8bit", 6.03)])
def test_committed_in_backward(states, expects):
    """Split masters take two bytes less. Values halfway between two parameters are rounded otherwise, once in 2^17."""
    roomy = train(WIDE, config_of(states, speculation="commit"), steps=STEPS)
    on_host = config_of(states, speculation="commit", on_device=False)
    least = least_device_memory(WIDE, on_host, steps=2)
    for config in (on_host, config_of(states, speculation="commit", device_memory=2 * least)):
        run = train(WIDE, config, steps=STEPS)
        assert promised(run.report) == STEPS * run.report["num_chunks"]
        assert_same(run, roomy)
    assert expects <= bytes_per_parameter(on_host) < expects + 0.7  # the embedding of so small a model counts
    gaps = [abs(a - b) / b for a, b in zip(roomy.losses, expected(states).losses, strict=True)]
    assert max(gaps) < 1e-3


@pytest.mark.parametrize("states", STATES)
def test_clipping_that_always_acts(states):
    roomy = expected(states, clipping=1e-3)
    run = train(
        WIDE,
        config_of(states, on_device=False, speculation="always", gradient_clipping=1e-3),
        steps=STEPS,
    )
    assert run.report["num_settled_updates"] > 0
    assert two_passes(run.report) > 0
    assert_same(run, roomy)


@pytest.mark.parametrize(("states", "expects"), [("fp32", 14), ("bf16", 10), ("8bit", 8.03)])
def test_bytes_per_parameter(states, expects):
    assert expects <= bytes_per_parameter(config_of(states)) < expects + (0.7 if states == "8bit" else 1e-6)


@pytest.mark.parametrize(("states", "most"), [("bf16", 0.01), ("8bit", 0.02)])
def test_losses_are_nearly_those_of_adamw(states, most):
    exact, run = expected("fp32", "fp32"), expected(states, "fp32")
    gaps = [abs(ours - theirs) / theirs for ours, theirs in zip(run.losses, exact.losses, strict=True)]
    print(f"{states}: {max(gaps):.1e}")
    assert gaps[0] == 0
    assert 0 < max(gaps) < most


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("on_device", [True, False])
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(states, on_device, tmp_path):
    case = MODELS["gpt2"]

    def part(steps, *, load, save=False, **more):
        config = config_of(states, on_device=on_device, **more)
        return go_on(case, config, steps, tmp_path, load=load, save=save)

    torch.manual_seed(0)
    saved = part(3, load=False, save=True)
    assert_same_bits(part(0, load=True), saved)
    assert_same_bits(part(2, load=True), part(2, load=True, default_chunk_size=4096, speculation="always"))


def test_which_parameters_keep_float32():
    for states, kept in (("bf16", False), ("8bit", True)):
        engine, _ = initialize_engine(WIDE.build, 0, config_of(states))
        with engine:
            layout, names = engine._session.layout, [name for name, _ in engine.module.named_parameters()]
            types = [layout.chunk(layout.placement(i)[0])["states"].momentum for i in range(len(names))]
            floats = {name for name, kind in zip(names, types, strict=True) if kind == _C.StateType.FLOAT32}
            few = {name for name, param in engine.module.named_parameters() if param.dim() < 2}
            assert few <= floats if kept else not floats
            assert any("wte" in name for name in floats) == kept
            assert floats != set(names)


def test_an_unknown_scheme_is_refused():
    with pytest.raises(ValueError, match=r"optimizer\.states.*8bit"):
        initialize_engine(WIDE.build, 0, config_of("4bit"))
