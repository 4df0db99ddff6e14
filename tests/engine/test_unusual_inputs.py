"""Inputs without a shape of plain numbers."""

import pytest
import torch
from torch import nn

from patrickstar.runtime import initialize_engine
from tests.training import ADAM, make_config


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())


def nested(layout: torch.layout, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.nested.nested_tensor([torch.randn(n, 8, generator=generator) for n in (3, 4 + step)], layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors(layout, tmp_path):
    plain = make_model()
    torch_optimizer = torch.optim.AdamW(plain.parameters(), **ADAM)
    engine, optimizer = initialize_engine(make_model, 0, make_config("fp32", plan_cache=str(tmp_path)))
    with engine:
        for step in range(4):
            expected = plain(nested(layout, step)).values().square().mean()
            found = engine(nested(layout, step)).values().square().mean()
            torch.testing.assert_close(found, expected)
            expected.backward()
            engine.backward(found)
            torch_optimizer.step()
            optimizer.step()
            torch_optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_an_open_engines_module_is_traced(tmp_path):
    engine, _ = initialize_engine(make_model, 0, make_config("fp32", plan_cache=str(tmp_path)))
    with engine:
        x = torch.ones(2, 8)
        traced = torch.jit.trace(engine.module, x)
        torch.testing.assert_close(traced(2 * x), engine(2 * x))
