"""Panels of sharded matrices in transit along a mesh dimension, and partial sums on their way to their owner.

[Note: one panel ahead] Panel l + 1 is broadcast while panel l is multiplied. Partial sums of product l are sent while
product l + 1 is computed. Each has two buffers, so memory does not grow with the number of panels. Products on several
rows and columns work so, and embeddings' rows; orders.py describes meshes of one row or column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from patrickstar.ranks.exchanges import PendingExchange
from patrickstar.tensor2d.group import MeshGroup, MeshPlace
from patrickstar.tensor2d.lines import Line

_SHOWN_MESHES = 3


Cut = Literal["num_panels", "rows", "columns"]
"""A number of parts: the name of an attribute of :class:`~patrickstar.tensor2d.group.MeshPlace`."""


def check_divides(what: str, size: int, place: MeshPlace, by: Cut = "num_panels") -> None:
    """Raises ValueError unless the parts divide ``size``; the message names a size and meshes that would fit."""
    number = getattr(place, by)
    if size % number == 0:
        return
    parts = f"lcm({place.rows}, {place.columns}) = {number} panels" if by == "num_panels" else f"{number} {by}"
    nearest = max(round(size / number), 1) * number
    message = f"{what}: {size} cannot be cut into {parts} of a mesh of {place.rows} x {place.columns}; take {nearest}"
    meshes = [f"{rows} x {columns}" for rows, columns in meshes_that_divide(size, place, by)]
    if meshes:
        message += f", or a mesh of {' or '.join(meshes[:_SHOWN_MESHES])}"
    raise ValueError(message)


def meshes_that_divide(size: int, place: MeshPlace, by: Cut) -> list[tuple[int, int]]:
    """(rows, columns) of meshes of as many ranks that divide ``size``, nearest first."""
    pairs = [(rows, place.size // rows) for rows in range(1, place.size + 1) if place.size % rows == 0]
    fitting = [(rows, columns) for rows, columns in pairs if size % getattr(MeshPlace(rows, columns), by) == 0]
    return sorted(fitting, key=lambda pair: abs(pair[0] - place.rows) + abs(pair[1] - place.columns))


class Panels:
    """All-gathers a matrix, sharded along ``dim``, panel by panel.

    Args:
        block: this rank's block, two-dimensional.
        dim: the dimension along which panels are cut.
        num_panels: of the whole matrix; a multiple of the group's ranks.
        line: the ranks that hold the blocks.
    """

    def __init__(self, block: torch.Tensor, dim: int, num_panels: int, line: Line):
        self._block, self._dim, self._line = block, dim, line
        self._per_rank = num_panels // line.size
        self._width = block.shape[dim] // self._per_rank
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._coming: dict[int, tuple[torch.Tensor, PendingExchange | None]] = {}

    def begin(self, index: int) -> None:
        """Starts the broadcast of panel ``index``. The panel two before it must no longer be in use."""
        owner, local = divmod(index, self._per_rank)
        if owner == self._line.rank:
            panel = self._block.narrow(self._dim, local * self._width, self._width)
        if self._line.size == 1:
            self._coming[index] = panel, None
            return
        if index == 0:
            self._line.meet()
        if owner != self._line.rank or not panel.is_contiguous():
            buffer = self._buffer(index)
            panel = buffer if owner != self._line.rank else buffer.copy_(panel)
        self._coming[index] = panel, self._line.broadcast(panel, owner)

    def take(self, index: int) -> torch.Tensor:
        """Waits for panel ``index`` and returns it."""
        panel, pending = self._coming.pop(index)
        if pending is not None:
            pending.wait()
        return panel

    def _buffer(self, index: int) -> torch.Tensor:
        found = self._buffers[index % 2]
        if found is None:
            shape = list(self._block.shape)
            shape[self._dim] = self._width
            found = self._buffers[index % 2] = self._block.new_empty(shape)
        return found


def travelling(*operands: Panels, num_panels: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields the panels of all operands, index by index, while the next ones arrive ([Note: one panel ahead])."""
    for operand in operands:
        operand.begin(0)
    for index in range(num_panels):
        if index + 1 < num_panels:
            for operand in operands:
                operand.begin(index + 1)
        yield tuple(operand.take(index) for operand in operands)


class PartialSums:
    """Reduce-scatters a sharded matrix, panel by panel ([Note: sums by their owner]).

    Args:
        out: this rank's block of the sum; all of it is written.
        dim: the dimension along which panels are cut.
        num_panels: of the whole matrix; a multiple of the group's ranks.
        line: the ranks; each has a summand and keeps a block.
    """

    def __init__(self, out: torch.Tensor, dim: int, num_panels: int, line: Line):
        self._out, self._dim, self._line = out, dim, line
        self._per_rank = num_panels // line.size
        self._width = out.shape[dim] // self._per_rank
        self._last: tuple[PendingExchange, Callable[[], None]] | None = None

    def keeps(self, index: int) -> bool:
        """True if this rank keeps the sum of panel ``index``."""
        return index // self._per_rank == self._line.rank

    def add(self, index: int, mine: torch.Tensor) -> None:
        """Adds this rank's summand of panel ``index``: in :func:`sum_dtype` if it keeps the sum, else in ``out``'s
        dtype.
        """
        owner, local = divmod(index, self._per_rank)
        if self._line.size == 1:
            self._write(local, mine)
            return
        if index == 0:
            self._line.meet()
        before = self._last
        if owner == self._line.rank:
            incoming = [
                torch.empty(mine.shape, dtype=self._out.dtype, device=mine.device) for _ in range(self._line.size - 1)
            ]
            self._last = self._line.collect(incoming), lambda: self._add_up(local, mine, incoming)
        else:
            mine = mine.contiguous()
            self._last = self._line.send(mine, owner), lambda: None
        self._end(before)

    def finish(self) -> torch.Tensor:
        """Waits for all messages and returns ``out``."""
        before, self._last = self._last, None
        self._end(before)
        return self._out

    def _end(self, begun: tuple[PendingExchange, Callable[[], None]] | None) -> None:
        if begun is not None:
            pending, add_up = begun
            pending.wait()
            add_up()

    def _add_up(self, local: int, mine: torch.Tensor, incoming: list[torch.Tensor]) -> None:
        parts = [*incoming[: self._line.rank], mine, *incoming[self._line.rank :]]
        total = parts[0].to(mine.dtype, copy=True)
        for part in parts[1:]:
            total += part
        self._write(local, total)

    def _write(self, local: int, total: torch.Tensor) -> None:
        self._out.narrow(self._dim, local * self._width, self._width).copy_(total)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Accumulation dtype: float32 for 16-bit types, else the operands' own."""
    return torch.promote_types(dtype, torch.float32)


def save_operands(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> None:
    """Saves the two operands of a product for backward. Each is saved only if the other's gradient is needed, so a
    frozen weight keeps no activations.
    """
    needs_a, needs_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None)


def check_operands(what: str, a: torch.Tensor, b: torch.Tensor, group: MeshGroup, same: tuple[int, int]) -> None:
    """Raises ValueError unless the blocks are matrices of one dtype that can be multiplied: dimension ``same[0]`` of a
    equals ``same[1]`` of b in the whole matrices.
    """
    if a.dim() != 2 or b.dim() != 2 or a.dtype != b.dtype:
        raise ValueError(
            f"{what}: blocks of shapes {list(a.shape)} and {list(b.shape)}, {a.dtype} and {b.dtype}; give two matrices "
            "of one dtype"
        )
    over = (group.place.rows, group.place.columns)
    whole = [a.shape[same[0]] * over[same[0]], b.shape[same[1]] * over[same[1]]]
    if whole[0] != whole[1]:
        raise ValueError(
            f"{what}: blocks of shapes {list(a.shape)} and {list(b.shape)} on a mesh of {over[0]} x {over[1]} are of "
            f"matrices whose common dimension is {whole[0]} and {whole[1]}"
        )


def check_bias(what: str, bias: torch.Tensor | None, size: int, dtype: torch.dtype) -> None:
    """Raises ValueError unless the bias is None or has ``size`` elements of ``dtype``."""
    if bias is not None and (bias.shape != (size,) or bias.dtype != dtype):
        raise ValueError(
            f"{what}: a bias of shape {list(bias.shape)} and {bias.dtype}; give this rank's {size} elements of {dtype}"
        )
