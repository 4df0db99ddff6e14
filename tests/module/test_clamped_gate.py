import types

import pytest
import torch

from patrickstar.module import clamped_gate as gates
from patrickstar.module.fused_experts import fuse_experts, is_clamped
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.gpt_oss_experts import errors, make_experts
from tests.ranks.mixed_models import batch, build
from tests.training import make_config

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_at_least_as_accurate_as_transformers(dtype):
    torch.manual_seed(0)
    for name, eager, grouped, fused in errors("cpu", dtype, 200):
        print(f"{name}: error {eager:.3g} eager, {grouped:.3g} with grouped_mm, {fused:.3g} fused")
        assert fused <= 1.05 * min(eager, grouped) + 1e-6


def test_compiled_experts_have_the_bits_of_eager_ones():
    torch.manual_seed(0)
    experts = make_experts()
    fuse_experts(experts)
    assert is_clamped(experts)
    hidden, index, weights = torch.randn(20, 64, requires_grad=True), torch.randint(0, 8, (20, 3)), torch.rand(20, 3)
    results = []
    for call in (experts, torch.compile(experts, backend="aot_eager")):
        out = call(hidden, index, weights)
        results.append([out, *torch.autograd.grad(out, [hidden, *experts.parameters()], torch.ones_like(out))])
    assert_same_bits(*results)


def test_budgets_and_recomputation_change_no_bit():
    results = []
    for settings in ({"device_memory": "64MiB"}, {"device_memory": "300KiB", "default_chunk_size": 1024}):
        for recomputes in (False, True):
            torch.manual_seed(0)
            model = build("GptOss", "grouped_mm")()
            if recomputes:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            engine, optimizer = initialize_engine(lambda model=model: model, 0, make_config("bf16", **settings))
            with engine:
                losses = []
                for index in range(2):
                    optimizer.zero_grad()
                    loss = engine(**batch("GptOss", index, True, False), use_cache=False).loss
                    engine.backward(loss)
                    optimizer.step()
                    losses.append(loss.item())
                results.append([losses, engine.state_dict()])
                evictions = engine.report()["num_evictions"]
    assert evictions > 0
    for losses, state in results[1:]:
        assert losses == results[0][0]
        assert_same_bits(state, results[0][1])
