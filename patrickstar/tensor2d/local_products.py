"""Local matrix products that write to given outputs.

Accumulation: a product accumulates in float32 and rounds once, so 16-bit outputs suffice for a single product. They
also suffice for one more summand: ``addmm`` reads a matrix, adds it to the float32 sum and rounds once. Only sums of
several products, or of several received summands, get a float32 matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from patrickstar.tensor2d.orders import is_filling
from patrickstar.tensor2d.panels import sum_dtype


def product_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """``out = a b + bias``, rounded once; for a contiguous ``out`` cuBLAS adds the bias itself."""
    if bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: int) -> torch.Tensor:
    """``total = beta * total + a b`` in ``total``'s dtype; with ``beta`` 0, ``total`` is not read."""
    if total.dtype == a.dtype:
        return torch.addmm(total, a, b, beta=beta, out=total)
    if total.device.type != "cpu":  # 16-bit operands, which are not copied
        return torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    return torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)


def product_onto(out: torch.Tensor, others: Sequence[torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> None:
    """``out = sum(others) + a b``, rounded once. A single other must be ``out`` itself; several must not be."""
    total = _sum_of(others)
    add_product(total, a, b, beta=1)
    if len(others) > 1:
        out.copy_(total)


def tokens_into(
    out: torch.Tensor, tokens: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """``out = tokens matrix + bias``: [b, t, k], [k, n] -> [b, t, n]. ``tokens`` or ``out`` may be part of longer
    sequences. Then samples are multiplied one by one, or copied if they are small.
    """
    if _is_flat(tokens) and _is_flat(out):
        product_into(out.flatten(0, 1), tokens.flatten(0, 1), matrix, bias)
    elif is_filling(out[0].numel()):
        for sample, target in zip(tokens, out, strict=True):
            product_into(target, sample, matrix, bias)
    else:
        rows = tokens.flatten(0, 1)
        found = rows @ matrix if bias is None else torch.addmm(bias, rows, matrix)
        out.copy_(found.view(out.shape))


def tokens_onto(out: torch.Tensor, others: Sequence[torch.Tensor], tokens: torch.Tensor, matrix: torch.Tensor) -> None:
    """:func:`product_onto` for [b, t, k], [k, n] and a contiguous [b, t, n]."""
    total = _sum_of(others)
    if not _is_flat(tokens) and is_filling(out[0].numel()):
        for sample, target in zip(tokens, total, strict=True):
            add_product(target, sample, matrix, beta=1)
    else:
        add_product(total.flatten(0, 1), tokens.flatten(0, 1), matrix, beta=1)
    if len(others) > 1:
        out.copy_(total)


def _sum_of(others: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of ``others`` in the accumulation dtype; a single one is returned without copying."""
    if len(others) == 1:
        return others[0]
    total = others[0].to(sum_dtype(others[0].dtype), copy=True)
    for part in others[1:]:
        total += part
    return total


def _is_flat(tokens: torch.Tensor) -> bool:
    """True if [b, t, k] can be viewed as [b t, k]."""
    return tokens.shape[0] == 1 or tokens.stride(0) == tokens.shape[1] * tokens.stride(1)
