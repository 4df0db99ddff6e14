import functools

import pytest
import torch

from patrickstar import _C, CheckpointError
from patrickstar.optimizer.lion import Lion
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.engine.test_equality import WIDE
from tests.models import MODELS, gpt2, token_batch
from tests.training import (
    Run,
    assert_same,
    go_on,
    least_device_memory,
    make_config,
    promised,
    taken_over,
    train,
    two_passes,
)

PARAMS = {
    "Lion": {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1},
    "SGD": {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
    "Nesterov": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
}
RULES = ["Lion", "SGD"]
STEPS = 6


def config_of(rule, precision="bf16", *, on_device=True, speculation="auto", states="fp32", **more):
    config = make_config(precision, **more)
    params = {**PARAMS[rule], "use_hybrid_adam": on_device}
    kind = "SGD" if rule == "Nesterov" else rule
    config["optimizer"] = {"type": kind, "params": params, "speculation": speculation, "states": states}
    return config


def lion(params, lr, betas, weight_decay):
    """Chen et al. 2023, algorithm 2; lerp(m, g, 1 - beta) is beta * m + (1 - beta) * g."""
    momenta = [torch.zeros_like(param) for param in params]

    @torch.no_grad()
    def step():
        for param, momentum in zip(params, momenta, strict=True):
            if param.grad is None:
                continue
            update = torch.lerp(momentum, param.grad, 1 - betas[0]).sign()
            param.mul_(1 - lr * weight_decay).sub_(update, alpha=lr)
            momentum.lerp_(param.grad, 1 - betas[1])

    return step


def plainly(case, rule, steps, seed=0):
    torch.manual_seed(seed)
    module = case.build()
    params = list(module.parameters())
    step = (lion if rule == "Lion" else lambda p, **o: torch.optim.SGD(p, **o).step)(params, **PARAMS[rule])
    generator = torch.Generator().manual_seed(seed + 1)
    losses = []
    for _ in range(steps):
        module.zero_grad()
        loss = case.loss(module(**case.batch(generator)))
        loss.backward()
        losses.append(loss.item())
        step()
    return losses, {name: value.detach() for name, value in module.state_dict().items()}


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="PyTorch has no fma below AVX2")
@pytest.mark.parametrize("rule", PARAMS)
@pytest.mark.parametrize("name", ["gpt2", "mixture_of_experts"])
def test_the_bits_of_torch(rule, name):
    case = MODELS[name]
    losses, state = plainly(case, rule, 8)
    run = train(case, config_of(rule, "fp32"), steps=8)
    assert run.losses == losses
    for key, value in run.state.items():
        assert torch.equal(value, state[key]), key


@functools.cache
def expected(rule, precision="bf16", states="fp32", clipping=0.0) -> Run:
    config = config_of(rule, precision, speculation="never", states=states, gradient_clipping=clipping)
    return train(WIDE, config, steps=STEPS)


@functools.cache
def least(rule, states="fp32"):
    return least_device_memory(WIDE, config_of(rule, states=states))


@pytest.mark.parametrize("rule", PARAMS)
@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
def test_budgets_and_sides(rule, states):
    roomy = expected(rule, states=states)
    for config in (
        config_of(rule, states=states, device_memory=least(rule, states)),
        config_of(rule, states=states, on_device=False, default_chunk_size=4096),
        config_of(rule, states=states, on_device=False, speculation="always", device_memory=2 * least(rule, states)),
    ):
        assert_same(train(WIDE, config, steps=STEPS), roomy)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.slow)])
def test_other_precisions(rule, precision):
    roomy = expected(rule, precision)
    config = config_of(rule, precision, on_device=False, speculation="always", default_chunk_size=4096)
    run = train(WIDE, config, steps=STEPS)
    assert taken_over(run.report) > 0
    assert_same(run, roomy)


@pytest.mark.parametrize("rule", PARAMS)
@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_clipping_that_always_acts(rule, states):
    roomy = expected(rule, states=states, clipping=1e-3)
    config = config_of(rule, states=states, on_device=False, speculation="always", gradient_clipping=1e-3)
    run = train(WIDE, config, steps=STEPS)
    assert run.report["num_settled_updates"] > 0
    assert two_passes(run.report) > 0
    assert_same(run, roomy)


@pytest.mark.parametrize("rule", RULES)
def test_accumulation(rule):
    runs = [
        train(WIDE, config_of(rule, gradient_clipping=0.1, **more), steps=4, accumulate=2)
        for more in ({}, {"on_device": False, "speculation": "always", "device_memory": 2 * least(rule)})
    ]
    assert_same(*runs)


def bytes_per_parameter(config):
    engine, _ = initialize_engine(WIDE.build, 0, config)
    with engine:
        chunks = [engine._session.layout.chunk(i) for i in range(engine._session.layout.num_chunks)]
    assert all(chunk["states"].variance == _C.StateType.NONE for chunk in chunks)
    return sum(chunk["home_bytes"] for chunk in chunks) / sum(chunk["numel"] for chunk in chunks)


@pytest.mark.parametrize(
    ("states", "waiting", "committed"), [("fp32", 10, 8), ("bf16", 8, 6), ("8bit", 2 + 4 + 1.016, 2 + 2 + 1.016)]
)
def test_bytes_per_parameter(states, waiting, committed):
    for speculation, expects in (("auto", waiting), ("commit", committed)):
        found = bytes_per_parameter(config_of("Lion", states=states, speculation=speculation))
        assert expects - 1e-2 <= found < expects + (0.4 if states == "8bit" else 1e-6)  # the embedding counts


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_committed_in_backward(rule, states):
    """Masters are split; values halfway between two parameters are rounded away from zero, once in 2^17."""
    config = functools.partial(config_of, rule, states=states, speculation="commit")
    roomy = train(WIDE, config(), steps=STEPS)
    need = least_device_memory(WIDE, config(on_device=False), steps=2)
    for on_device, budget in ((False, None), (False, need), (True, 2 * need)):
        run = train(WIDE, config(on_device=on_device, device_memory=budget), steps=STEPS)
        assert promised(run.report) == STEPS * run.report["num_chunks"]
        assert_same(run, roomy)
    gaps = [abs(a - b) / b for a, b in zip(roomy.losses, expected(rule, states=states).losses, strict=True)]
    assert max(gaps) < 5e-3


@pytest.mark.parametrize("rule", PARAMS)
@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(rule, states, tmp_path):
    case = MODELS["gpt2"]

    def part(steps, *, load, save=False, **more):
        return go_on(case, config_of(rule, states=states, **more), steps, tmp_path, load=load, save=save)

    torch.manual_seed(0)
    saved = part(3, load=False, save=True)
    name = "exp_avg" if rule == "Lion" else "momentum_buffer"
    assert all(set(entry) == {"step", name} for entry in saved["optimizer"]["state"].values())
    assert_same_bits(part(0, load=True), saved)
    assert_same_bits(
        part(2, load=True), part(2, load=True, on_device=False, default_chunk_size=4096, speculation="always")
    )


def test_checkpoints_of_other_optimizers_are_refused(tmp_path):
    case = MODELS["gpt2"]
    go_on(case, config_of("SGD"), 1, tmp_path, load=False, save=True)
    for config, message in (
        (config_of("Lion"), "momentum_buffer of parameters, which Lion does not have"),
        (make_config("bf16"), "momentum_buffer of parameters, which neither Adam nor AdamW has"),
    ):
        with pytest.raises(CheckpointError, match=message):
            go_on(case, config, 1, tmp_path, load=True)
    go_on(case, make_config("bf16"), 1, tmp_path / "adam", load=False, save=True)
    with pytest.raises(CheckpointError, match="exp_avg_sq of parameters, which Lion does not have"):
        go_on(case, config_of("Lion"), 1, tmp_path / "adam", load=True)


@pytest.mark.parametrize("rule", RULES)
def test_frozen_parameters_that_are_unfrozen(rule):
    def run(**more):
        torch.manual_seed(0)
        engine, optimizer = initialize_engine(frozen, 0, config_of(rule, **more))
        with engine:
            generator = torch.Generator().manual_seed(0)
            for step in range(5):
                if step == 2:
                    engine.module.requires_grad_(True)
                engine.backward(engine(**token_batch(generator))["loss"])
                optimizer.step()
                optimizer.zero_grad()
            return engine.state_dict(), optimizer.state_dict()["state"]

    assert_same_bits(run(), run(on_device=False, default_chunk_size=4096))


def frozen():
    model = gpt2()
    model.transformer.wte.requires_grad_(False)
    model.transformer.h[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("rule", RULES)
def test_groups_schedules_and_parameters_that_stay_with_pytorch(rule):
    def groups(module):
        embedding = [module.transformer.wte.weight]
        others = [param for param in module.parameters() if param is not embedding[0]]
        return [{"params": embedding, "weight_decay": 0.0}, {"params": others, "lr": PARAMS[rule]["lr"] / 2}]

    torch.manual_seed(0)
    plain = gpt2()
    kind = Lion if rule == "Lion" else torch.optim.SGD
    theirs = kind(groups(plain), **PARAMS[rule])
    torch.manual_seed(0)
    config = {**config_of(rule, "fp32"), "use_cpu_embedding": True}
    engine, ours = initialize_engine(gpt2, 0, config, model_parameters=groups)
    with engine:
        schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda n: 1 / (n + 1)) for each in (theirs, ours)]
        generators = [torch.Generator().manual_seed(1) for _ in range(2)]
        for _ in range(4):
            plain(**token_batch(generators[0]))["loss"].backward()
            theirs.step()
            theirs.zero_grad()
            engine.backward(engine(**token_batch(generators[1]))["loss"])
            ours.step()
            ours.zero_grad()
            for schedule in schedules:
                schedule.step()
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=2e-6)
        state = ours.state_dict()
        theirs.load_state_dict(state)
        ours.load_state_dict(theirs.state_dict())
        assert_same_bits(ours.state_dict()["state"], state["state"])


@pytest.mark.parametrize(
    ("rule", "group", "message"),
    [
        ("Lion", {"eps": 1e-8}, "unknown option 'eps'; options are lr, betas, weight_decay"),
        ("SGD", {"betas": (0.9, 0.99)}, "unknown option 'betas'; options are lr, momentum, dampening, weight_decay"),
        ("SGD", {"dampening": 2.0}, r"model_parameters\[0\].dampening is 2.0; it must be .* at most 1"),
        ("SGD", {"nesterov": True}, "nesterov=True with momentum 0.9 and dampening 0.1; give a momentum above 0"),
        ("SGD", {"nesterov": "yes"}, "nesterov is 'yes'; it is a switch"),
    ],
)
def test_options_that_cannot_be(rule, group, message):
    with pytest.raises(ValueError, match=message):
        initialize_engine(gpt2, 0, config_of(rule), model_parameters=[{"params": "*", **group}])


def test_states_of_others_are_refused():
    engine, optimizer = initialize_engine(gpt2, 0, config_of("SGD"))
    with engine:
        own = optimizer.state_dict()
        own["param_groups"][0]["betas"] = (0.9, 0.99)
        with pytest.raises(ValueError, match=r"has betas, which SGD does not have; give the state of torch.optim.SGD"):
            optimizer.load_state_dict(own)
