"""Products of matrices in 8 bits: ``torch._scaled_mm`` on a GPU, float32 products of the same values on the CPU."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from patrickstar.fp8.casting import TILE, Block, Codes, Sides, are_operators_seen, cast, mode_of_products


class Sum(enum.Enum):
    """Accumulation of a product. Blocks of 128 are always summed exactly."""

    EXACT = "exact"
    """Partial sums are added in float32."""
    FAST = "fast"
    """Sums stay in the tensor cores, which round them to fewer bits (Hopper: 14)."""


def multiply(a: Codes, weight: Tensor, block: Block, side: Sides, rows: Sequence[int], sum: Sum) -> Tensor:
    """The product ``[*rows, columns]`` of ``a`` and a weight, which is cast by ``block``; ``side``: whose rows are the
    product's columns. A dispatch mode that keeps products sees one operation, so a recomputation casts no weight.
    """
    if not are_operators_seen():
        return cast_and_multiply(a, weight, block, side, rows, sum)
    mode = mode_of_products()
    if mode is not None:  # called as PyTorch would, without the dispatch of an operator
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableTorchDispatch():
            return mode.__torch_dispatch__(cast_and_multiply, (), (a, weight, block, side, rows, sum))
    is_fast = sum is Sum.FAST
    return MULTIPLY(a.values, a.scales, a.block.value, weight, block.value, side.value, rows, is_fast)


def cast_weight(weight: Tensor, block: Block, side: Sides) -> Codes:
    """Codes of one side of a weight."""
    plain, transposed = cast(weight, block, side)
    return plain if side is Sides.PLAIN else transposed


def product(a: Codes, b: Codes, num_rows: int, sum: Sum = Sum.EXACT) -> Tensor:
    """``num_rows`` rows of ``a @ b.T`` in bfloat16, of ``a [rows, summed]`` and ``b [columns, summed]``."""
    if a.values.device.type == "cpu":
        return (a.dequantized()[:num_rows] @ b.dequantized().t()).to(torch.bfloat16)
    result = torch._scaled_mm(
        a.values,
        b.values.t(),
        _arranged(a),
        b.scales.unsqueeze(0) if b.block is Block.LINE else _arranged(b).t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=sum is Sum.FAST,
    )
    # A copy, not a slice: see cast_and_multiply().
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


def cast_and_multiply(a: Codes, weight: Tensor, block: Block, side: Sides, rows: Sequence[int], sum: Sum) -> Tensor:
    """See :func:`multiply`."""
    result = product(a, cast_weight(weight, block, side), math.prod(rows), sum)
    # In place: a custom function's result must not be a view, so that a model may write it.
    return result if len(rows) == 1 else result.resize_(*rows, result.size(1))


_library = torch.library.Library("patrickstar", "FRAGMENT")
_library.define(
    "multiply_fp8(Tensor codes, Tensor scales, int block, Tensor weight, int weight_block, int side, int[] rows,"
    " bool is_fast) -> Tensor"
)
MULTIPLY = torch.ops.patrickstar.multiply_fp8.default
"""The operator of :func:`multiply`."""


@torch.library.impl(_library, "multiply_fp8", "CPU")
@torch.library.impl(_library, "multiply_fp8", "CUDA")
def _(
    codes: Tensor,
    scales: Tensor,
    block: int,
    weight: Tensor,
    weight_block: int,
    side: int,
    rows: Sequence[int],
    is_fast: bool,
) -> Tensor:
    a, sum = Codes(codes, scales, Block(block)), Sum.FAST if is_fast else Sum.EXACT
    return cast_and_multiply(a, weight, Block(weight_block), Sides(side), rows, sum)


@torch.library.impl(_library, "multiply_fp8", "Meta")
def _(codes, scales, block, weight, weight_block, side, rows, is_fast):
    return weight.new_empty((*rows, weight.size(0 if Sides(side) is Sides.PLAIN else 1)))


@register_flop_formula(torch.ops.patrickstar.multiply_fp8)
def _(codes: Any, scales: Any, block: int, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * codes[0] * math.prod(weight)  # of shapes
