import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import patrickstar as deepspeed
from patrickstar import torch_scope
from patrickstar.runtime import initialize_engine
from tests.deepspeed.test_initialize import config, data, net

BATCHES = list(DataLoader(data(), batch_size=4))[:6]
ADAM = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}


def chosen(module):
    return [module.layers[2].weight, module.layers[4].bias]


def plain_run(module, clipping):
    optimizer = torch.optim.AdamW(chosen(module), **ADAM)
    norms = []
    for batch in BATCHES:
        module(*batch).backward()
        norms.append(float(nn.utils.clip_grad_norm_(chosen(module), clipping or math.inf)))
        optimizer.step()
        module.zero_grad()
    return norms, module.state_dict()


def run(engine, step):
    norms = []
    for batch in BATCHES:
        engine.backward(engine(*batch))
        step()
        norms.append(engine.report()["grad_norm"])
    return norms, engine.state_dict()


@pytest.mark.parametrize("how", ["model_parameters", "optimizer", "initialize_engine"])
def test_they_stay_and_are_not_in_the_norm(how, caplog):
    model, clipping = net(), 0.5
    options = config(gradient_accumulation_steps=1, gradient_clipping=clipping)
    if how == "initialize_engine":
        names = ("optimizer", "gradient_clipping", "device_memory", "default_chunk_size")
        engine, optimizer = initialize_engine(lambda: model, 0, {name: options[name] for name in names}, chosen)
    else:
        given = {"model_parameters": chosen(model)} if how == "model_parameters" else {}
        given |= {"optimizer": torch.optim.AdamW(chosen(model), **ADAM)} if how == "optimizer" else {}
        engine, optimizer, *_ = deepspeed.initialize(model=model, config=options, **given)
    assert "4 parameters require grad but are in no group (layers.0.weight, layers.0.bias, layers.2.bias, ...)" in (
        caplog.text
    )
    with engine:
        norms, state = run(engine, optimizer.step if how == "initialize_engine" else engine.step)
        assert model.layers[0].weight.requires_grad
        assert model.layers[0].weight.grad is None
        assert engine.report()["num_parameters"] == sum(param.numel() for param in model.parameters())
    before = net().state_dict()
    expected_norms, expected = plain_run(net(), clipping)
    assert norms == pytest.approx(expected_norms, rel=1e-6)
    for name, value in state.items():
        if name in ("layers.2.weight", "layers.4.bias"):
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(value, before[name]), name


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        with torch_scope():
            self.scale = nn.Parameter(torch.full((16,), 2.0))
            self.shift = nn.Parameter(torch.full((16,), 0.5))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.first(x) * self.scale + self.shift, y)


def test_one_that_stays_with_pytorch():
    def make():
        torch.manual_seed(0)
        return Kept()

    model, plain = make(), make()
    parameters = [*model.first.parameters(), model.scale]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, config=config(gradient_accumulation_steps=1)
    )
    with engine:
        norms, state = run(engine, engine.step)
    optimizer = torch.optim.AdamW([*plain.first.parameters(), plain.scale], **ADAM)
    expected = []
    for batch in BATCHES:
        plain(*batch).backward()
        expected.append(float(nn.utils.clip_grad_norm_([*plain.first.parameters(), plain.scale], 0.5)))
        optimizer.step()
        plain.zero_grad()
    assert norms == pytest.approx(expected, rel=1e-6)
    assert torch.equal(state["shift"], torch.full((16,), 0.5))
    torch.testing.assert_close(state["scale"], plain.scale.detach(), rtol=1e-5, atol=1e-7)


def test_a_checkpoint_of_such_a_run(tmp_path):
    states = []
    for resumed in (False, True):
        model = net()
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=chosen(model), config=config(gradient_accumulation_steps=1)
        )
        with engine:
            if resumed:
                engine.load_checkpoint(tmp_path)
            for index, batch in enumerate(BATCHES[3 if resumed else 0 :]):
                engine.backward(engine(*batch))
                engine.step()
                if not resumed and index == 2:
                    engine.save_checkpoint(tmp_path)
            states.append(engine.state_dict())
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())
    engine, *_ = deepspeed.initialize(model=net(), config=config())
    with engine, pytest.raises(deepspeed.CheckpointError, match="build the engine with the same model_parameters"):
        engine.load_checkpoint(tmp_path)
