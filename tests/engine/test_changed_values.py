"""Backwards through values that a step or a write has replaced are refused, as autograd does in plain PyTorch."""

import itertools

import pytest
import torch
from torch import nn

from patrickstar.runtime import initialize_engine
from tests.training import ADAM, make_config

REFUSAL = "modified by an inplace operation"


def make_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def batch(index: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(index))


def a_step_between(model, module, optimizer, backward):
    """The next loss is made before the step, as a pipeline of batches would do it."""
    last = model(batch(0)).square().mean()
    coming = model(batch(1)).square().mean()
    backward(last)
    optimizer.step()
    model(batch(2))
    backward(coming)


def a_graph_of_the_step_before(model, module, optimizer, backward):
    """Truncated backpropagation through time without ``detach``."""
    state = batch(0)
    for _ in range(2):
        state = model(state)
        backward(state.square().mean(), retain_graph=True)
        optimizer.step()


def a_write_between(model, module, optimizer, backward):
    loss = model(batch(0)).square().mean()
    with torch.no_grad():
        module[2].weight.mul_(2)
    backward(loss)


def a_load_between(model, module, optimizer, backward):
    loss = model(batch(0)).square().mean()
    module.load_state_dict(make_mlp().state_dict())
    backward(loss)


def a_write_through_data(model, module, optimizer, backward):
    """Autograd does not see it, and computes with the new values."""
    loss = model(batch(0)).square().mean()
    module[2].weight.data.mul_(2)
    module[2].bias.data = torch.ones(8)
    backward(loss)


WAYS = [a_step_between, a_graph_of_the_step_before, a_write_between, a_load_between, a_write_through_data]


def outcome(way, model, module, optimizer, backward):
    try:
        way(model, module, optimizer, backward)
    except RuntimeError as error:
        if REFUSAL not in str(error):
            raise
        return REFUSAL
    return [param.grad.clone() for param in module.parameters()]


@pytest.mark.parametrize(
    ("way", "speculation"),
    [*itertools.product(WAYS, ["never", "always"]), (a_step_between, "commit")],
)
def test_as_in_plain_pytorch(way, speculation):
    plain = make_mlp()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAM)
    expected = outcome(way, plain, plain, optimizer, lambda loss, **kwargs: loss.backward(**kwargs))
    config = make_config("fp32")
    config["optimizer"]["speculation"] = speculation
    engine, optimizer = initialize_engine(make_mlp, 0, config)
    with engine:
        found = outcome(way, engine, engine.module, optimizer, engine.backward)
    assert (expected == REFUSAL) == (way is not a_write_through_data)
    if expected == REFUSAL:
        assert found == REFUSAL
    else:
        torch.testing.assert_close(found, expected)


def test_nothing_has_changed_after_a_skipped_step_or_without_a_gradient():
    engine, optimizer = initialize_engine(make_mlp, 0, make_config("fp32"))
    with engine:
        loss = engine(batch(0)).square().mean()
        engine.backward(loss * float("nan"), retain_graph=True)
        optimizer.step()
        engine(batch(1))
        engine.backward(loss, retain_graph=True)
        first = [param.grad.clone() for param in engine.module.parameters()]
        optimizer.zero_grad()
        engine.backward(engine.module(batch(2)).sum() * 0 + engine.module[2].bias.sum(), inputs=[engine.module[2].bias])
        optimizer.step()
        engine(batch(1))
        engine.backward(loss)
        for param, gradient in zip(engine.module.parameters(), first, strict=True):
            assert torch.equal(param.grad, gradient)
