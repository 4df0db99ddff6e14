"""gpt-oss's gate between the grouped products of experts (``csrc/experts/cuda_gates.h``).

    rows = clamped_gate(rows, bias, experts, offsets, alpha=1.702, limit=7.0)

Columns of a row alternate between gate and up. Both get the bias of the row's expert, and are clamped:

    gate, up = min(gate, limit), clamp(up, -limit, limit)
    value = (up + 1) * gate * sigmoid(alpha * gate)

Arithmetic is float32; results and gradients round once, to the dtype of the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from patrickstar import _C
from patrickstar.differentiation import differentiable_once
from patrickstar.fp8.casting import device_of, stream_of
from patrickstar.module.expert_rows import NO_SECOND_DERIVATIVE, bias_addresses, operator, sum_groups, with_bias
from patrickstar.module.preprocess import DTYPES


def clamped_gate(gate_up: Tensor, bias: Tensor, experts: Tensor, offsets: Tensor, alpha: float, limit: float) -> Tensor:
    """The gate of ``[rows, 2 * width]``. The gradient of an expert's bias is the sum of its rows' in float32.

    Args:
        bias: ``[experts, 2 * width]``, of the dtype of ``gate_up``.
        experts: by row; rows beyond the last offset do not count in the gradient of ``bias``.
        offsets: int32, by expert: end of its rows.
    """
    return _ClampedGate.apply(gate_up, bias, experts, offsets, alpha, limit)


class _ClampedGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, bias, experts, offsets, alpha, limit):
        gate_up, bias = gate_up.contiguous(), bias.contiguous()
        ctx.save_for_backward(gate_up, bias, experts, offsets)
        ctx.scalars = alpha, limit
        return clamped_swiglu(gate_up, bias, experts, alpha, limit)

    @staticmethod
    @differentiable_once(*NO_SECOND_DERIVATIVE)
    def backward(ctx, grad):
        gate_up, bias, experts, offsets = ctx.saved_tensors
        grad_gate_up = clamped_swiglu_backward(gate_up, bias, experts, grad.contiguous(), *ctx.scalars)
        grad_bias = sum_groups(grad_gate_up, offsets) if ctx.needs_input_grad[1] else None
        return grad_gate_up, grad_bias, None, None, None, None


@operator("(Tensor gate_up, Tensor bias, Tensor experts, float alpha, float limit) -> Tensor")
def clamped_swiglu(gate_up: Tensor, bias: Tensor, experts: Tensor, alpha: float, limit: float) -> Tensor:
    """See :func:`clamped_gate`."""
    rows = with_bias(gate_up, bias, experts)
    gate, up = rows[:, ::2].clamp(max=limit), rows[:, 1::2].clamp(min=-limit, max=limit)
    return ((up + 1) * (gate * torch.sigmoid(gate * alpha))).to(gate_up.dtype)


@operator("(Tensor gate_up, Tensor bias, Tensor experts, Tensor grad, float alpha, float limit) -> Tensor")
def clamped_swiglu_backward(
    gate_up: Tensor, bias: Tensor, experts: Tensor, grad: Tensor, alpha: float, limit: float
) -> Tensor:
    """Gradient of :func:`clamped_swiglu`'s first argument."""
    rows = with_bias(gate_up, bias, experts)
    free_gate, free_up = rows[:, ::2], rows[:, 1::2]
    gate, up, grad = free_gate.clamp(max=limit), free_up.clamp(min=-limit, max=limit), grad.to(rows.dtype)
    logistic = torch.sigmoid(gate * alpha)
    slope = logistic + gate * (alpha * (logistic * (1 - logistic)))
    of_gate = torch.where(free_gate <= limit, grad * (up + 1) * slope, 0.0)
    of_up = torch.where((free_up >= -limit) & (free_up <= limit), grad * (gate * logistic), 0.0)
    return torch.stack([of_gate, of_up], dim=-1).flatten(1).to(gate_up.dtype)


@clamped_swiglu.register_fake
def _(gate_up, bias, experts, alpha, limit):
    return gate_up.new_empty(gate_up.size(0), gate_up.size(-1) // 2)


@clamped_swiglu_backward.register_fake
def _(gate_up, bias, experts, grad, alpha, limit):
    return torch.empty_like(gate_up)


@clamped_swiglu.register_kernel("cuda")
def _(gate_up, bias, experts, alpha, limit):
    num_rows, width = gate_up.size(0), gate_up.size(-1) // 2
    out = gate_up.new_empty(num_rows, width)
    with device_of(gate_up):
        _C.experts.cuda_clamped_gate(
            gate_up.data_ptr(), bias_addresses(bias, experts), alpha, limit, out.data_ptr(), DTYPES[gate_up.dtype],
            num_rows, width, stream_of(gate_up),
        )  # fmt: skip
    return out


@clamped_swiglu_backward.register_kernel("cuda")
def _(gate_up, bias, experts, grad, alpha, limit):
    out = torch.empty_like(gate_up)
    with device_of(gate_up):
        _C.experts.cuda_clamped_gate_backward(
            gate_up.data_ptr(), bias_addresses(bias, experts), alpha, limit, grad.data_ptr(), out.data_ptr(),
            DTYPES[gate_up.dtype], grad.size(0), grad.size(-1), stream_of(gate_up),
        )  # fmt: skip
    return out
