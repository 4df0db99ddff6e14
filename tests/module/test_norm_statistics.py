import copy

import pytest
import torch
from torch import nn

from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits


def build(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "precision", "expected"),
    [
        (torch.bfloat16, "bf16", torch.bfloat16),
        (torch.float32, "bf16", torch.float32),
        (torch.bfloat16, "fp32", torch.float32),
        (torch.float16, "bf16", torch.float32),
    ],
)
def test_statistics_and_weights_have_one_dtype(dtype, precision, expected):
    module = build(dtype)
    config = {"bf16": {"enabled": precision == "bf16"}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine, optimizer = initialize_engine(lambda: module, 0, config)
    with engine:
        engine.train()
        norm = module[1]
        assert {norm.running_mean.dtype, norm.running_var.dtype, norm.weight.dtype, norm.bias.dtype} == {expected}
        before = norm.running_mean.clone()
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = engine(torch.ones(6, 8) * torch.arange(6).unsqueeze(1)).float().square().mean()
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        assert not norm.running_mean.equal(before)
    assert {value.dtype for value in module.state_dict().values() if value.is_floating_point()} == {dtype}


def test_a_bfloat16_model_gives_plain_pytorchs_output():
    module = build(torch.bfloat16)
    plain, x = copy.deepcopy(module), torch.randn(6, 8, dtype=torch.bfloat16)
    engine, _ = initialize_engine(lambda: module, 0, {"bf16": {"enabled": True}})
    with engine:
        engine.train()
        assert_same_bits(engine(x).detach(), plain.train()(x).detach())
        assert_same_bits(module[1].running_var.clone(), plain[1].running_var)
