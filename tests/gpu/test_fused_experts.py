import copy

import pytest
import torch

from patrickstar.module import expert_rows
from patrickstar.module.expert_rows import Routing
from patrickstar.module.fused_experts import fuse_experts

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

HIDDEN, INTERMEDIATE, EXPERTS = 256, 192, 16


def make_block(family: str):
    import transformers

    if family == "GptOss":
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP as Block

        config = transformers.GptOssConfig(
            hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS, num_experts_per_tok=4
        )
    else:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Block

        config = transformers.Qwen3MoeConfig(
            hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, num_experts=EXPERTS, num_experts_per_tok=8
        )
    config._experts_implementation = "grouped_mm"
    block = Block(config)
    for param in block.parameters():
        torch.nn.init.normal_(param, std=0.05)
    return block


def output_and_gradients(block, x, direction):
    x = x.clone().requires_grad_()
    out = block(x)
    out = out[0] if isinstance(out, tuple) else out
    return out, torch.autograd.grad(out, [x, *block.parameters()], direction)


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_forwards_have_the_bits_of_grouped_mm_and_gradients_are_no_worse(family):
    torch.manual_seed(0)
    block = make_block(family).to("cuda", torch.bfloat16)
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
        print(f"{family} {tuple(right.shape)}: error {error:.3g} with grouped_mm, {fused_error:.3g} fused")
        assert fused_error <= 1.05 * error + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 7])
def test_kernels_equal_pytorch(dtype, width):
    generator = torch.Generator("cuda").manual_seed(0)
    chosen = torch.randint(0, 6, (100, 3), device="cuda", generator=generator)
    routing = Routing.of(chosen, 5)
    rows = torch.randn(300, width, device="cuda", generator=generator).to(dtype)
    weights = torch.rand(100, 3, device="cuda", generator=generator)
    grad = torch.randn(100, width, device="cuda", generator=generator).to(dtype)
    gate_up = torch.randn(300, 2 * width, device="cuda", generator=generator).to(dtype)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for arguments, operator in [
        ((rows, routing.positions, weights), expert_rows.sum_rows),
        ((rows, routing.positions, weights.to(dtype)), expert_rows.sum_rows),
        ((rows, routing.positions, None), expert_rows.sum_rows),
        ((grad, rows, routing.order // 3, weights.flatten()), expert_rows.scale_rows),
        ((rows, routing.offsets), expert_rows.sum_groups),
        ((gate_up,), expert_rows.swiglu),
        ((gate_up, rows), expert_rows.swiglu_backward),
    ]:
        found = operator(*arguments)
        wanted = operator(*(each.cpu() if isinstance(each, torch.Tensor) else each for each in arguments))
        torch.testing.assert_close(found, wanted, check_device=False, **close)


def test_compiled_experts():
    torch.manual_seed(0)
    block = make_block("Qwen3Moe").to("cuda", torch.bfloat16)
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
