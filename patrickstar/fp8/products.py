"""Products of matrices in 8 bits: ``torch._scaled_mm`` on a GPU, float32 products of the same values on the CPU."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from patrickstar.fp8.casting import TILE, Block, Codes


class Sum(enum.Enum):
    """Accumulation of a product. Blocks of 128 are always summed exactly."""

    EXACT = "exact"
    """Partial sums are added in float32."""
    FAST = "fast"
    """Sums stay in the tensor cores, which round them to fewer bits (Hopper: 14)."""


def product(a: Codes, b: Codes, num_rows: int, sum: Sum = Sum.EXACT) -> Tensor:
    """``num_rows`` rows of ``a @ b.T`` in bfloat16, of ``a [rows, summed]`` and ``b [columns, summed]``."""
    if a.values.device.type == "cpu":
        return (a.dequantized()[:num_rows] @ b.dequantized().t()).to(torch.bfloat16)
    result = torch._scaled_mm(
        a.values,
        b.values.t(),
        _arranged(a),
        _arranged(b).t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=sum is Sum.FAST,
    )
    # A copy, not a slice: a custom function's result must not be a view, so that a model may write it.
    return result if num_rows == result.size(0) else result[:num_rows].clone()


def _arranged(codes: Codes) -> Tensor:
    """The scales in the shape and strides that ``torch._scaled_mm`` expects of its first matrix; the second one's are
    transposed.
    """
    scales = codes.scales
    if codes.block is Block.STRIP:
        return scales.t()
    if codes.block is Block.SQUARE and scales.size(1) % 4 != 0:  # cuBLAS' rows of scales are multiples of 16 bytes
        return scales.t().repeat_interleave(TILE, 1).t()
    if codes.block is Block.LINE:
        return scales.unsqueeze(1)
    return scales.reshape(()) if codes.block is Block.MATRIX else scales
