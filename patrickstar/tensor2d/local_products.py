"""Products of matrices on one rank, written where they belong.

[Note: float32 where sums meet] A product adds up in float32 inside and rounds once, so 16 bits are exact enough for all
that one product computes, and for one summand more: ``addmm`` on top of a matrix reads it, adds it to the sum in
float32 and rounds the whole. Only sums of several products, or of several others' summands, have a matrix in float32 of
their own; it would be written, read and cast again for nothing elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from patrickstar.tensor2d.orders import is_filling
from patrickstar.tensor2d.panels import sum_dtype


def product_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """``out = a b + bias``, rounded once; of a contiguous ``out`` cuBLAS adds the bias itself."""
    if bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: int) -> torch.Tensor:
    """``total = beta * total + a b`` in the type of ``total``, which is not read with ``beta`` 0."""
    if total.dtype == a.dtype:
        return torch.addmm(total, a, b, beta=beta, out=total)
    if total.device.type != "cpu":  # 16-bit operands, of which no copies are made
        return torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    return torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)


def product_onto(out: torch.Tensor, others: Sequence[torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> None:
    """``out = sum(others) + a b``, rounded once. One other is ``out`` itself, several are not."""
    total = _sum_of(others)
    add_product(total, a, b, beta=1)
    if len(others) > 1:
        out.copy_(total)


def tokens_into(
    out: torch.Tensor, tokens: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """``out = tokens matrix + bias`` of [b, t, k] and [k, n], into [b, t, n], either of which may be some tokens of
    longer sequences: then sample by sample without copies, or by a copy where samples are small.
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
    """As :func:`product_onto`, of [b, t, k], [k, n] and a contiguous [b, t, n]."""
    total = _sum_of(others)
    if not _is_flat(tokens) and is_filling(out[0].numel()):
        for sample, target in zip(tokens, total, strict=True):
            add_product(target, sample, matrix, beta=1)
    else:
        add_product(total.flatten(0, 1), tokens.flatten(0, 1), matrix, beta=1)
    if len(others) > 1:
        out.copy_(total)


def _sum_of(others: Sequence[torch.Tensor]) -> torch.Tensor:
    """One of them is not copied."""
    if len(others) == 1:
        return others[0]
    total = others[0].to(sum_dtype(others[0].dtype), copy=True)
    for part in others[1:]:
        total += part
    return total


def _is_flat(tokens: torch.Tensor) -> bool:
    """Whether samples follow each other, so that [b, t, k] is [b t, k] without a copy."""
    return tokens.shape[0] == 1 or tokens.stride(0) == tokens.shape[1] * tokens.stride(1)
