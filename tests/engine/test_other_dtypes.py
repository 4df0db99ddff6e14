"""Parameters of dtypes that chunks cannot have: they stay with PyTorch, in their dtype."""

import copy

import pytest
import torch
from torch import nn

from patrickstar.runtime import initialize_engine
from tests.training import ADAM, make_config


class WideLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.wide = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x):
        return self.wide(self.layer(x).double())


class WideParameter(nn.Module):
    """Its sum needs more bits than float32 has."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.wide = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))

    def forward(self, x):
        return self.layer(x).double() @ self.wide + 1e9 - 1e9


class WideModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()

    def forward(self, x):
        return self.layers(x.double())


class NarrowWeight(nn.Module):
    """Like layers of transformers' FP8 models: a weight of more than one byte counts as dequantised, without scales."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.codes = nn.Parameter(torch.randn(8, 8).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.25), requires_grad=False)

    def forward(self, x):
        codes = self.codes.to(x.dtype)
        return self.layer(x) @ (codes if self.codes.element_size() > 1 else codes * self.scale.to(x.dtype))


def batch(step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("make", [WideLayer, WideParameter, WideModel, NarrowWeight])
def test_training_is_that_of_plain_pytorch(make):
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    torch_optimizer = torch.optim.AdamW([param for param in plain.parameters() if param.requires_grad], **ADAM)
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    engine, optimizer = initialize_engine(model, 0, make_config("fp32"))
    with engine:
        assert {name: param.dtype for name, param in model.named_parameters()} == dtypes
        for step in range(4):
            expected, found = plain(batch(step)), engine(batch(step))
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            expected.square().mean().backward()
            engine.backward(found.square().mean())
            torch_optimizer.step()
            optimizer.step()
            torch_optimizer.zero_grad()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.float(), expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("make", "expected"), [(WideModel, torch.bfloat16), (NarrowWeight, torch.float8_e4m3fn)])
def test_in_16_bits_values_of_8_bits_stay_as_they_are(make, expected):
    engine, optimizer = initialize_engine(make, 0, make_config("bf16"))
    with engine:
        if make is WideModel:
            output = engine.module.layers(batch(0).bfloat16())
        else:
            output = engine(batch(0))
            plain = copy.deepcopy(engine.module)  # in float32
            torch.testing.assert_close(output.float(), plain(batch(0)), rtol=0.02, atol=0.02)
        assert output.dtype == torch.bfloat16
        assert expected in {param.dtype for param in engine.module.parameters()}
