"""Products of sharded matrices over a mesh, A B, A Bᵀ and Aᵀ B, by SUMMA.

    c = multiply(a, b, group)                   # blocks [M/r, K/c] and [K/r, N/c] -> [M/r, N/c]
    c = multiply_transposed(a, b, group)        # A Bᵀ: [M/r, K/c] and [N/r, K/c] -> [M/r, N/c]
    c = transposed_multiply(a, b, group)        # Aᵀ B: [K/r, M/c] and [K/r, N/c] -> [M/r, N/c]

Rank (i, j) of r x c has block (i, j). A product is made of lcm(r, c) panels (van de Geijn and Watts, *SUMMA: Scalable
Universal Matrix Multiplication Algorithm*, 1997; for training on q x q ranks Xu et al., *An Efficient 2D Method for
Training Super-Large Deep Learning Models*, arXiv 2104.05343). The gradient of each product is two of the three, so all
can be differentiated any number of times.

In A B both operands are sent and the output stays. In the others one operand and partial sums of the output are sent,
and the other operand stays. Each sends (c - 1) / (r c) of one matrix along columns and (r - 1) / (r c) of another along
rows:

    product     along columns       along rows
    A B         A                   B
    A Bᵀ        partial sums of C   B
    Aᵀ B        A                   partial sums of C

On meshes of one row or one column only one of the two is sent, and no product is cut along its inner dimension. So
nothing is accumulated outside of a multiplication. Parts along an outer dimension, and sums, go rank by rank ([Note:
own first, own last]). Parts along the inner dimension are all-gathered for some rows or columns of the output at a
time. Panels accumulated in float32 ([Note: one panel ahead]) are for meshes of several rows and columns.
"""

from __future__ import annotations

from typing import Any

import torch

from patrickstar.tensor2d.group import MeshGroup
from patrickstar.tensor2d.lines import Line
from patrickstar.tensor2d.local_products import add_product, product_into, product_onto
from patrickstar.tensor2d.orders import GROWING, SUMS, arriving, begin_gathering, cut, scattered
from patrickstar.tensor2d.panels import (
    Panels,
    PartialSums,
    check_bias,
    check_divides,
    check_operands,
    save_operands,
    sum_dtype,
    travelling,
)


def multiply(a: torch.Tensor, b: torch.Tensor, group: MeshGroup, bias: torch.Tensor | None = None) -> torch.Tensor:
    """This rank's block of A B plus a bias on all rows. 16-bit operands are accumulated in float32 over all panels and
    rounded once.

    Args:
        a: [M/r, K/c], in b's dtype.
        b: [K/r, N/c].
        group: r x c ranks; lcm(r, c) divides K.
        bias: [N/c], in the same dtype; None: none.

    Returns:
        [M/r, N/c].

    Raises:
        ValueError: shapes, dtypes or K do not fit.
    """
    check_operands("A B", a, b, group, (1, 0))
    check_divides("A B: columns of A", a.shape[1] * group.place.columns, group.place)
    check_bias("A B", bias, b.shape[1], b.dtype)
    return _Multiply.apply(a, b, bias, group)


def multiply_transposed(
    a: torch.Tensor, b: torch.Tensor, group: MeshGroup, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """This rank's block of A Bᵀ plus a bias on all rows.

    Args:
        a: [M/r, K/c], in b's dtype.
        b: [N/r, K/c].
        group: r x c ranks; lcm(r, c) divides N.
        bias: [N/c], in the same dtype; None: none.

    Returns:
        [M/r, N/c], summed as in [Note: sums by their owner].

    Raises:
        ValueError: shapes, dtypes or N do not fit.
    """
    check_operands("A B^T", a, b, group, (1, 1))
    check_divides("A B^T: rows of B", b.shape[0] * group.place.rows, group.place)
    check_bias("A B^T", bias, b.shape[0] * group.place.rows // group.place.columns, b.dtype)
    return _MultiplyTransposed.apply(a, b, bias, group)


def transposed_multiply(a: torch.Tensor, b: torch.Tensor, group: MeshGroup) -> torch.Tensor:
    """This rank's block of Aᵀ B.

    Args:
        a: [K/r, M/c], in b's dtype.
        b: [K/r, N/c].
        group: r x c ranks; lcm(r, c) divides M.

    Returns:
        [M/r, N/c], summed as in [Note: sums by their owner].

    Raises:
        ValueError: shapes, dtypes or M do not fit.
    """
    check_operands("A^T B", a, b, group, (0, 0))
    check_divides("A^T B: columns of A", a.shape[1] * group.place.columns, group.place)
    return _TransposedMultiply.apply(a, b, group)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, group: MeshGroup
    ) -> torch.Tensor:
        save_operands(ctx, a, b)
        ctx.group = group
        out = a.new_empty(a.shape[0], b.shape[1])
        if group.place.size == 1:
            product_into(out, a, b, bias)
        elif group.place.rows == 1:
            _by_rows(out, a, b, bias, group.along_columns)
        elif group.place.columns == 1:
            _by_columns(out, a, b, bias, group.along_rows)
        else:
            count = group.place.num_panels
            total = torch.empty_like(out, dtype=sum_dtype(a.dtype))
            operands = Panels(a, 1, count, group.along_columns), Panels(b, 0, count, group.along_rows)
            for index, (left, right) in enumerate(travelling(*operands, num_panels=count)):
                add_product(total, left, right, beta=min(index, 1))
            _round(total, bias, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        a, b = ctx.saved_tensors
        grad = grad.contiguous()
        grad_a = _MultiplyTransposed.apply(grad, b, None, ctx.group) if ctx.needs_input_grad[0] else None
        grad_b = _TransposedMultiply.apply(a, grad, ctx.group) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, grad.sum(0) if ctx.needs_input_grad[2] else None, None


class _MultiplyTransposed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, group: MeshGroup
    ) -> torch.Tensor:
        save_operands(ctx, a, b)
        ctx.group = group
        place, count = group.place, group.place.num_panels
        out = a.new_empty(a.shape[0], b.shape[0] * place.rows // place.columns)
        if place.columns == 1:  # includes a single rank
            parts = out.chunk(place.rows, 1)
            for rank, features, shares in arriving(b, group.along_rows):
                part_of_bias = None if bias is None else bias.chunk(place.rows)[rank]
                for rows in cut(*parts[rank].shape, shares):
                    product_into(parts[rank][rows], a[rows], features.t(), part_of_bias)
        elif place.rows == 1:
            _summed_by_rows(out, a, b, bias, group.along_columns)
        else:
            sums = PartialSums(out, 1, count, group.along_columns)
            for index, (right,) in enumerate(travelling(Panels(b, 0, count, group.along_rows), num_panels=count)):
                sums.add(index, _summand(a, right.t(), sums, index))
            sums.finish()
            if bias is not None:
                out += bias
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        a, b = ctx.saved_tensors
        grad = grad.contiguous()
        grad_a = _Multiply.apply(grad, b, None, ctx.group) if ctx.needs_input_grad[0] else None
        grad_b = _TransposedMultiply.apply(grad, a, ctx.group) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, grad.sum(0) if ctx.needs_input_grad[2] else None, None


class _TransposedMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, group: MeshGroup) -> torch.Tensor:
        save_operands(ctx, a, b)
        ctx.group = group
        place, count = group.place, group.place.num_panels
        out = a.new_empty(a.shape[1] * place.columns // place.rows, b.shape[1])
        if place.rows == 1:  # includes a single rank
            parts = out.chunk(place.columns)
            for rank, columns, shares in arriving(a, group.along_columns):
                for rows in cut(*parts[rank].shape, shares):
                    product_into(parts[rank][rows], columns[:, rows].t(), b)
        elif place.columns == 1:
            _summed_by_panels(out, a, b, group.along_rows)
        else:
            sums = PartialSums(out, 0, count, group.along_rows)
            for index, (left,) in enumerate(travelling(Panels(a, 1, count, group.along_columns), num_panels=count)):
                sums.add(index, _summand(left.t(), b, sums, index))
            sums.finish()
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        a, b = ctx.saved_tensors
        grad = grad.contiguous()
        grad_a = _MultiplyTransposed.apply(b, grad, None, ctx.group) if ctx.needs_input_grad[0] else None
        grad_b = _Multiply.apply(a, grad, None, ctx.group) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, None


def _by_rows(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, line: Line) -> None:
    """A B with whole rows of A, all-gathered for some rows of the output at a time."""
    a = a.contiguous()
    line.meet()
    coming = [(rows, begin_gathering(a[rows], line)) for rows in cut(*out.shape, GROWING)]
    for rows, wait in coming:
        product_into(out[rows], torch.cat(wait(), 1), b, bias)


def _by_columns(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, line: Line) -> None:
    """A B with whole columns of B, all-gathered for some columns of the output at a time."""
    line.meet()
    coming = []
    for columns in cut(out.shape[1], out.shape[0], GROWING):
        mine = b[:, columns]
        whole = mine.new_empty(line.size, *mine.shape)
        whole[line.rank] = mine
        coming.append((columns, whole, begin_gathering(whole[line.rank], line, whole)))
    for columns, whole, wait in coming:
        wait()
        product_into(out[:, columns], a, whole.flatten(0, 1), None if bias is None else bias[columns])


def _summed_by_rows(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, line: Line) -> None:
    """A Bᵀ; each rank keeps some columns of the sum over ranks, in pieces of rows."""
    panels = b.chunk(line.size)

    def add_own(rows: slice, others: list[torch.Tensor]) -> None:
        product_onto(out[rows], others, a[rows], panels[line.rank].t())
        if bias is not None:
            out[rows] += bias

    pieces = cut(*out.shape, SUMS)
    scattered(line, pieces, lambda owner, rows: a[rows] @ panels[owner].t(), out.__getitem__, add_own)


def _summed_by_panels(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, line: Line) -> None:
    """Aᵀ B; each rank keeps some rows of the sum over ranks, in pieces."""
    panels = a.t().chunk(line.size)
    scattered(
        line,
        cut(*out.shape, SUMS),
        lambda owner, rows: panels[owner][rows] @ b,
        out.__getitem__,
        lambda rows, others: product_onto(out[rows], others, panels[line.rank][rows], b),
    )


def _summand(a: torch.Tensor, b: torch.Tensor, sums: PartialSums, index: int) -> torch.Tensor:
    """A summand, in the accumulation dtype if this rank keeps the sum, else rounded for sending."""
    dtype = sum_dtype(a.dtype)
    if dtype == a.dtype or not sums.keeps(index):
        return a @ b
    total = torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device)
    return add_product(total, a, b, beta=0)


def _round(total: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Rounds the sum once, with the bias."""
    if bias is None:
        out.copy_(total)
    else:
        torch.add(total, bias, out=out)
