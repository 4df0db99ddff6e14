import pytest
import torch
from torch.nn import functional

from patrickstar.module import gated_sum as sums
from patrickstar.module.expert_rows import Routing

TOKENS, HIDDEN, WIDTH, EXPERTS = 11, 16, 8, 4


def by_loops(gate_up, down, weights, routing):
    """Sums over tokens; ``down``: ``[experts, width, hidden size]``."""
    out = []
    for token, rows in enumerate(routing.positions.tolist()):
        parts = [torch.zeros(HIDDEN)]
        for k, row in enumerate(rows):
            if row >= 0:
                half, up = gate_up[row].chunk(2)
                parts.append(weights[token, k] * ((functional.silu(half) * up) @ down[routing.experts[row]]))
        out.append(sum(parts))
    return torch.stack(out)


@pytest.mark.parametrize("product", ["pytorch", "transformers"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("num_absent", [0, 2])
def test_the_sum_and_its_gradients(product, transposed, num_absent, monkeypatch):
    """The last of the experts here has no rows. Rows of other ranks' experts may hold anything."""
    from transformers.integrations import moe

    if product == "transformers":
        monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)
    generator = torch.Generator().manual_seed(0)
    among = torch.tensor([0, 1, 2, 4, 5][: EXPERTS - 1 + num_absent])
    chosen = torch.stack([among[torch.randperm(len(among), generator=generator)[:3]] for _ in range(TOKENS)])
    routing = Routing.of(chosen, EXPERTS)
    num_rows = routing.offsets[-1]
    gate_up = torch.randn(chosen.numel(), 2 * WIDTH, generator=generator)
    gate_up[num_rows:] = torch.nan
    gate_up.requires_grad_()
    down = torch.randn(EXPERTS, WIDTH, HIDDEN, generator=generator).requires_grad_()
    weights = torch.rand(TOKENS, 3, generator=generator)
    weights[0] = 0.0  # has a gradient too
    weights.requires_grad_()
    given = down if transposed else down.transpose(1, 2).contiguous()
    out = sums.gated_sum(gate_up, given, weights, routing, transposed=transposed)
    wanted = by_loops(gate_up, down, weights, routing)
    torch.testing.assert_close(out, wanted)
    direction = torch.randn(out.shape, generator=generator)
    of_rows, of_down, of_weights = torch.autograd.grad(out, (gate_up, down, weights), direction)
    wanted_of_rows, wanted_of_down, wanted_of_weights = torch.autograd.grad(wanted, (gate_up, down, weights), direction)
    torch.testing.assert_close(of_rows[:num_rows], wanted_of_rows[:num_rows])
    torch.testing.assert_close(of_down, wanted_of_down)
    torch.testing.assert_close(of_weights, wanted_of_weights)
    assert of_weights[0].any() == (routing.positions[0] >= 0).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_in_16_bits_are_rounded_once(dtype):
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(9, 14, generator=generator).to(dtype)
    grad, weights = torch.randn(9, 7, generator=generator).to(dtype), torch.rand(9, generator=generator)
    found = sums.weighted_swiglu_backward(gate_up, grad, weights)
    exact, factors = gate_up.double().requires_grad_(), weights.double().requires_grad_()
    half, up = exact.chunk(2, dim=-1)
    gated = factors.unsqueeze(-1) * functional.silu(half) * up
    of_rows, of_weights = torch.autograd.grad(gated, (exact, factors), grad.double())
    close = {"rtol": torch.finfo(dtype).eps / 1.9 + 1e-12, "atol": 1e-7}
    for one, other in zip(found[:2], (of_rows, gated.detach()), strict=True):
        torch.testing.assert_close(one.double(), other, **close)
    torch.testing.assert_close(found[2], of_weights.float())


def test_the_operator_describes_itself():
    torch.library.opcheck(sums.weighted_swiglu_backward, (torch.randn(6, 8), torch.randn(6, 4), torch.rand(6)))


def test_second_derivatives_are_refused():
    chosen = torch.zeros(2, 1, dtype=torch.long)
    gate_up = torch.randn(2, 16).requires_grad_()
    out = sums.gated_sum(gate_up, torch.rand(1, 16, 8), torch.rand(2, 1), Routing.of(chosen, 1), transposed=False)
    with pytest.raises(RuntimeError, match="create_graph=True, but fused experts have no second derivative; set"):
        torch.autograd.grad(out.sum(), gate_up, create_graph=True)
