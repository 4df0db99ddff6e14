import pytest
import torch

from patrickstar import CheckpointError
from patrickstar.optimizer.lion import Lion
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.models import MODELS, gpt2, token_batch
from tests.schemes import PARAMS, config_of
from tests.training import go_on, make_config, train

RULES = ["Lion", "SGD"]


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
@pytest.mark.parametrize("rule", [*RULES, "Nesterov"])
@pytest.mark.parametrize("name", ["gpt2", "mixture_of_experts"])
def test_the_bits_of_torch(rule, name):
    case = MODELS[name]
    losses, state = plainly(case, rule, 8)
    run = train(case, config_of(rule, precision="fp32"), steps=8)
    assert run.losses == losses
    for key, value in run.state.items():
        assert torch.equal(value, state[key]), key


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
    config = {**config_of(rule, precision="fp32"), "use_cpu_embedding": True}
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
