"""Rows of tokens between the grouped products of experts (``csrc/experts/cuda_kernels.h``).

    rows = dispatch(hidden, order, positions)         # a row for each token and chosen expert, by expert
    rows = gate(rows)                                 # SwiGLU
    out = combine(rows, weights, routing, bias=bias)  # each token's weighted sum of rows and their expert's bias
    rows = rows + by_row(bias, experts, offsets)      # a value of its expert for each row

``grad_scale`` is a factor of gradients between the two. Where all ranks' tokens meet, they are those of the mean loss.

``positions``: ``[tokens, chosen experts]``, the row, or -1 for an expert that is not here. ``order``: by row, its index
in the flattened ``positions``. ``experts``: by row, its expert, ascending; rows of other ranks' experts take the last
bias. All are int64. Each kernel is a custom operator, which ``torch.compile`` and the meta device know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from patrickstar import _C
from patrickstar.differentiation import differentiable_once
from patrickstar.fp8.casting import device_of, stream_of
from patrickstar.module.preprocess import DTYPES

_ALIGNED = 8
"""Elements of bfloat16 in the 16 bytes of which a line of a grouped product is a multiple."""
NO_SECOND_DERIVATIVE = ("fused experts", 'set activations.experts to "model"')


def operator(schema: str) -> Callable[[Any], Any]:
    """Decorator of a custom operator's implementation on the CPU, whose function has the operator's name."""

    def decorate(function: Any) -> Any:
        name = f"patrickstar::{function.__name__}"
        return torch.library.custom_op(name, function, mutates_args=(), device_types="cpu", schema=schema)

    return decorate


@dataclasses.dataclass
class Routing:
    """Order of the rows, one for each token and chosen expert."""

    experts: Tensor
    """By row: its expert, ascending; of other ranks' experts the number of experts or more."""
    order: Tensor
    """By row: its index in the flattened ``positions``."""
    positions: Tensor
    """``[tokens, chosen experts]``: the row; -1 for other ranks' experts."""
    offsets: Tensor
    """int32, by expert: end of its rows."""

    @staticmethod
    def of(chosen: Tensor, num_experts: int) -> Routing:
        """The order for ``chosen``: ``[tokens, chosen experts]``, indices of experts."""
        ids = chosen.reshape(-1).to(torch.int64)
        experts, order = torch.sort(ids, stable=True)
        positions = torch.empty_like(order)
        positions[order] = torch.arange(order.numel(), device=order.device)
        positions.masked_fill_(ids >= num_experts, -1)
        every = torch.arange(num_experts, device=experts.device, dtype=experts.dtype)
        return Routing(
            experts=experts,
            order=order,
            positions=positions.view(chosen.shape),
            offsets=torch.searchsorted(experts, every, right=True).to(torch.int32),
        )


def dispatch(hidden: Tensor, order: Tensor, positions: Tensor, grad_scale: float = 1.0) -> Tensor:
    """A copy of its token for each row. The gradient of a token is the sum of its rows' in float32, divided by
    ``grad_scale``.
    """
    return _Dispatch.apply(hidden, order, positions, grad_scale)


def gate(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[rows, 2 * width]``, gate first."""
    return _Gate.apply(gate_up)


def by_row(values: Tensor, experts: Tensor, offsets: Tensor) -> Tensor:
    """``values[experts]``. The gradient of an expert's value is the sum of its rows' in float32.

    Args:
        values: ``[experts, width]``.
        experts: by row; rows beyond the last offset do not count in the gradient.
        offsets: int32, by expert: end of its rows.
    """
    return _ByRow.apply(values, experts, offsets)


def combine(
    rows: Tensor, weights: Tensor, routing: Routing, grad_scale: float = 1.0, bias: Tensor | None = None
) -> Tensor:
    """Sum over each token's experts of ``weights[token, k] * rows[positions[token, k]]``.

    Products have the dtype that PyTorch gives them, and are summed in float32. The gradient of an expert's bias is the
    sum of its rows' in float32.

    Args:
        rows: ``[rows, width]``.
        weights: as ``positions``, of the dtype of ``rows`` or float32.
        grad_scale: multiplies the gradients of ``rows`` and ``bias``.
        bias: ``[experts, width]``, of the dtype of ``rows``; added to rows in float32.
    """
    return _Combine.apply(
        rows, weights, bias, routing.order, routing.positions, routing.experts, routing.offsets, grad_scale
    )


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, order, positions, grad_scale):
        ctx.save_for_backward(positions)
        ctx.grad_scale = grad_scale
        return hidden.index_select(0, order // positions.size(1))

    @staticmethod
    @differentiable_once(*NO_SECOND_DERIVATIVE)
    def backward(ctx, grad):
        (positions,) = ctx.saved_tensors
        factor = None
        if ctx.grad_scale != 1:
            factor = torch.full(positions.shape, 1 / ctx.grad_scale, device=grad.device)
        return sum_rows(grad.contiguous(), positions, factor), None, None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return swiglu(gate_up.contiguous())

    @staticmethod
    @differentiable_once(*NO_SECOND_DERIVATIVE)
    def backward(ctx, grad):
        (gate_up,) = ctx.saved_tensors
        return swiglu_backward(gate_up.contiguous(), grad.contiguous())


class _ByRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, experts, offsets):
        ctx.save_for_backward(offsets)
        return values.index_select(0, _experts_here(experts, values))

    @staticmethod
    @differentiable_once(*NO_SECOND_DERIVATIVE)
    def backward(ctx, grad):
        (offsets,) = ctx.saved_tensors
        return sum_groups(grad.contiguous(), offsets), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, bias, order, positions, experts, offsets, grad_scale):
        rows, bias = rows.contiguous(), None if bias is None else bias.contiguous()
        ctx.grad_scale = grad_scale
        ctx.save_for_backward(rows, weights, bias, order, positions, experts, offsets)
        return sum_rows(rows, positions, weights, bias, experts)

    @staticmethod
    @differentiable_once(*NO_SECOND_DERIVATIVE)
    def backward(ctx, grad):
        rows, weights, bias, order, positions, experts, offsets = ctx.saved_tensors
        of_rows = weights.flatten()[order].float()
        if ctx.grad_scale != 1:
            of_rows = of_rows * ctx.grad_scale
        grad_rows, by_row = scale_rows(grad.contiguous(), rows, order // positions.size(1), of_rows, bias, experts)
        grad_weights = torch.where(positions >= 0, by_row[positions.clamp(min=0)], 0.0)
        grad_bias = sum_groups(grad_rows, offsets) if ctx.needs_input_grad[2] else None
        return grad_rows, grad_weights.to(weights.dtype), grad_bias, None, None, None, None, None


def _experts_here(experts: Tensor, values: Tensor) -> Tensor:
    """``experts`` that index ``values``: rows of other ranks' experts take the last."""
    return experts.clamp(max=values.size(0) - 1)


def widened(x: Tensor) -> Tensor:
    """``x`` in float32, or in float64 if it has that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def with_bias(rows: Tensor, bias: Tensor, experts: Tensor) -> Tensor:
    """Rows and the bias of their expert, added in float32 on the CPU."""
    return widened(rows) + bias.index_select(0, _experts_here(experts, bias))


@operator("(Tensor rows, Tensor positions, Tensor? weights, Tensor? bias=None, Tensor? experts=None) -> Tensor")
def sum_rows(
    rows: Tensor, positions: Tensor, weights: Tensor | None, bias: Tensor | None = None, experts: Tensor | None = None
) -> Tensor:
    """Each token's sum of rows, times ``weights`` if there are some; see :func:`combine`."""
    at = positions.clamp(min=0).flatten()
    found = rows.index_select(0, at)
    if bias is not None and experts is not None:
        found = with_bias(found, bias, experts.index_select(0, at))
    found = found.view(*positions.shape, rows.size(-1))
    if weights is not None:
        found = (found * weights.unsqueeze(-1)).to(torch.promote_types(rows.dtype, weights.dtype))
    return found.masked_fill((positions < 0).unsqueeze(-1), 0.0).sum(dim=1).to(rows.dtype)


@operator("(Tensor rows, Tensor offsets) -> Tensor")
def sum_groups(rows: Tensor, offsets: Tensor) -> Tensor:
    """Sum of the rows that end at each of ``offsets``, in float32."""
    return _sum_groups(rows, offsets)


def _sum_groups(rows: Tensor, offsets: Tensor) -> Tensor:
    bounds = functional.pad(offsets.to(torch.int64), (1, 0))
    return torch.segment_reduce(widened(rows), "sum", offsets=bounds, initial=0).to(rows.dtype)  # in the order of rows


@operator(
    "(Tensor grad, Tensor rows, Tensor tokens, Tensor weights, Tensor? bias=None, Tensor? experts=None)"
    " -> (Tensor, Tensor)"
)
def scale_rows(
    grad: Tensor, rows: Tensor, tokens: Tensor, weights: Tensor, bias: Tensor | None = None,
    experts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Backward of :func:`sum_rows` by row: gradients of rows, and of ``weights`` (float32)."""
    found = grad.index_select(0, tokens).float()
    factors = rows if bias is None or experts is None else with_bias(rows, bias, experts)
    return (found * weights.unsqueeze(-1)).to(rows.dtype), (found * factors.float()).sum(dim=-1)


@operator("(Tensor gate_up) -> Tensor")
def swiglu(gate_up: Tensor) -> Tensor:
    """See :func:`gate`."""
    half, up = gate_up.chunk(2, dim=-1)
    return functional.silu(half) * up


@operator("(Tensor gate_up, Tensor grad) -> Tensor")
def swiglu_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    """Gradient of :func:`swiglu`'s argument."""
    half, up = gate_up.chunk(2, dim=-1)
    of_gate = torch.ops.aten.silu_backward(grad * up, half)
    return torch.cat([of_gate, grad * functional.silu(half)], dim=-1)


@sum_rows.register_fake
def _(rows, positions, weights, bias=None, experts=None):
    return rows.new_empty(positions.size(0), rows.size(-1))


@sum_groups.register_fake
def _(rows, offsets):
    return rows.new_empty(offsets.numel(), rows.size(1))


@scale_rows.register_fake
def _(grad, rows, tokens, weights, bias=None, experts=None):
    return torch.empty_like(rows), weights.new_empty(rows.size(0))


@swiglu.register_fake
def _(gate_up):
    return gate_up.new_empty(gate_up.size(0), gate_up.size(-1) // 2)


@swiglu_backward.register_fake
def _(gate_up, grad):
    return torch.empty_like(gate_up)


def bias_addresses(bias: Tensor | None, experts: Tensor | None) -> tuple[int, int, int]:
    """Argument ``bias`` of the kernels."""
    return (0, 0, 0) if bias is None or experts is None else (bias.data_ptr(), experts.data_ptr(), bias.size(0))


@sum_rows.register_kernel("cuda")
def _(rows, positions, weights, bias=None, experts=None):
    num_tokens, num_chosen = positions.shape
    out = rows.new_empty(num_tokens, rows.size(-1))
    product_dtype = _C.DType.FLOAT32 if weights is None else DTYPES[weights.dtype]
    factors = None if weights is None else weights.float().contiguous()
    at = 0 if factors is None else factors.data_ptr()
    with device_of(rows):
        _C.experts.cuda_sum_rows(
            rows.data_ptr(), positions.data_ptr(), at, bias_addresses(bias, experts), out.data_ptr(),
            DTYPES[rows.dtype], product_dtype, num_tokens, num_chosen, rows.size(-1), stream_of(rows),
        )  # fmt: skip
    return out


@sum_groups.register_kernel("cuda")
def _(rows, offsets):
    in_products = hasattr(functional, "grouped_mm") and torch.cuda.get_device_capability(rows.device) >= (8, 0)
    if rows.dtype is not torch.bfloat16 or rows.size(1) % _ALIGNED or not in_products:
        return _sum_groups(rows, offsets)
    ones = rows.new_ones(rows.size(0), _ALIGNED)
    return functional.grouped_mm(ones.t(), rows, offs=offsets)[:, 0].contiguous()


@scale_rows.register_kernel("cuda")
def _(grad, rows, tokens, weights, bias=None, experts=None):
    grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
    with device_of(rows):
        _C.experts.cuda_scale_rows(
            grad.data_ptr(), rows.data_ptr(), tokens.data_ptr(), weights.data_ptr(), bias_addresses(bias, experts),
            grad_rows.data_ptr(), grad_weights.data_ptr(), DTYPES[rows.dtype], rows.size(0), rows.size(-1),
            stream_of(rows),
        )  # fmt: skip
    return grad_rows, grad_weights


@swiglu.register_kernel("cuda")
def _(gate_up):
    num_rows, width = gate_up.size(0), gate_up.size(-1) // 2
    out = gate_up.new_empty(num_rows, width)
    with device_of(gate_up):
        _C.experts.cuda_gate(
            gate_up.data_ptr(), out.data_ptr(), DTYPES[gate_up.dtype], num_rows, width, stream_of(gate_up)
        )
    return out


@swiglu_backward.register_kernel("cuda")
def _(gate_up, grad):
    out = torch.empty_like(gate_up)
    with device_of(gate_up):
        _C.experts.cuda_gate_backward(
            gate_up.data_ptr(), grad.data_ptr(), out.data_ptr(), DTYPES[gate_up.dtype], grad.size(0), grad.size(-1),
            stream_of(gate_up),
        )  # fmt: skip
    return out
