"""Whole tensors to the blocks of ranks, and back.

block = divide_activation(hidden, place)               # [b, s, h] -> [b/r, s, h/c]
block = Placement.blocks(transposed=True).divide(linear.weight, place)
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import torch

from patrickstar.tensor2d.group import MeshPlace
from patrickstar.tensor2d.panels import Cut, check_divides


class Split(enum.Enum):
    """How a parameter is sharded over rows and columns."""

    BLOCKS = "blocks"
    """Block (row, column) of a matrix; DTensor's (Shard(0), Shard(1))."""
    COLUMNS = "columns"
    """The last dimension is sharded over columns; rows replicate. DTensor's (Replicate(), Shard(-1))."""
    ROWS = "rows"
    """The first dimension is sharded over rows; columns replicate. DTensor's (Shard(0), Replicate())."""
    WHOLE = "whole"
    """All ranks replicate. DTensor's (Replicate(), Replicate())."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """Maps a whole tensor, in the shape of PyTorch's own layer, to a rank's shard.

    Steps, in this order: rows of zeros are appended, parts are interleaved, the matrix is transposed and cut.

    Attributes:
        split: how it is sharded.
        parts: sizes of concatenated parts of the first dimension. Each part is sharded over the columns (rows, with
            ``Split.ROWS``), so that each rank has some of each: queries, keys and values of some heads. Empty: one
            part.
        padded_to: rows after zeros are appended; None: no padding.
        transposed: the parameter is stored transposed.
    """

    split: Split
    parts: tuple[int, ...] = ()
    padded_to: int | None = None
    transposed: bool = False

    def divide(self, whole: torch.Tensor, place: MeshPlace) -> torch.Tensor:
        """The shard of ``whole`` at ``place``: a contiguous tensor of its own.

        Raises:
            ValueError: a dimension is not divisible.
        """
        if self.padded_to is not None:
            whole = torch.nn.functional.pad(whole, (0, 0) * (whole.dim() - 1) + (0, self.padded_to - whole.shape[0]))
        if self.parts:
            number = self._parts_over(place)
            cut = [part.chunk(number) for part in whole.split(self.parts)]
            whole = torch.cat([part[index] for index in range(number) for part in cut])
        if self.transposed:
            whole = whole.t()
        if self.split in (Split.BLOCKS, Split.ROWS):
            whole = _cut(whole, 0, "rows", place.row, place)
        if self.split in (Split.BLOCKS, Split.COLUMNS):
            whole = _cut(whole, -1, "columns", place.column, place)
        return whole.clone(memory_format=torch.contiguous_format)

    def assemble(self, blocks: Sequence[torch.Tensor], place: MeshPlace, size: int | None = None) -> torch.Tensor:
        """The whole tensor from the shards of all ranks of the mesh, in rank order. With ``padded_to``, the first
        ``size`` rows are returned.
        """
        rows = [list(blocks[row * place.columns :][: place.columns]) for row in range(place.rows)]
        joined = [torch.cat(row, dim=-1) if self.split in (Split.BLOCKS, Split.COLUMNS) else row[0] for row in rows]
        whole = torch.cat(joined) if self.split in (Split.BLOCKS, Split.ROWS) else joined[0]
        if self.transposed:
            whole = whole.t()
        if self.parts:
            number = self._parts_over(place)
            sizes = [part // number for part in self.parts] * number
            cut = whole.split(sizes)
            count = len(self.parts)
            whole = torch.cat([piece for part in range(count) for piece in cut[part::count]])
        return whole[:size].contiguous() if self.padded_to is not None else whole.contiguous()

    def is_first_at(self, place: MeshPlace) -> bool:
        """True for one rank of those that replicate a shard: the first."""
        has_rows, has_columns = (self.split in (Split.BLOCKS, kind) for kind in (Split.ROWS, Split.COLUMNS))
        return (has_rows or place.row == 0) and (has_columns or place.column == 0)

    def _parts_over(self, place: MeshPlace) -> int:
        return place.rows if self.split is Split.ROWS else place.columns


def divide_batch(whole: torch.Tensor, place: MeshPlace) -> torch.Tensor:
    """This row's samples [b/r, ...] of a tensor [b, ...] that columns replicate, such as tokens and labels.

    Raises:
        ValueError: rows do not divide b.
    """
    return _cut(whole, 0, "rows", place.row, place)


def divide_activation(whole: torch.Tensor, place: MeshPlace) -> torch.Tensor:
    """This rank's block [b/r, ..., h/c] of a tensor [b, ..., h].

    Raises:
        ValueError: rows do not divide b, or columns do not divide h.
    """
    return _cut(divide_batch(whole, place), -1, "columns", place.column, place).contiguous()


def assemble_activation(blocks: Sequence[torch.Tensor], place: MeshPlace) -> torch.Tensor:
    """[b, ..., h] from the blocks [b/r, ..., h/c] of all ranks, in rank order."""
    return torch.cat(
        [torch.cat(list(blocks[row * place.columns :][: place.columns]), dim=-1) for row in range(place.rows)]
    )


def _cut(whole: torch.Tensor, dim: int, by: Cut, index: int, place: MeshPlace) -> torch.Tensor:
    check_divides(f"dimension {dim % whole.dim()} of {list(whole.shape)}", whole.shape[dim], place, by)
    return whole.chunk(getattr(place, by), dim=dim)[index]
