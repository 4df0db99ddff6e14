"""Embeddings on a mesh.

A table [v/r, h/c] is not moved. Each rank gets the tokens of the other ranks of its column. It looks up those in its
range of the vocabulary, and sends the rows to the rank that has the tokens. It sends (r - 1) / (r c) of the
activations. The published algorithm sends as much of the table, which has more rows than a batch has tokens. Nothing is
rounded: one summand per token is non-zero.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from patrickstar.tensor2d.division import Placement, Split
from patrickstar.tensor2d.group import MeshGroup
from patrickstar.tensor2d.layer import Layer2D
from patrickstar.tensor2d.panels import Panels, PartialSums, check_divides, sum_dtype, travelling
from patrickstar.tensor2d.sums import replicated


def padded_vocabulary(size: int, group: MeshGroup) -> int:
    """The least number of rows >= ``size`` that is a multiple of the panels."""
    panels = group.place.num_panels
    return -(-size // panels) * panels


class Embedding2D(Layer2D):
    """``torch.nn.Embedding``: tokens [b/r, ...] -> activations [b/r, ..., h/c].

    The table is sharded into r x c blocks, its rows padded with zeros to a multiple of lcm(r, c).

    Args:
        num_embeddings: rows of the whole table.
        features: h; columns divide it.
        group: the mesh.
        padding_idx: token whose row gets no gradient.
        factor: of the rows, rounded to the table's dtype.
        dtype: of the table.
        device: of the table.

    Raises:
        ValueError: columns do not divide the features.
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        group: MeshGroup,
        *,
        padding_idx: int | None = None,
        factor: float = 1.0,
        dtype: torch.dtype | None = None,
        device: object = None,
    ):
        super().__init__(group)
        place = group.place
        check_divides(f"Embedding2D({num_embeddings}, {features}): features", features, place, "columns")
        self.num_embeddings, self.features, self.padding_idx = num_embeddings, features, padding_idx
        self.factor = factor
        padded = padded_vocabulary(num_embeddings, group)
        placement = Placement(Split.BLOCKS, padded_to=padded)
        self.add_parameter("weight", (padded // place.rows, features // place.columns), placement, dtype, device)
        self.whole_rows["weight"] = num_embeddings
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws values as ``torch.nn.Embedding`` does, each rank its own block; zeros after the vocabulary."""
        self.weight.normal_()
        self.clear_padding()
        first = self.group.place.row * self.weight.shape[0]
        if self.padding_idx is not None and 0 <= self.padding_idx - first < self.weight.shape[0]:
            self.weight[self.padding_idx - first] = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [b/r, ...] -> [b/r, ..., h/c].

        Raises:
            ValueError: a token on the CPU is outside the table.
        """
        if tokens.device.type == "cpu" and tokens.numel():
            least, most = tokens.min().item(), tokens.max().item()
            if least < 0 or most >= self.num_embeddings:
                raise ValueError(
                    f"Embedding2D: tokens are {least} to {most}, the table has {self.num_embeddings} rows; give 0 to "
                    f"{self.num_embeddings - 1}"
                )
        found = _Lookup.apply(self.weight, tokens.reshape(-1), self.group, self.padding_idx)
        return _times(found.view(*tokens.shape, -1), self.factor)

    def extra_repr(self) -> str:
        """Sizes of the whole table."""
        return f"{self.num_embeddings}, {self.features}"


class SmallEmbedding2D(Layer2D):
    """``torch.nn.Embedding`` of a small table, such as positions. Features are sharded over columns; rows replicate
    [number, h/c].

    Raises:
        ValueError: columns do not divide the features.
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        group: MeshGroup,
        *,
        padding_idx: int | None = None,
        factor: float = 1.0,
        dtype: torch.dtype | None = None,
        device: object = None,
    ):
        super().__init__(group)
        columns = group.place.columns
        check_divides(f"SmallEmbedding2D({num_embeddings}, {features}): features", features, group.place, "columns")
        self.padding_idx, self.factor = padding_idx, factor
        self.add_parameter("weight", (num_embeddings, features // columns), Placement(Split.COLUMNS), dtype, device)
        torch.nn.init.normal_(self.weight)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        """int64 [...] -> [..., h/c]."""
        weight = replicated(self.weight, self.group.along_rows)
        return _times(torch.nn.functional.embedding(index, weight, self.padding_idx), self.factor)


def _times(rows: torch.Tensor, factor: float) -> torch.Tensor:
    return rows if factor == 1.0 else rows * _rounded(factor, rows.dtype)


@functools.cache
def _rounded(factor: float, dtype: torch.dtype) -> float:
    return torch.tensor(factor, dtype=dtype, device="cpu").item()


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, table: torch.Tensor, tokens: torch.Tensor, group: MeshGroup, padding_idx: int | None
    ) -> torch.Tensor:
        line = group.along_rows
        first = line.rank * table.shape[0]
        everyones = line.gather(tokens)
        out = table.new_empty(len(tokens), table.shape[1])
        sums = PartialSums(out, 0, line.size, line)
        for rank, theirs in enumerate(everyones):
            rows = _rows_here(theirs, first, table.shape[0], None)
            is_here = rows < table.shape[0]
            sums.add(rank, torch.where(is_here[:, None], table[torch.where(is_here, rows, 0)], 0.0))
        ctx.save_for_backward(*everyones)
        ctx.line, ctx.shape, ctx.first, ctx.padding_idx = line, table.shape, first, padding_idx
        return sums.finish()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        everyones, line = ctx.saved_tensors, ctx.line
        total = grad.new_zeros(ctx.shape, dtype=sum_dtype(grad.dtype))
        panels = Panels(grad.contiguous(), 0, line.size, line)
        for theirs, (part,) in zip(everyones, travelling(panels, num_panels=line.size), strict=True):
            rows = _rows_here(theirs, ctx.first, ctx.shape[0], ctx.padding_idx)
            # Tokens of other ranks map to an additional row, which is dropped.
            found = torch.ops.aten.embedding_dense_backward(
                part.to(total.dtype), rows, ctx.shape[0] + 1, ctx.shape[0], False
            )
            total += found[:-1]
        return total.to(grad.dtype), None, None, None


def _rows_here(tokens: torch.Tensor, first: int, number: int, padding_idx: int | None) -> torch.Tensor:
    """Local row of each token; ``number`` for tokens whose row is elsewhere."""
    rows = tokens - first
    is_here = (rows >= 0) & (rows < number)
    if padding_idx is not None:
        is_here &= tokens != padding_idx
    return torch.where(is_here, rows, number)
