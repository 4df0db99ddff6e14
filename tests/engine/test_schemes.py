import functools
from itertools import product

import pytest
import torch

from patrickstar import _C
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.engine.test_equality import WIDE
from tests.models import MODELS, gpt2
from tests.schemes import (
    Room,
    check_clipping_that_always_acts,
    check_committed,
    check_taken_over,
    check_waiting,
    config_of,
    unfreeze_in_the_third_step,
)
from tests.training import assert_same, go_on, least_device_memory, num_committed, train

ROOM = Room(WIDE, lambda config: least_device_memory(WIDE, config, steps=2))
SMALL_ADAM = [("AdamW", "bf16"), ("AdamW", "8bit")]  # AdamW with states of float32: test_equality.py
FORMATS = {"Lion": ("fp32", "8bit"), "SGD": ("bf16", "8bit"), "Nesterov": ("fp32", "bf16")}
EACH_RULE_IN_TWO_FORMATS = [(rule, states) for rule, formats in FORMATS.items() for states in formats]
EXACT = [("AdamW", "8bit"), *product(("Lion", "SGD"), ("fp32", "8bit"))]
STOCHASTIC = [*(("AdamW", states, "stochastic") for states in ("fp32", "bf16", "8bit")), ("Lion", "8bit", "stochastic")]


def named(schemes, **kwargs):
    return pytest.mark.parametrize("scheme", schemes, ids=" ".join, **kwargs)


@named([*SMALL_ADAM, *EACH_RULE_IN_TWO_FORMATS])
def test_updates_that_wait(scheme):
    check_waiting(ROOM, scheme)


@pytest.mark.slow
@named(SMALL_ADAM)
def test_updates_that_wait_in_32_bits(scheme):
    check_waiting(ROOM, scheme, precision="fp32")


@functools.cache
def committed(scheme):
    return check_committed(ROOM, scheme)


@named([("AdamW", "bf16"), *EXACT])
def test_committed_updates(scheme):
    """Masters are split: values halfway between two parameters are rounded away from zero, once in 2^17."""
    waiting = ROOM.train(scheme, speculation="never")
    gaps = [abs(a - b) / b for a, b in zip(committed(scheme).losses, waiting.losses, strict=True)]
    assert max(gaps) < (1e-3 if scheme[0] == "AdamW" else 5e-3)


@named(STOCHASTIC)
def test_committed_updates_without_masters(scheme):
    committed(scheme)


@named([*SMALL_ADAM, ("Lion", "fp32"), ("SGD", "8bit"), ("Nesterov", "fp32")])
def test_clipping_that_always_acts(scheme):
    check_clipping_that_always_acts(ROOM, scheme)


@pytest.mark.parametrize("rule", ["Lion", "SGD"])
@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.slow)])
def test_other_precisions(rule, precision):
    check_taken_over(ROOM, (rule,), precision)


@pytest.mark.parametrize("rule", ["Lion", "SGD"])
def test_accumulation(rule):
    more = {"steps": 4, "accumulate": 2, "gradient_clipping": 0.1}
    tight = {"on_device": False, "speculation": "always", "device_memory": 2 * ROOM.scarce_bytes((rule,))}
    assert_same(ROOM.train((rule,), **more), ROOM.train((rule,), **more, **tight))


@pytest.mark.parametrize(
    ("scheme", "waiting", "committed"),
    [
        (("AdamW",), 14, 12),
        (("AdamW", "bf16"), 10, 8),
        (("AdamW", "8bit"), 8.03, 6.03),
        (("Lion",), 10, 8),
        (("Lion", "bf16"), 8, 6),
        (("Lion", "8bit"), 7.015, 5.015),
        (("AdamW", "fp32", "stochastic"), None, 10),
        (("AdamW", "bf16", "stochastic"), None, 6),
        (("AdamW", "8bit", "stochastic"), 6.03, 4.03),
    ],
)
def test_bytes_per_parameter(scheme, waiting, committed):
    for speculation, expects in (("auto", waiting), ("commit", committed)):
        if expects is None:
            continue
        engine, _ = initialize_engine(WIDE.build, 0, config_of(*scheme, speculation=speculation))
        with engine:
            chunks = [engine._session.layout.chunk(i) for i in range(engine._session.layout.num_chunks)]
        none = {chunk["states"].master == _C.StateType.NONE for chunk in chunks}
        assert none == {"stochastic" in scheme}
        assert {chunk["states"].variance == _C.StateType.NONE for chunk in chunks} == {"Lion" in scheme}
        found = sum(chunk["resting_tier_bytes"] for chunk in chunks) / sum(chunk["numel"] for chunk in chunks)
        assert expects <= found < expects + (0.7 if "8bit" in scheme else 1e-6)  # the embedding keeps float32


@pytest.mark.parametrize(
    ("scheme", "precision", "most"),
    [
        (("AdamW", "bf16"), "fp32", 0.01),
        (("AdamW", "8bit"), "fp32", 0.02),
        (("AdamW", "fp32", "stochastic"), "bf16", 0.02),
    ],
)
def test_losses_are_nearly_those_of_adamw(scheme, precision, most):
    exact = ROOM.train(("AdamW",), precision=precision, speculation="never")
    run = ROOM.train(scheme, precision=precision, speculation="never")
    gaps = [abs(ours - theirs) / theirs for ours, theirs in zip(run.losses, exact.losses, strict=True)]
    assert gaps[0] == 0
    assert 0 < max(gaps) < most


@named([*SMALL_ADAM, *EACH_RULE_IN_TWO_FORMATS, ("AdamW", "8bit", "stochastic")])
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(scheme, tmp_path):
    """The states are on the device first where they have formats of fewer bits, else on the host."""
    on_device = "fp32" not in scheme
    ahead = "commit" if "stochastic" in scheme else "always"

    def part(steps, *, load, save=False, **more):
        config = config_of(*scheme, **{"on_device": on_device, **more})
        return go_on(MODELS["gpt2"], config, steps, tmp_path, load=load, save=save)

    torch.manual_seed(0)
    saved = part(3, load=False, save=True)
    momenta = {"AdamW": ["exp_avg", "exp_avg_sq"], "Lion": ["exp_avg"]}.get(scheme[0], ["momentum_buffer"])
    assert all(set(entry) == {"step", *momenta} for entry in saved["optimizer"]["state"].values())
    assert_same_bits(part(0, load=True), saved)
    elsewhere = {"on_device": not on_device, "default_chunk_size": 4096, "speculation": ahead}
    assert_same_bits(part(2, load=True), part(2, load=True, **elsewhere))


@named([("Lion",), ("SGD",), ("AdamW", "8bit", "stochastic"), ("AdamW", "fp32")])
def test_frozen_parameters_that_are_unfrozen(scheme):
    speculation = "auto" if scheme[0] in ("Lion", "SGD") else "commit"
    run = unfreeze_in_the_third_step(config_of(*scheme, speculation=speculation))
    elsewhere = config_of(*scheme, speculation=speculation, on_device=False, default_chunk_size=4096)
    assert_same_bits(run, unfreeze_in_the_third_step(elsewhere))
    if scheme == ("AdamW", "fp32"):
        assert_same_bits(run, unfreeze_in_the_third_step(config_of(*scheme, speculation="never")))


def test_gradients_that_wait_for_the_norm_without_masters():
    scheme = STOCHASTIC[2]
    least = ROOM.scarce_bytes(scheme, on_device=False, speculation="commit")
    roomy = ROOM.train(scheme, speculation="commit")
    for more in ({}, {"on_device": False, "default_chunk_size": 4096, "device_memory": least}):
        run = ROOM.train(scheme, **more)
        assert num_committed(run.report) == 0
        assert_same(run, roomy)
    twice = {"accumulate": 2, "gradient_clipping": 0.05}
    roomy = ROOM.train(scheme, **twice)
    assert roomy.losses != ROOM.train(scheme, accumulate=2).losses
    tight = {"default_chunk_size": 4096, "delays": {"max_random_us": 500, "seed": 1}}
    config = config_of(*scheme, on_device=False, gradient_clipping=0.05)
    device_bytes = least_device_memory(WIDE, config, accumulate=2, steps=2)
    for more in ({"on_device": False, "device_memory": device_bytes}, {"device_memory": 2 * device_bytes}):
        assert_same(ROOM.train(scheme, **twice, **tight, **more), roomy)


@pytest.mark.parametrize("speculation", ["commit", "never"])
def test_states_on_both_sides_without_masters(speculation):
    config = config_of(*STOCHASTIC[1], default_chunk_size=4096, speculation=speculation)
    roomy = train(WIDE, config, steps=3)
    count = roomy.report["num_chunk_elements"]
    waiting = 1.5 if speculation == "never" else 0
    need = least_device_memory(WIDE, {**config, "host_memory": 10 * count}, steps=2)
    half = int((3.5 + waiting) * count)
    run = train(WIDE, {**config, "host_memory": half, "device_memory": need + half}, steps=3)
    assert 0 < run.report["num_device_state_chunks"] < run.report["num_chunks"]
    assert_same(run, roomy)


def test_values_without_masters_are_the_parameters():
    for value in ROOM.train(STOCHASTIC[2], speculation="commit").state.values():
        assert_same_bits(value.bfloat16().to(value.dtype), value)
    engine, _ = initialize_engine(gpt2, 0, config_of(*STOCHASTIC[2], speculation="commit"))
    with engine:
        state = engine.state_dict()
        halfway = {name: value + 2**-9 * value for name, value in state.items()}
        engine.load_state_dict(halfway)
        assert_same_bits(engine.state_dict(), {name: value.bfloat16().float() for name, value in halfway.items()})


def test_which_parameters_keep_float32():
    for states, kept in (("bf16", False), ("8bit", True)):
        engine, _ = initialize_engine(WIDE.build, 0, config_of(states=states))
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
        initialize_engine(WIDE.build, 0, config_of(states="4bit"))
