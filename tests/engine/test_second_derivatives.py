"""Gradient penalties: the gradients of gradients are those of plain PyTorch, where all parameters fit."""

import pytest
import torch
from torch import nn

from patrickstar.runtime import initialize_engine
from tests.training import ADAM, make_config


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.GELU())))


def penalised(model, step, params):
    """A loss with the gradient's norm by the input, and that of the parameters."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).requires_grad_()
    loss = model(x).square().mean()
    gradients = torch.autograd.grad(loss, [x, *params], create_graph=True)
    return loss + (gradients[0].norm() - 1).square() + sum(gradient.square().sum() for gradient in gradients[1:])


def test_as_in_plain_pytorch():
    plain = make_model()
    torch_optimizer = torch.optim.AdamW(plain.parameters(), **ADAM)
    engine, optimizer = initialize_engine(make_model, 0, make_config("fp32", default_chunk_size=1024))
    with engine:
        for step in range(4):
            expected = penalised(plain, step, list(plain.parameters()))
            found = penalised(engine, step, list(engine.module.parameters()))
            torch.testing.assert_close(found, expected)
            expected.backward()
            engine.backward(found)
            torch_optimizer.step()
            optimizer.step()
            torch_optimizer.zero_grad()
        torch.testing.assert_close(engine.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


def test_parameters_beyond_the_device_are_refused():
    config = make_config("fp32", default_chunk_size=1024, device_memory="24KiB")
    engine, _ = initialize_engine(make_model, 0, config)
    with engine:
        before = engine.state_dict()
        with pytest.raises(RuntimeError, match=r"create_graph=True\) need all parameters on the device"):
            engine.backward(penalised(engine, 0, []))
        torch.testing.assert_close(engine.state_dict(), before, rtol=0, atol=0)
