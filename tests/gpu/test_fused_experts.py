import copy
import types

import pytest
import torch

from patrickstar.module import clamped_gate as gates
from patrickstar.module import expert_rows, gated_sum
from patrickstar.module.expert_rows import Routing
from patrickstar.module.fused_experts import fuse_experts
from tests.experts import errors, gpt_oss_experts, qwen_experts

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

HIDDEN, INTERMEDIATE, EXPERTS = 256, 192, 16
ALPHA, LIMIT = 1.702, 1.5


def make_block():
    import transformers
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = transformers.Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, num_experts=EXPERTS, num_experts_per_tok=8
    )
    config._experts_implementation = "grouped_mm"
    block = Qwen3MoeSparseMoeBlock(config)
    for param in block.parameters():
        torch.nn.init.normal_(param, std=0.05)
    return block


def output_and_gradients(block, x, direction):
    x = x.clone().requires_grad_()
    out = block(x)
    out = out[0] if isinstance(out, tuple) else out
    return out, torch.autograd.grad(out, [x, *block.parameters()], direction)


def test_forwards_have_the_bits_of_grouped_mm_and_gradients_are_no_worse():
    torch.manual_seed(0)
    block = make_block().to("cuda", torch.bfloat16)
    x = torch.randn(2, 500, HIDDEN, device="cuda").bfloat16()
    direction = torch.randn(2, 500, HIDDEN, device="cuda").bfloat16()
    exact = copy.deepcopy(block).double()
    exact.experts.config = copy.deepcopy(exact.experts.config)
    exact.experts.config._experts_implementation = "eager"
    fused_block = copy.deepcopy(block)
    assert fuse_experts(fused_block).names == ["experts"]
    out, gradients = output_and_gradients(block, x, direction)
    fused_out, fused_gradients = output_and_gradients(fused_block, x, direction)
    assert fused_out.equal(out)
    _, wanted = output_and_gradients(exact, x.double(), direction.double())
    for gradient, fused, right in zip(gradients, fused_gradients, wanted, strict=True):
        error, fused_error = ((each.double() - right).norm() / right.norm() for each in (gradient, fused))
        print(f"{tuple(right.shape)}: error {error:.3g} with grouped_mm, {fused_error:.3g} fused")
        assert fused_error <= 1.05 * error + 1e-6


@pytest.mark.parametrize("make", [qwen_experts, gpt_oss_experts])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_experts_are_at_least_as_accurate_as_transformers(make, dtype):
    torch.manual_seed(0)
    for name, eager, grouped, fused in errors(make(), "cuda", dtype, 1000):
        print(f"{name}: error {eager:.3g} eager, {grouped:.3g} with grouped_mm, {fused:.3g} fused")
        assert fused <= 1.05 * min(eager, grouped) + 1e-6


def gpt_oss_gate(gate_up, bias, experts):
    """By transformers, in float64."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    scalars = types.SimpleNamespace(alpha=ALPHA, limit=LIMIT)
    rows = gate_up.double() + bias.double()[experts.clamp(max=len(bias) - 1)]
    return GptOssExperts._apply_gate(scalars, rows)


def normal_values(dtype, shift):
    """A function of rows and columns that gives normal values, ``shift`` elements behind an aligned address."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(rows, columns):
        flat = torch.randn(rows * columns + shift, device="cuda", generator=generator)
        return flat.half().to(dtype)[shift:].view(rows, columns)  # sums are exact

    return normal


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
ROWS = pytest.mark.parametrize(("width", "shift"), [(2880, 0), (64, 0), (64, 1), (20, 0), (7, 0), (1, 0)])
"""Odd widths, and rows that begin between multiples of 16 bytes."""


@DTYPES
@ROWS
def test_gpt_oss_gate(dtype, width, shift):
    """Two experts have no rows, and some rows have no expert here."""
    normal = normal_values(dtype, shift)
    experts = torch.tensor([0] * 100 + [2] * 150 + [3] * 37 + [9] * 13, device="cuda")
    offsets = torch.tensor([100, 100, 250, 287, 287], dtype=torch.int32, device="cuda")
    gate_up, bias = normal(300, 2 * width).requires_grad_(), normal(5, 2 * width).requires_grad_()
    found = gates.clamped_gate(gate_up, bias, experts, offsets, ALPHA, LIMIT)
    grad = normal(300, width)
    wanted = gpt_oss_gate(gate_up, bias, experts)
    (wanted_of_rows,) = torch.autograd.grad(wanted, gate_up, grad.double(), retain_graph=True)
    of_rows, of_bias = torch.autograd.grad(found, (gate_up, bias), grad, retain_graph=True)
    grad_here = grad.double()
    grad_here[287:] = 0.0
    (wanted_of_bias,) = torch.autograd.grad(wanted, bias, grad_here)
    close = {"rtol": max(torch.finfo(dtype).eps, 1e-5), "atol": 1e-5}
    torch.testing.assert_close(found.double(), wanted, **close)
    torch.testing.assert_close(of_rows, wanted_of_rows, **close)
    assert (of_bias.double() - wanted_of_bias.double()).norm() <= close["rtol"] * wanted_of_bias.double().norm()
    assert not of_bias[[1, 4]].any()
    again = torch.autograd.grad(found, (gate_up, bias), grad)
    assert again[0].equal(of_rows) and again[1].equal(of_bias)


@DTYPES
@ROWS
def test_swiglu_gradients_from_those_before_weighting(dtype, width, shift):
    normal = normal_values(dtype, shift)
    given = normal(300, 2 * width), normal(300, width), torch.rand(300, device="cuda")
    found = gated_sum.weighted_swiglu_backward(*given)
    wanted = gated_sum.weighted_swiglu_backward(*(each.cpu().double() for each in given))
    rounding = max(torch.finfo(dtype).eps, 1e-5)
    for each, right, close in zip(found, wanted, (rounding, rounding, 1e-4), strict=True):
        torch.testing.assert_close(
            each.double(), right.double(), check_device=False, rtol=close, atol=1e-5 + close / 10
        )
    assert all(map(torch.equal, found, gated_sum.weighted_swiglu_backward(*given)))


def test_gpt_oss_gate_of_nothing_finite():
    values = torch.tensor([0.0, LIMIT, -LIMIT, 100.0, -100.0, torch.inf, -torch.inf, torch.nan], device="cuda")
    gate_up = torch.cartesian_prod(values, values).requires_grad_()
    bias, experts = torch.zeros(1, 2, device="cuda"), torch.zeros(64, dtype=torch.long, device="cuda")
    offsets = torch.tensor([64], dtype=torch.int32, device="cuda")
    direction = torch.ones(64, 1, device="cuda")
    found = gates.clamped_gate(gate_up, bias, experts, offsets, ALPHA, LIMIT)
    wanted = gpt_oss_gate(gate_up, bias, experts)
    torch.testing.assert_close(found.double(), wanted, equal_nan=True)
    (of_rows,), (wanted_of_rows,) = (
        torch.autograd.grad(value, gate_up, direction.to(value.dtype)) for value in (found, wanted)
    )
    torch.testing.assert_close(of_rows, wanted_of_rows, equal_nan=True)


def test_gpt_oss_gate_beyond_two_billion_elements():
    width, num_rows = 4096, 2**18 + 1
    gate_up = torch.zeros(num_rows, 2 * width, dtype=torch.bfloat16, device="cuda")
    bias = torch.randn(2, 2 * width, device="cuda").bfloat16()
    experts = torch.zeros(num_rows, dtype=torch.long, device="cuda")
    experts[-1] = 1
    gate_up[-1].normal_()
    found = gates.clamped_swiglu(gate_up, bias, experts, ALPHA, LIMIT)
    close = {"rtol": 2**-7, "atol": 1e-5}
    torch.testing.assert_close(found[-2:].double(), gpt_oss_gate(gate_up[-2:], bias, experts[-2:]), **close)
    found[-1].normal_()
    of_rows = gates.clamped_swiglu_backward(gate_up, bias, experts, found, ALPHA, LIMIT)
    last = gate_up[-2:].clone().requires_grad_()
    gpt_oss_gate(last, bias, experts[-2:]).backward(found[-2:].double())
    torch.testing.assert_close(of_rows[-2:], last.grad, **close)


@DTYPES
@pytest.mark.parametrize("width", [64, 7])
def test_kernels_equal_pytorch(dtype, width):
    generator = torch.Generator("cuda").manual_seed(0)
    chosen = torch.randint(0, 6, (100, 3), device="cuda", generator=generator)
    routing = Routing.of(chosen, 5)
    rows = torch.randn(300, width, device="cuda", generator=generator).to(dtype)
    weights = torch.rand(100, 3, device="cuda", generator=generator)
    grad = torch.randn(100, width, device="cuda", generator=generator).to(dtype)
    gate_up = torch.randn(300, 2 * width, device="cuda", generator=generator).to(dtype)
    biases = torch.randn(5, width, device="cuda", generator=generator).to(dtype), routing.experts
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for arguments, operator in [
        ((rows, routing.positions, weights), expert_rows.sum_rows),
        ((rows, routing.positions, weights.to(dtype)), expert_rows.sum_rows),
        ((rows, routing.positions, None), expert_rows.sum_rows),
        ((grad, rows, routing.order // 3, weights.flatten()), expert_rows.scale_rows),
        ((rows, routing.positions, weights, *biases), expert_rows.sum_rows),
        ((rows, routing.positions, weights.to(dtype), *biases), expert_rows.sum_rows),
        ((grad, rows, routing.order // 3, weights.flatten(), *biases), expert_rows.scale_rows),
        ((rows, routing.offsets), expert_rows.sum_groups),
        ((gate_up,), expert_rows.swiglu),
        ((gate_up, rows), expert_rows.swiglu_backward),
    ]:
        found = operator(*arguments)
        wanted = operator(*(each.cpu() if isinstance(each, torch.Tensor) else each for each in arguments))
        torch.testing.assert_close(found, wanted, check_device=False, **close)


def test_compiled_experts():
    torch.manual_seed(0)
    block = make_block().to("cuda", torch.bfloat16)
    fuse_experts(block)
    x = torch.randn(2, 500, HIDDEN, device="cuda").bfloat16()
    direction = torch.ones_like(x)
    out, gradients = output_and_gradients(block, x, direction)
    found, compiled_gradients = output_and_gradients(torch.compile(block), x, direction)
    torch.testing.assert_close(found, out)
    for compiled, gradient in zip(compiled_gradients, gradients, strict=True):
        torch.testing.assert_close(compiled, gradient, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_over_experts_rows_have_the_same_bits_each_time(dtype):
    rows = torch.randn(5000, 192, device="cuda").to(dtype)
    offsets = torch.tensor([1500, 1500, 4000], dtype=torch.int32, device="cuda")
    rows[4000:] = float("nan")  # rows of no expert here
    found = expert_rows.sum_groups(rows, offsets)
    expected = torch.stack([rows[:1500].double().sum(0), rows[:0].double().sum(0), rows[1500:4000].double().sum(0)])
    # float32 sums of 2,500 rows, then the dtype's rounding
    assert (found.double() - expected).norm() / expected.norm() < max(torch.finfo(dtype).eps, 1e-5)
    assert all(expert_rows.sum_groups(rows, offsets).equal(found) for _ in range(5))
