"""SwiGLU, second product and weighted sum of experts, whose backward needs no result of that product.

    out = gated_sum(gate_up, down, weights, routing, transposed=False)

A routing weight's gradient is the scalar product of the second product's row and the token's gradient. The scalar
product of SwiGLU and its gradient before weighting is the same number. So neither SwiGLU nor the second product's
results are kept: the backward computes SwiGLU again. Liger-Kernel and SonicMoE (arXiv 2512.14080) do likewise.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from patrickstar import _C
from patrickstar.differentiation import differentiable_once
from patrickstar.fp8.casting import device_of, stream_of
from patrickstar.module.expert_rows import NO_SECOND_DERIVATIVE, Routing, operator, sum_rows, swiglu, widened
from patrickstar.module.preprocess import DTYPES


def gated_sum(gate_up: Tensor, down: Tensor, weights: Tensor, routing: Routing, *, transposed: bool) -> Tensor:
    """Each token's weighted sum of ``swiglu(gate_up)`` times the weight of the row's expert.

    Args:
        gate_up: ``[rows, 2 * width]``, gate first.
        down: ``[experts, hidden size, width]``.
        weights: ``[tokens, chosen experts]``, of the dtype of ``gate_up`` or float32.
        transposed: ``down`` is ``[experts, width, hidden size]``.
    """
    return _GatedSum.apply(
        gate_up, down, weights, routing.order, routing.positions, routing.offsets, transposed
    )  # fmt: skip


class _GatedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, down, weights, order, positions, offsets, transposed):
        from transformers.integrations import moe

        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up, down, weights, order, positions, offsets)
        ctx.transposed = transposed
        rows = moe._grouped_linear(swiglu(gate_up), down, offs=offsets, is_transposed=transposed)
        return sum_rows(rows, positions, weights)

    @staticmethod
    @differentiable_once(*NO_SECOND_DERIVATIVE)
    def backward(ctx, grad):
        from transformers.integrations import moe

        gate_up, down, weights, order, positions, offsets = ctx.saved_tensors
        grad_rows = grad.index_select(0, order // positions.size(1))
        of_gated = moe._grouped_linear(grad_rows, down, offs=offsets, is_transposed=not ctx.transposed)
        grad_gate_up, gated, by_row = weighted_swiglu_backward(gate_up, of_gated, weights.flatten()[order].float())
        grad_down = None
        if ctx.needs_input_grad[1]:
            grad_down = _gradient_of_weight(gated, down, offsets, grad_rows, ctx.transposed)
        grad_weights = torch.where(positions >= 0, by_row[positions.clamp(min=0)], 0.0).to(weights.dtype)
        return grad_gate_up, grad_down, grad_weights, None, None, None, None


def _gradient_of_weight(rows: Tensor, weight: Tensor, offsets: Tensor, grad: Tensor, transposed: bool) -> Tensor:
    """Gradient of ``weight`` in ``moe._grouped_linear(rows, weight, offsets)``, as PyTorch computes it."""
    from transformers.integrations import moe

    if hasattr(functional, "grouped_mm") and moe._can_use_grouped_mm(rows, weight, offsets):
        left, right = (rows, grad) if transposed else (grad, rows)
        return functional.grouped_mm(left.t(), right, offs=offsets)
    turned = weight if transposed else weight.transpose(-2, -1)
    _, found = torch.ops.transformers.grouped_mm_fallback_backward(rows, turned, offsets, grad)
    return found if transposed else found.transpose(-2, -1)


@operator("(Tensor gate_up, Tensor grad, Tensor weights) -> (Tensor, Tensor, Tensor)")
def weighted_swiglu_backward(gate_up: Tensor, grad: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of SwiGLU's argument, ``weights * swiglu(gate_up)``, and gradients of ``weights`` (float32).

    Args:
        gate_up: ``[rows, 2 * width]``.
        grad: of SwiGLU before weighting.
        weights: by row, float32.
    """
    (gate, up), grad, by_row = widened(gate_up).chunk(2, dim=-1), widened(grad), weights.unsqueeze(-1)
    gated = functional.silu(gate)
    out, weighted = gated * up, grad * by_row
    of_gate = torch.ops.aten.silu_backward(weighted * up, gate)
    grad_gate_up = torch.cat([of_gate, weighted * gated], dim=-1).to(gate_up.dtype)
    return grad_gate_up, (out * by_row).to(gate_up.dtype), (out * grad).sum(dim=-1).float()


@weighted_swiglu_backward.register_fake
def _(gate_up, grad, weights):
    return torch.empty_like(gate_up), torch.empty_like(grad), torch.empty_like(weights)


@weighted_swiglu_backward.register_kernel("cuda")
def _(gate_up, grad, weights):
    grad = grad.contiguous()
    grad_gate_up, gated, grad_weights = (torch.empty_like(each) for each in (gate_up, grad, weights))
    with device_of(gate_up):
        _C.experts.cuda_weighted_gate_backward(
            gate_up.data_ptr(), grad.data_ptr(), weights.data_ptr(), grad_gate_up.data_ptr(), gated.data_ptr(),
            grad_weights.data_ptr(), DTYPES[gate_up.dtype], grad.size(0), grad.size(1), stream_of(gate_up),
        )  # fmt: skip
    return grad_gate_up, gated, grad_weights
