"""Transposes a sharded matrix: blocks [M/r, N/c] of B become blocks [N/r, M/c] of Bᵀ."""

from __future__ import annotations

from typing import Any

import torch

from patrickstar.tensor2d.group import MeshGroup, MeshPlace
from patrickstar.tensor2d.panels import check_divides


def turned(block: torch.Tensor, group: MeshGroup) -> torch.Tensor:
    """This rank's block of Bᵀ. Each element is sent to one rank at most, so this is cheaper than any product.

    Args:
        block: [M/r, N/c] of B.
        group: r x c ranks; lcm(r, c) divides M and N.

    Raises:
        ValueError: M or N is not divisible.
    """
    check_divides("a matrix that is turned: rows", block.shape[0] * group.place.rows, group.place)
    check_divides("a matrix that is turned: columns", block.shape[1] * group.place.columns, group.place)
    return _Turned.apply(block, group)


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: torch.Tensor, group: MeshGroup) -> torch.Tensor:
        ctx.group = group
        place = group.place
        shape = block.shape[0] * place.rows, block.shape[1] * place.columns
        out = block.new_empty(shape[1] // place.rows, shape[0] // place.columns)
        outgoing, incoming = {}, {}
        for rank, other in enumerate(place.world_group()):
            mine, theirs = _common(shape, place, other), _common(shape, other, place)
            if mine is not None:
                outgoing[rank] = block[mine].t().contiguous()
            if theirs is not None and other != place:
                incoming[rank] = block.new_empty([len(part) for part in reversed(_overlap(shape, other, place))])
        rank = place.world_group().index(place)
        own = {rank: outgoing.pop(rank)} if rank in outgoing else {}
        group.world_group.swap(outgoing, incoming)
        for other, part in (incoming | own).items():
            out[_target(shape, place.world_group()[other], place)] = part
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        return _Turned.apply(grad.contiguous(), ctx.group), None


def turned_elements(shape: tuple[int, int], place: MeshPlace) -> int:
    """Elements that the rank at ``place`` receives when B, of whole ``shape``, is transposed."""
    overlaps = [_overlap(shape, other, place) for other in place.world_group() if other != place]
    return sum(len(rows) * len(columns) for rows, columns in overlaps)


def _overlap(shape: tuple[int, int], source: MeshPlace, target: MeshPlace) -> tuple[range, range]:
    """Rows and columns of B that ``source`` has in B and ``target`` has in Bᵀ."""
    rows = _part(shape[0], source.rows, source.row), _part(shape[0], target.columns, target.column)
    columns = _part(shape[1], source.columns, source.column), _part(shape[1], target.rows, target.row)
    return _both(*rows), _both(*columns)


def _both(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _part(size: int, number: int, index: int) -> range:
    return range(size // number * index, size // number * (index + 1))


def _common(shape: tuple[int, int], source: MeshPlace, target: MeshPlace) -> tuple[slice, slice] | None:
    """The overlap's position in the block of ``source``; None if there is none."""
    rows, columns = _overlap(shape, source, target)
    if not rows or not columns:
        return None
    first = shape[0] // source.rows * source.row, shape[1] // source.columns * source.column
    return slice(rows.start - first[0], rows.stop - first[0]), slice(columns.start - first[1], columns.stop - first[1])


def _target(shape: tuple[int, int], source: MeshPlace, target: MeshPlace) -> tuple[slice, slice]:
    """The overlap's position in the transposed block of ``target``."""
    rows, columns = _overlap(shape, source, target)
    first = shape[1] // target.rows * target.row, shape[0] // target.columns * target.column
    return slice(columns.start - first[0], columns.stop - first[0]), slice(rows.start - first[1], rows.stop - first[1])
