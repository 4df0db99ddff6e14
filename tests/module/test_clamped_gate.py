import types

import pytest
import torch

from patrickstar.module import clamped_gate as gates

ALPHA, LIMIT = 1.702, 1.5


def rows_of_experts(width, dtype=torch.float64):
    """Nine rows of three experts, the second of which has none; the last two are of another rank's expert."""
    generator = torch.Generator().manual_seed(0)
    gate_up = (2 * torch.randn(9, 2 * width, generator=generator)).to(dtype)
    bias = torch.randn(3, 2 * width, generator=generator).to(dtype)
    experts = torch.tensor([0] * 4 + [2] * 3 + [5] * 2)
    return gate_up.requires_grad_(), bias.requires_grad_(), experts, torch.tensor([4, 4, 7], dtype=torch.int32)


def by_transformers(gate_up, bias, experts):
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    scalars = types.SimpleNamespace(alpha=ALPHA, limit=LIMIT)
    return GptOssExperts._apply_gate(scalars, gate_up + bias[experts.clamp(max=len(bias) - 1)])


@pytest.mark.parametrize("width", [1, 7, 16])
def test_the_gate_and_its_gradients_are_those_of_transformers(width):
    gate_up, bias, experts, offsets = rows_of_experts(width)
    found = gates.clamped_gate(gate_up, bias, experts, offsets, ALPHA, LIMIT)
    wanted = by_transformers(gate_up, bias, experts)
    torch.testing.assert_close(found, wanted)
    direction = torch.rand(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    of_rows, of_bias = torch.autograd.grad(found, (gate_up, bias), direction)
    direction_here = direction.clone()
    direction_here[7:] = 0.0
    (wanted_of_rows,) = torch.autograd.grad(wanted, gate_up, direction, retain_graph=True)
    (wanted_of_bias,) = torch.autograd.grad(wanted, bias, direction_here)
    torch.testing.assert_close(of_rows, wanted_of_rows)
    torch.testing.assert_close(of_bias, wanted_of_bias)
    clamped = (gate_up + bias[experts.clamp(max=2)]).abs() > LIMIT
    assert 0 < clamped.sum() < clamped.numel() and not of_bias[1].any()


def test_values_in_16_bits_are_rounded_once():
    gate_up, bias, experts, offsets = rows_of_experts(16, torch.bfloat16)
    found = gates.clamped_gate(gate_up, bias, experts, offsets, ALPHA, LIMIT)
    assert found.equal(by_transformers(gate_up.float(), bias.float(), experts).bfloat16())


def test_nothing_infinite_is_hidden_by_a_clamp():
    given = torch.tensor([[torch.nan, 1.0], [1.0, torch.nan], [torch.inf, -torch.inf]])
    zeros, rows = torch.zeros(1, 2), torch.zeros(3, dtype=torch.long)
    found = gates.clamped_swiglu(given, zeros, rows, ALPHA, LIMIT)
    assert found.isnan().flatten().tolist() == [True, True, False]
    torch.testing.assert_close(found, by_transformers(given, zeros, rows), equal_nan=True)


def test_operators_describe_themselves():
    gate_up, bias, experts, _ = (each.detach() for each in rows_of_experts(4, torch.float32))
    torch.library.opcheck(gates.clamped_swiglu, (gate_up, bias, experts, ALPHA, LIMIT))
    grad = torch.rand(9, 4)
    torch.library.opcheck(gates.clamped_swiglu_backward, (gate_up, bias, experts, grad, ALPHA, LIMIT))
