"""Attention of some queries to some keys, as a part of attention over the whole sequence.

[Note: blocks of attention] A block's output comes with the log-sum-exp of its scores, by which outputs of several
blocks are merged into what one softmax over all keys gives. Backward needs of a query only its output over all keys,
the log-sum-exp over all keys and the inner product of output and gradient, so that each block gives its part of all
three gradients by itself (Dao, *FlashAttention-2*, arXiv 2307.08691, section 3.1).

Precision: kernels give a block's output and its parts of the gradients in the dtype of the inputs, its log-sum-exp in
float32. Where there are several blocks, outputs and gradients are summed in float32 and rounded once more at the end;
where there is one, what the kernel gives is the result. (float64 for float64 inputs.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from patrickstar.sequence.dropout import Dropout
from patrickstar.sequence.kernel_choice import Device, Kernel, Question, choose
from patrickstar.sequence.kernels import KERNELS, Scoring, sum_dtype, token_major
from patrickstar.sequence.layout import Slice
from patrickstar.sequence.masking import Cover, Masking

# A block of which a mask says what is seen, or which plain operations compute, is computed in parts: most of them need
# no mask, or are not seen at all.
_TILE_TOKENS = 4096  # queries, and keys, of a part at most
_TILE_MASK = 2**26  # elements of the mask that exist at a time
_TILE_SCORES = 2**24  # elements of scores that exist at a time where plain operations compute


@dataclasses.dataclass(frozen=True)
class Rule:
    """What all blocks of one attention share."""

    scale: float
    masking: Masking
    dropout: Dropout | None


@dataclasses.dataclass(frozen=True)
class Block:
    """Queries and keys that are neighbours in memory.

    Attributes:
        rows: the queries, of those that are here.
        columns: the keys, of those that are here.
        at: where both are in what ``masking`` speaks of: the whole sequence, or (:func:`merged`) what is here.
        masking: which of the keys a query sees.
    """

    rows: slice
    columns: slice
    at: tuple[Slice, Slice]
    masking: Masking

    @property
    def cover(self) -> Cover:
        """How much of it is seen."""
        return self.masking.cover(*self.at)

    def part(self, rows: slice, columns: slice) -> Block:
        """Some of its queries and keys, counted from its first ones."""
        queries, keys = self.at
        return Block(
            _within(self.rows, rows),
            _within(self.columns, columns),
            (
                Slice(queries.start + rows.start, queries.start + rows.stop),
                Slice(keys.start + columns.start, keys.start + columns.stop),
            ),
            self.masking,
        )


def _within(whole: slice, part: slice) -> slice:
    return slice(whole.start + part.start, whole.start + part.stop)


class Partial:
    """Attention of some queries to the keys so far, at first to none."""

    def __init__(self, q: torch.Tensor, head_dim: int):
        self._q, self._shape = q, (*q.shape[:-1], head_dim)
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    def add(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merges, for these queries, attention to other keys: ``out`` [batch, heads, queries, head_dim] and ``lse``
        [batch, heads, queries], which are not used elsewhere. The first that is for all queries is kept as it is.
        """
        if self._out is None and rows == slice(0, self._shape[-2]):
            self._out, self._lse = out, lse
            return
        so_far, so_far_lse = (part[:, :, rows] for part in self._wide())
        # As sigmoids, which do not overflow; where neither sees a key, the output stays 0.
        share = torch.sigmoid(lse - so_far_lse).nan_to_num_(0.0)
        so_far.lerp_(out.to(so_far.dtype), share.unsqueeze(-1))
        torch.logaddexp(so_far_lse, lse, out=so_far_lse)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, of q's dtype, and the log-sum-exp; 0 and -inf for a query that sees nothing."""
        if self._out is None or self._lse is None:
            out, lse = self._wide()
        else:
            out, lse = self._out, self._lse
        return token_major(out.to(self._q.dtype)), lse

    def _wide(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both in the dtype of sums."""
        dtype = sum_dtype(self._q)
        if self._out is None or self._lse is None:
            self._out = _zeros(self._q, self._shape)
            self._lse = self._q.new_full(self._shape[:-1], -torch.inf, dtype=dtype)
        self._out = self._out.to(dtype)
        return self._out, self._lse


def _zeros(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """In the dtype of sums, in the order of [Note: token-major tensors]."""
    batch, heads, tokens, head_dim = shape
    return like.new_zeros((batch, tokens, heads, head_dim), dtype=sum_dtype(like)).transpose(1, 2)


class Total:
    """The sum of parts of a gradient, at first 0. One part alone is kept as it is."""

    def __init__(self, like: torch.Tensor):
        self._like = like
        self._first: tuple[slice, torch.Tensor] | None = None
        self._sum: torch.Tensor | None = None

    def add(self, places: slice, part: torch.Tensor) -> None:
        """Of these tokens: [batch, heads, tokens, head_dim]."""
        if self._first is None and self._sum is None:
            self._first = places, part
        else:
            self.wide()[:, :, places].add_(part)

    def add_to(self, other: torch.Tensor) -> None:
        """To that of the same tokens, in its place."""
        if self._first is not None:
            other[:, :, self._first[0]].add_(self._first[1])
        elif self._sum is not None:
            other.add_(self._sum)

    def wide(self) -> torch.Tensor:
        """In the dtype of sums."""
        if self._sum is None:
            self._sum = _zeros(self._like, self._like.shape)
            self.add_to(self._sum)
            self._first = None
        return self._sum

    def result(self) -> torch.Tensor:
        """Of the dtype of what it is the gradient of."""
        if self._first is not None and self._first[1].shape == self._like.shape:
            return self._first[1].to(self._like.dtype)
        return self.wide().to(self._like.dtype)


def attend(found: Partial, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, rule: Rule) -> None:
    """Adds a block's part to ``found``, attention of ``q`` to the keys so far.

    ``q`` is [batch, heads, queries, head_dim], ``k`` and ``v`` are [batch, key heads, keys, head_dim], all in the order
    of [Note: token-major tensors].
    """
    for piece, kernel in _pieces(q, v, block, rule):
        columns = (part[:, :, piece.columns] for part in (k, v))
        found.add(piece.rows, *KERNELS[kernel].forward(q[:, :, piece.rows], *columns, _scoring(q, piece, kernel, rule)))


def attend_backward(
    totals: tuple[Total, Total, Total],
    grad: torch.Tensor,
    whole: tuple[torch.Tensor, torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block: Block,
    rule: Rule,
) -> None:
    """Adds a block's parts of the gradients.

    Args:
        totals: the gradients of ``q``, ``k`` and ``v``.
        grad: of the output over all keys.
        whole: that output and the log-sum-exp, as :meth:`Partial.result` gives them.
        q: as in :func:`attend`, like ``k``, ``v``, ``block`` and ``rule``.
    """
    for piece, kernel in _pieces(q, v, block, rule):
        of_queries = (part[:, :, piece.rows] for part in (grad, *whole, q))
        of_keys = (part[:, :, piece.columns] for part in (k, v))
        found = KERNELS[kernel].backward(*of_queries, *of_keys, _scoring(q, piece, kernel, rule))
        for total, places, part in zip(totals, (piece.rows, piece.columns, piece.columns), found, strict=True):
            total.add(places, part)


def merged(blocks: Sequence[Sequence[Block]], rule: Rule) -> list[Block]:
    """As few blocks for the same queries and keys, those that nobody sees left out.

    Args:
        blocks: a row for each slice of the queries, in it one for each slice of the keys, as they lie in memory.
        rule: with dropout, which asks where each element is in the whole sequence, blocks stay as they are.
    """
    covers = [[block.cover for block in row] for row in blocks]
    if rule.dropout is None:
        if _is_diagonal(covers):
            return [_joined(blocks[0][0], blocks[-1][-1], Masking(causal=True))]
        blocks = _joined_runs(blocks)
    return [block for row in blocks for block in row if block.cover is not Cover.NONE]


def _is_diagonal(covers: list[list[Cover]]) -> bool:
    """Whether queries and keys are the same slices in their order, and a query sees what is before it and itself."""
    return all(
        cover is (Cover.DIAGONAL if i == j else Cover.ALL if j < i else Cover.NONE)
        for i, row in enumerate(covers)
        for j, cover in enumerate(row)
    )


def _joined_runs(blocks: Sequence[Sequence[Block]]) -> list[list[Block]]:
    """Neighbours that are wholly seen become one: first in each row, then rows of which the same keys are seen."""
    found: list[list[Block]] = []
    for row in blocks:
        runs: list[Block] = []
        for block in row:
            if runs and runs[-1].cover is block.cover is Cover.ALL:
                runs[-1] = _joined(runs[-1], block, Masking())
            else:
                runs.append(block)
        runs = [block for block in runs if block.cover is not Cover.NONE]
        above = found[-1] if found else []
        alike = [(one.cover, one.columns) for one in above] == [(one.cover, one.columns) for one in runs]
        if runs and alike and all(one.cover is Cover.ALL for one in runs):
            found[-1] = [_joined(one, other, Masking()) for one, other in zip(above, runs, strict=True)]
        else:
            found.append(runs)
    return found


def _joined(first: Block, last: Block, masking: Masking) -> Block:
    """From one corner to the other, of which ``masking`` says by places in memory what is seen."""
    rows = slice(first.rows.start, last.rows.stop)
    columns = slice(first.columns.start, last.columns.stop)
    return Block(rows, columns, (Slice(rows.start, rows.stop), Slice(columns.start, columns.stop)), masking)


def _pieces(q: torch.Tensor, v: torch.Tensor, block: Block, rule: Rule) -> Iterator[tuple[Block, Kernel]]:
    """What is computed by one call each, and by which kernel."""
    device = Device.of(q)

    def kernel_of(piece: Block) -> Kernel:
        lengths = piece.at[0].length, piece.at[1].length
        dropout_p = 0.0 if rule.dropout is None else rule.dropout.p
        return choose(device, Question(q.dtype, (q.shape[-1], v.shape[-1]), lengths, piece.cover, dropout_p))

    if block.cover is Cover.NONE:
        return
    kernel = kernel_of(block)
    if kernel is not Kernel.PLAIN and block.cover is not Cover.SOME:
        yield block, kernel
        return
    columns = min(_TILE_TOKENS, block.at[1].length)
    if kernel is Kernel.PLAIN:
        rows = _TILE_SCORES // (q.shape[0] * q.shape[1] * columns)
    else:
        rows = _TILE_MASK // (columns * (1 if block.masking.padding is None else q.shape[0]))
    for piece in _tiles(block, max(1, min(rows, _TILE_TOKENS)), columns):
        if piece.cover is not Cover.NONE:
            yield piece, kernel_of(piece)


def _tiles(block: Block, num_rows: int, num_columns: int) -> Iterator[Block]:
    """Neighbours share their rows."""
    queries, keys = (part.length for part in block.at)
    for row in range(0, queries, num_rows):
        for column in range(0, keys, num_columns):
            yield block.part(slice(row, min(row + num_rows, queries)), slice(column, min(column + num_columns, keys)))


def _scoring(q: torch.Tensor, piece: Block, kernel: Kernel, rule: Rule) -> Scoring:
    mask = piece.masking.mask(*piece.at, q.device) if piece.cover is Cover.SOME else None
    factors = None
    if rule.dropout is not None:
        places = (torch.arange(part.start, part.stop, device=q.device) for part in piece.at)
        factors = rule.dropout.factors(q.shape[0], q.shape[1], *places, sum_dtype(q))
    return Scoring(rule.scale, piece.cover, mask, factors)
