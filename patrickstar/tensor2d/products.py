"""Products of matrices that are divided into blocks over a mesh: A B, A Bᵀ and Aᵀ B, by SUMMA.

    c = multiply(a, b, group)                   # blocks [M/r, K/c] and [K/r, N/c] -> [M/r, N/c]
    c = multiply_transposed(a, b, group)        # A Bᵀ: [M/r, K/c] and [N/r, K/c] -> [M/r, N/c]
    c = transposed_multiply(a, b, group)        # Aᵀ B: [K/r, M/c] and [K/r, N/c] -> [M/r, N/c]

Rank (i, j) of r x c has block (i, j). A product is made of lcm(r, c) panels (van de Geijn and Watts, *SUMMA: Scalable
Universal Matrix Multiplication Algorithm*, 1997; for training on q x q ranks Xu et al., *An Efficient 2D Method for
Training Super-Large Deep Learning Models*, arXiv 2104.05343). The gradient of each product is two of the three, so
all of them can be differentiated as often as wanted.

[Note: which operand stays] In A B both operands travel and the output stays; in the other two one operand travels and
partial sums of the output do, so that the other operand stays. All of them send (c - 1) / (r c) of one matrix along
columns and (r - 1) / (r c) of another along rows:

    product     along columns       along rows
    A B         A                   B
    A Bᵀ        partial sums of C   B
    Aᵀ B        A                   partial sums of C
"""

from __future__ import annotations

from typing import Any

import torch

from patrickstar.tensor2d.group import MeshGroup
from patrickstar.tensor2d.panels import Panels, PartialSums, check_divides, check_operands, sum_dtype, travelling


def multiply(a: torch.Tensor, b: torch.Tensor, group: MeshGroup) -> torch.Tensor:
    """This rank's block of A B.

    Sums of products of 16-bit operands are float32, over all panels, and rounded once.

    Args:
        a: [M/r, K/c], of one dtype with b.
        b: [K/r, N/c].
        group: of r x c ranks; lcm(r, c) divides K.

    Returns:
        [M/r, N/c].

    Raises:
        ValueError: shapes, dtypes or K do not fit.
    """
    check_operands("A B", a, b, group, (1, 0))
    check_divides("A B: columns of A", a.shape[1] * group.place.columns, group.place)
    return _Multiply.apply(a, b, group)


def multiply_transposed(a: torch.Tensor, b: torch.Tensor, group: MeshGroup) -> torch.Tensor:
    """This rank's block of A Bᵀ.

    Args:
        a: [M/r, K/c], of one dtype with b.
        b: [N/r, K/c].
        group: of r x c ranks; lcm(r, c) divides N.

    Returns:
        [M/r, N/c], summed as [Note: sums by their owner] says.

    Raises:
        ValueError: shapes, dtypes or N do not fit.
    """
    check_operands("A B^T", a, b, group, (1, 1))
    check_divides("A B^T: rows of B", b.shape[0] * group.place.rows, group.place)
    return _MultiplyTransposed.apply(a, b, group)


def transposed_multiply(a: torch.Tensor, b: torch.Tensor, group: MeshGroup) -> torch.Tensor:
    """This rank's block of Aᵀ B.

    Args:
        a: [K/r, M/c], of one dtype with b.
        b: [K/r, N/c].
        group: of r x c ranks; lcm(r, c) divides M.

    Returns:
        [M/r, N/c], summed as [Note: sums by their owner] says.

    Raises:
        ValueError: shapes, dtypes or M do not fit.
    """
    check_operands("A^T B", a, b, group, (0, 0))
    check_divides("A^T B: columns of A", a.shape[1] * group.place.columns, group.place)
    return _TransposedMultiply.apply(a, b, group)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, group: MeshGroup) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.group = group
        count = group.place.num_panels
        if count == 1:
            return a @ b
        total = torch.empty(a.shape[0], b.shape[1], dtype=sum_dtype(a.dtype), device=a.device)
        operands = Panels(a, 1, count, group.along_columns), Panels(b, 0, count, group.along_rows)
        for index, (left, right) in enumerate(travelling(*operands, num_panels=count)):
            add_product(total, left, right, beta=min(index, 1))
        return total.to(a.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        a, b = ctx.saved_tensors
        grad = grad.contiguous()
        grad_a = _MultiplyTransposed.apply(grad, b, ctx.group) if ctx.needs_input_grad[0] else None
        grad_b = _TransposedMultiply.apply(a, grad, ctx.group) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, None


class _MultiplyTransposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, group: MeshGroup) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.group = group
        place, count = group.place, group.place.num_panels
        if count == 1:
            return a @ b.t()
        out = a.new_empty(a.shape[0], b.shape[0] * place.rows // place.columns)
        sums = PartialSums(out, 1, count, group.along_columns)
        for index, (right,) in enumerate(travelling(Panels(b, 0, count, group.along_rows), num_panels=count)):
            sums.add(index, _summand(a, right.t(), sums, index))
        return sums.finish()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        a, b = ctx.saved_tensors
        grad = grad.contiguous()
        grad_a = _Multiply.apply(grad, b, ctx.group) if ctx.needs_input_grad[0] else None
        grad_b = _TransposedMultiply.apply(grad, a, ctx.group) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, None


class _TransposedMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, group: MeshGroup) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.group = group
        place, count = group.place, group.place.num_panels
        if count == 1:
            return a.t() @ b
        out = a.new_empty(a.shape[1] * place.columns // place.rows, b.shape[1])
        sums = PartialSums(out, 0, count, group.along_rows)
        for index, (left,) in enumerate(travelling(Panels(a, 1, count, group.along_columns), num_panels=count)):
            sums.add(index, _summand(left.t(), b, sums, index))
        return sums.finish()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        a, b = ctx.saved_tensors
        grad = grad.contiguous()
        grad_a = _MultiplyTransposed.apply(b, grad, ctx.group) if ctx.needs_input_grad[0] else None
        grad_b = _Multiply.apply(a, grad, ctx.group) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, None


def _summand(a: torch.Tensor, b: torch.Tensor, sums: PartialSums, index: int) -> torch.Tensor:
    """Not rounded where it is not sent."""
    dtype = sum_dtype(a.dtype)
    if dtype == a.dtype or not sums.keeps(index):
        return a @ b
    total = torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device)
    return add_product(total, a, b, beta=0)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: int) -> torch.Tensor:
    """``total = beta * total + a b`` in the type of ``total``, which is not read with ``beta`` 0."""
    if total.dtype == a.dtype:
        return torch.addmm(total, a, b, beta=beta, out=total)
    if total.device.type != "cpu":  # 16-bit operands, of which no copies are made
        return torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    return torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)
