"""Products of experts whose operands have more than 2**31 elements."""

import pytest
import torch
from torch import nn

from patrickstar.runtime import initialize_engine
from tests.training import make_config

pytestmark = [pytest.mark.gpu, pytest.mark.slow]  # takes 60 GiB: alone on its GPU

TOKENS, SLICES = 180_000, 8
HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN = 2048, 768, 32, 8
"""Qwen3-30B-A3B's, with fewer experts: the first product gives 2.2e9 elements."""


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import transformers
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        config = transformers.Qwen3MoeConfig(
            hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, num_experts=EXPERTS, num_experts_per_tok=CHOSEN
        )
        config._experts_implementation = "grouped_mm"
        self.block = Qwen3MoeSparseMoeBlock(config)
        for param in self.parameters():
            nn.init.normal_(param, std=0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of squares, so that slices of a batch add up."""
        return self.block(x).float().square().sum() / (TOKENS * HIDDEN)


def inputs() -> torch.Tensor:
    return torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator("cuda").manual_seed(1), device="cuda").bfloat16()


def test_a_mixture_of_many_tokens_equals_its_slices():
    assert TOKENS * CHOSEN * 2 * INTERMEDIATE > 2**31
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(Mixture, 0, make_config("bf16", device_memory="100GiB"))
    with engine:
        values = {name: value.to("cuda", torch.bfloat16) for name, value in engine.state_dict().items()}
        optimizer.zero_grad()
        loss = engine(inputs())
        engine.backward(loss)
        loss = loss.item()
        optimizer.step()
        norm = engine.report()["grad_norm"]
    torch.cuda.empty_cache()
    plain = Mixture().to("cuda", torch.bfloat16)
    plain.load_state_dict(values)
    total, gradients = 0.0, [torch.zeros_like(param, dtype=torch.float32) for param in plain.parameters()]
    for part in inputs().chunk(SLICES, dim=1):
        part_loss = plain(part)
        for gradient, added in zip(gradients, torch.autograd.grad(part_loss, list(plain.parameters())), strict=True):
            gradient += added
        total += part_loss.item()
    wanted = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    print(f"loss {loss:.6f} and {total:.6f}, gradient {norm:.6f} and {wanted:.6f}")
    assert loss == pytest.approx(total, rel=1e-4)
    assert norm == pytest.approx(wanted, rel=1e-2)
