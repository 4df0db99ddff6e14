"""Grouped products in 8 bits: each group of rows is multiplied by its own matrix.

    groups = Groups.of(ends, num_rows)                              # rows lie by group
    x, g = cast_rows(x), cast_rows(g)
    rows = multiply(x, cast_weights(w), groups)                     # [rows, results]
    sums = multiply_columns(turn(g, groups), turn(x, groups), groups)   # [groups, columns of g, columns of x]

Scales are those of :mod:`patrickstar.fp8.casting`, one for all elements that a result sums over, codes e4m3. Codes of
columns are made of those of rows, so that a gradient belongs to the values that were multiplied: powers of two change
no code, except that columns which are small in all rows lose bits. Casts are operators of PyTorch; the CPU gives the
GPU's bits.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from patrickstar import _C
from patrickstar.fp8.casting import TILE, Block, Codes, Format, cast_on_host, device_of, stream_of
from patrickstar.fp8.products import Sum

MOST_GROUPS = 1023
"""Limit of PyTorch's kernel."""


@dataclasses.dataclass(frozen=True)
class Groups:
    """Consecutive rows, as codes of rows and as codes of columns."""

    ends: Tensor
    """int32, by group: end of its rows. Later rows belong to none, and their results are undefined."""
    padded_ends: Tensor
    """int32, by group: end of its columns in codes of columns, where each group has a multiple of 128, at least 128."""
    num_tiles: int
    """At least the columns of all groups, in 128."""

    @staticmethod
    def of(ends: Tensor, num_rows: int) -> Groups:
        """The groups of ``num_rows`` rows with the ends ``ends``."""
        counts = ends.diff(prepend=ends.new_zeros(1))
        tiles = ((counts + (TILE - 1)) // TILE).clamp(min=1)
        padded_ends = (tiles.cumsum(0) * TILE).to(torch.int32)
        return Groups(ends, padded_ends, num_rows // TILE + ends.numel())


class Columns(NamedTuple):
    """Rows of groups as columns, whose products sum over the rows of each group."""

    values: Tensor
    """``[columns of the rows, 128 * tiles]``; see :attr:`Groups.padded_ends`."""
    scales: Tensor
    """``[groups, columns of the rows]``."""


class Weights(NamedTuple):
    """A matrix for each group."""

    values: Tensor
    """``[groups, results, summed]``."""
    scales: Tensor
    """``[groups, results]``."""


def cast_rows(x: Tensor) -> Codes:
    """Codes of bfloat16 ``[rows, columns]``, as ``cast(x, Block.LINE, Sides.PLAIN)`` without padding."""
    return Codes(*_cast_rows(x.contiguous()), Block.LINE)


def gathered(codes: Codes, sources: Tensor) -> Codes:
    """The rows of ``codes`` with the indices ``sources``."""
    rows = codes.values.view(torch.uint8).index_select(0, sources).view(codes.values.dtype)
    return Codes(rows, codes.scales.index_select(0, sources), Block.LINE)


def turn(codes: Codes, groups: Groups, sources: Tensor | None = None) -> Columns:
    """Rows of groups as columns.

    Args:
        codes: of rows.
        groups: of the rows.
        sources: int64, by row of the groups: its row in ``codes``; None: the same.
    """
    found = _turn(codes.values, codes.scales, sources, groups.ends, groups.padded_ends, groups.num_tiles)
    return Columns(*found)


def cast_weights(weights: Tensor) -> Weights:
    """Codes of bfloat16 ``[groups, results, summed]``."""
    codes = cast_rows(weights.reshape(-1, weights.size(-1)))
    return Weights(codes.values.view(weights.shape), codes.scales.view(weights.shape[:2]))


def cast_turned_weights(weights: Tensor) -> Weights:
    """Codes of the transposed matrices of bfloat16 ``[groups, summed, results]``, whose sizes are multiples of 128."""
    num_groups, summed, results = weights.shape
    ends = torch.arange(1, num_groups + 1, dtype=torch.int32, device=weights.device) * summed
    rows = weights.reshape(-1, results).contiguous()
    values, scales = _turn(rows, None, None, ends, ends, num_groups * summed // TILE)
    return Weights(values.view(results, num_groups, summed).permute(1, 0, 2), scales)


def multiply(rows: Codes, weights: Weights, groups: Groups, sum: Sum = Sum.EXACT) -> Tensor:
    """``rows @ weights[group].T`` in bfloat16, of ``rows [rows, summed]``."""
    if rows.values.device.type == "cpu":
        matrices = weights.values.float() * weights.scales.unsqueeze(-1)
        return _emulated(rows.dequantized(), matrices.transpose(1, 2), groups.ends).to(torch.bfloat16)
    return torch._scaled_grouped_mm(
        rows.values,
        weights.values.transpose(1, 2),
        rows.scales,
        weights.scales,
        offs=groups.ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=sum is Sum.FAST,
    )


def multiply_columns(a: Columns, b: Columns, groups: Groups) -> Tensor:
    """``a[:, group] @ b[:, group].T`` of each group in bfloat16: ``[groups, columns of a, columns of b]``."""
    if a.values.device.type == "cpu":
        sums = _emulated(a.values.float(), b.values.float().t(), groups.padded_ends)
        return (sums * a.scales.unsqueeze(2) * b.scales.unsqueeze(1)).to(torch.bfloat16)
    return torch._scaled_grouped_mm(
        a.values,
        b.values.t(),
        a.scales.flatten(),
        b.scales.flatten(),
        offs=groups.padded_ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )


def empty_codes(x: Tensor, num_rows: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Memory on the device of ``x`` for codes of rows, and for their scales."""
    codes = x.new_empty((num_rows, num_columns), dtype=Format.E4M3.dtype)
    return codes, x.new_empty((num_rows,), dtype=torch.float32)


_library = torch.library.Library("patrickstar", "FRAGMENT")
_library.define("cast_fp8_rows(Tensor x) -> (Tensor, Tensor)")
_library.define(
    "turn_fp8(Tensor x, Tensor? scales, Tensor? sources, Tensor ends, Tensor padded_ends, int num_tiles)"
    " -> (Tensor, Tensor)"
)
_library.define("emulated_fp8_groups(Tensor a, Tensor b, Tensor ends) -> Tensor")
_cast_rows = torch.ops.patrickstar.cast_fp8_rows.default
_turn = torch.ops.patrickstar.turn_fp8.default
_emulated = torch.ops.patrickstar.emulated_fp8_groups.default


@torch.library.impl(_library, "cast_fp8_rows", "CPU")
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return cast_on_host(x.float(), Block.LINE, Format.E4M3)


@torch.library.impl(_library, "cast_fp8_rows", "Meta")
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return empty_codes(x, *x.shape)


@torch.library.impl(_library, "cast_fp8_rows", "CUDA")
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = empty_codes(x, *x.shape)
    with device_of(x):
        _C.fp8.cuda_cast_rows(
            x.data_ptr(), *x.shape, codes.data_ptr(), scales.data_ptr(),
            stream_of(x),
        )  # fmt: skip
    return codes, scales


def _empty_columns(x: Tensor, num_groups: int, num_tiles: int) -> tuple[Tensor, Tensor]:
    codes = x.new_empty((x.size(1), num_tiles * TILE), dtype=Format.E4M3.dtype)
    return codes, x.new_empty((num_groups, x.size(1)), dtype=torch.float32)


@torch.library.impl(_library, "turn_fp8", "CPU")
def _(
    x: Tensor, scales: Tensor | None, sources: Tensor | None, ends: Tensor, padded_ends: Tensor, num_tiles: int
) -> tuple[Tensor, Tensor]:
    codes, code_scales = _empty_columns(x, ends.numel(), num_tiles)
    values = x.float()
    if scales is not None:  # bfloat16, exact except for subnormal numbers
        values = ((values * scales.unsqueeze(1)).view(torch.int32) & -0x10000).view(torch.float32)
    begin = padded_begin = 0
    for group, (end, padded_end) in enumerate(zip(ends.tolist(), padded_ends.tolist(), strict=True)):
        rows = values[begin:end] if sources is None else values[sources[begin:end]]
        columns = values.new_zeros(x.size(1), padded_end - padded_begin)
        columns[:, : end - begin] = rows.t()
        found = cast_on_host(columns, Block.LINE, Format.E4M3)
        codes[:, padded_begin:padded_end], code_scales[group] = found
        begin, padded_begin = end, padded_end
    codes.view(torch.uint8)[:, padded_begin:] = 0
    return codes, code_scales


@torch.library.impl(_library, "turn_fp8", "Meta")
def _(
    x: Tensor, scales: Tensor | None, sources: Tensor | None, ends: Tensor, padded_ends: Tensor, num_tiles: int
) -> tuple[Tensor, Tensor]:
    return _empty_columns(x, ends.numel(), num_tiles)


@torch.library.impl(_library, "turn_fp8", "CUDA")
def _(
    x: Tensor, scales: Tensor | None, sources: Tensor | None, ends: Tensor, padded_ends: Tensor, num_tiles: int
) -> tuple[Tensor, Tensor]:
    codes, code_scales = _empty_columns(x, ends.numel(), num_tiles)
    largest = torch.empty(code_scales.shape, dtype=torch.int32, device=x.device)
    with device_of(x):
        _C.fp8.cuda_turn(
            x.data_ptr(), 0 if scales is None else scales.data_ptr(), 0 if sources is None else sources.data_ptr(),
            ends.data_ptr(), padded_ends.data_ptr(), ends.numel(), num_tiles, x.size(1), codes.data_ptr(),
            code_scales.data_ptr(), largest.data_ptr(), stream_of(x),
        )  # fmt: skip
    return codes, code_scales


@torch.library.impl(_library, "emulated_fp8_groups", "CPU")
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(a, b, offs=ends)  # in float32, which its form for compilers refuses


@torch.library.impl(_library, "emulated_fp8_groups", "Meta")
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return a.new_empty((a.size(0), b.size(-1)) if b.dim() == 3 else (ends.numel(), a.size(0), b.size(1)))
