"""Blocks: attention of some queries to some keys, as a part of attention over the whole sequence.

A block's output comes with the log-sum-exp of its scores. By it, outputs of several blocks are merged into the result
of one softmax over all keys. Backward needs three things of a query: its output over all keys, the log-sum-exp over all
keys, and the inner product of output and gradient. So each block computes its part of all three gradients by itself
(Dao, *FlashAttention-2*, arXiv 2307.08691, section 3.1).

Precision: kernels return a block's output and gradients in the dtype of the inputs, and its log-sum-exp in float32.
Several blocks are summed in float32 and rounded once more at the end. A single block's result is returned as it is.
float64 inputs are computed in float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from patrickstar.sequence.dropout import Dropout
from patrickstar.sequence.kernel_choice import WHOLE_BLOCKS, AttentionDevice, Kernel, Question, choose
from patrickstar.sequence.kernels import KERNELS, Scoring, Whole, sum_dtype, token_major
from patrickstar.sequence.layout import Slice
from patrickstar.sequence.masking import Cover, Masking

# Blocks that need a mask or plain operations are computed in pieces: most pieces need no mask, or are not seen at all.
_TILE_TOKENS = 4096  # most queries, and most keys, of a piece
_TILE_MASK = 2**26  # elements of the mask that exist at a time
_TILE_SCORES = 2**24  # elements of scores that exist at a time with plain operations


@dataclasses.dataclass(frozen=True)
class Rule:
    """Scale, masking, dropout and soft cap of one attention."""

    scale: float
    masking: Masking
    dropout: Dropout | None
    softcap: float | None = None


@dataclasses.dataclass(frozen=True)
class Block:
    """Queries and keys that are contiguous in memory.

    Attributes:
        rows: range of the queries in the local tensors.
        columns: range of the keys in the local tensors.
        at: both ranges in ``masking``'s coordinates: the whole sequence, or (after :func:`merged`) the local tensors.
        masking: which keys a query sees.
    """

    rows: slice
    columns: slice
    at: tuple[Slice, Slice]
    masking: Masking

    @property
    def cover(self) -> Cover:
        """How much of the block is seen."""
        return self.masking.cover(*self.at)

    def part(self, rows: slice, columns: slice) -> Block:
        """A sub-block; ``rows`` and ``columns`` count from the block's first ones."""
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
    """Attention of some queries to the keys added so far."""

    def __init__(self, q: torch.Tensor, head_dim: int):
        self._q, self._shape = q, (*q.shape[:-1], head_dim)
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    def add(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merges attention of the queries ``rows`` to other keys.

        ``out`` [batch, heads, queries, head_dim] and ``lse`` [batch, heads, queries] are taken over. A first result for
        all queries is kept without copying.
        """
        if self._out is None and rows == slice(0, self._shape[-2]):
            self._out, self._lse = out, lse
            return
        so_far, so_far_lse = (part[:, :, rows] for part in self._wide())
        # Sigmoids do not overflow; if neither sees a key, the output stays 0.
        share = torch.sigmoid(lse - so_far_lse).nan_to_num_(0.0)
        so_far.lerp_(out.to(so_far.dtype), share.unsqueeze(-1))
        torch.logaddexp(so_far_lse, lse, out=so_far_lse)

    def result(self, sinks: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The output in q's dtype and the log-sum-exp; 0 and -inf for a query that sees no key.

        ``sinks`` [heads] are scores of one further key per head, whose value is 0: ``out * sigmoid(lse - sink)``.
        """
        if sinks is not None:
            out, lse = self._wide()
            sinks = sinks.to(lse.dtype)[:, None]
            self._out, self._lse = out * torch.sigmoid(lse - sinks).unsqueeze(-1), torch.logaddexp(lse, sinks)
        if self._out is None or self._lse is None:
            out, lse = self._wide()
        else:
            out, lse = self._out, self._lse
        return token_major(out.to(self._q.dtype)), lse

    def _wide(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp in the accumulation dtype."""
        dtype = sum_dtype(self._q)
        if self._out is None or self._lse is None:
            self._out = _zeros(self._q, self._shape)
            self._lse = self._q.new_full(self._shape[:-1], -torch.inf, dtype=dtype)
        self._out = self._out.to(dtype)
        return self._out, self._lse


def _zeros(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zeros in the accumulation dtype, in the memory order of [Note: token-major tensors]."""
    batch, heads, tokens, head_dim = shape
    return like.new_zeros((batch, tokens, heads, head_dim), dtype=sum_dtype(like)).transpose(1, 2)


def sinks_gradient(whole: Whole, sinks: torch.Tensor) -> torch.Tensor:
    """Gradient of ``sinks`` [heads]: the sum of ``-probability * (grad . out)`` over queries.

    ``out`` and ``lse`` are those that :meth:`Partial.result` returns with sinks.
    """
    grad, out, lse = whole
    delta = (grad.to(lse.dtype) * out).sum(dim=-1)
    probability = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    return -(probability * delta).sum(dim=(0, 2)).to(sinks.dtype)


class Total:
    """Accumulates a gradient. A single part is kept without copying."""

    def __init__(self, like: torch.Tensor):
        self._like = like
        self._first: tuple[slice, torch.Tensor] | None = None
        self._sum: torch.Tensor | None = None

    def add(self, places: slice, part: torch.Tensor) -> None:
        """Adds the part for the tokens ``places``: [batch, heads, tokens, head_dim]."""
        if self._first is None and self._sum is None:
            self._first = places, part
        else:
            self.wide()[:, :, places].add_(part)

    def add_to(self, other: torch.Tensor) -> None:
        """Adds the accumulated gradient to ``other``, of the same shape, in place."""
        if self._first is not None:
            other[:, :, self._first[0]].add_(self._first[1])
        elif self._sum is not None:
            other.add_(self._sum)

    def wide(self) -> torch.Tensor:
        """The gradient in the accumulation dtype."""
        if self._sum is None:
            self._sum = _zeros(self._like, self._like.shape)
            self.add_to(self._sum)
            self._first = None
        return self._sum

    def result(self) -> torch.Tensor:
        """The gradient in the dtype of its tensor."""
        if self._first is not None and self._first[1].shape == self._like.shape:
            return self._first[1].to(self._like.dtype)
        return self.wide().to(self._like.dtype)


def attend(found: Partial, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, rule: Rule) -> None:
    """Adds a block's attention to ``found``, the attention of ``q`` to earlier keys.

    ``q`` is [batch, heads, queries, head_dim]; ``k`` and ``v`` are [batch, key heads, keys, head_dim]. All have the
    memory order of [Note: token-major tensors].
    """
    for piece, kernel in _pieces(q, v, block, rule):
        columns = (part[:, :, piece.columns] for part in (k, v))
        found.add(piece.rows, *KERNELS[kernel].forward(q[:, :, piece.rows], *columns, _scoring(q, piece, rule)))


def attend_backward(
    totals: tuple[Total, Total, Total],
    whole: Whole,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block: Block,
    rule: Rule,
) -> None:
    """Adds a block's parts of the gradients.

    Args:
        totals: the gradients of ``q``, ``k`` and ``v``.
        whole: attention of ``q`` to all keys, as :meth:`Partial.result` returns it, and its gradient.
        q: as in :func:`attend`, like ``k``, ``v``, ``block`` and ``rule``.
    """
    for piece, kernel in _pieces(q, v, block, rule):
        of_queries = Whole(*(part[:, :, piece.rows] for part in whole)), q[:, :, piece.rows]
        of_keys = (part[:, :, piece.columns] for part in (k, v))
        found = KERNELS[kernel].backward(*of_queries, *of_keys, _scoring(q, piece, rule))
        for total, places, part in zip(totals, (piece.rows, piece.columns, piece.columns), found, strict=True):
            total.add(places, part)


def merged(blocks: Sequence[Sequence[Block]], rule: Rule) -> list[Block]:
    """Merges blocks into as few as possible for the same queries and keys; unseen blocks are left out.

    Args:
        blocks: one row per slice of the queries, with one block per slice of the keys, in memory order.
        rule: with dropout, which depends on positions in the whole sequence, blocks are not merged.
    """
    covers = [[block.cover for block in row] for row in blocks]
    if rule.dropout is None:
        if _is_diagonal(covers):
            return [_joined(blocks[0][0], blocks[-1][-1], Masking(causal=True))]
        blocks = _joined_runs(blocks)
    return [block for row in blocks for block in row if block.cover is not Cover.NONE]


def _is_diagonal(covers: list[list[Cover]]) -> bool:
    """Tests for causal attention over one run of slices: diagonal blocks on the diagonal, all below, none above."""
    return all(
        cover is (Cover.DIAGONAL if i == j else Cover.ALL if j < i else Cover.NONE)
        for i, row in enumerate(covers)
        for j, cover in enumerate(row)
    )


def _joined_runs(blocks: Sequence[Sequence[Block]]) -> list[list[Block]]:
    """Merges neighbours that are wholly seen: first within rows, then rows that see the same keys."""
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
    """One block from the corner of ``first`` to that of ``last``; ``masking`` uses local positions."""
    rows = slice(first.rows.start, last.rows.stop)
    columns = slice(first.columns.start, last.columns.stop)
    return Block(rows, columns, (Slice(rows.start, rows.stop), Slice(columns.start, columns.stop)), masking)


def _pieces(q: torch.Tensor, v: torch.Tensor, block: Block, rule: Rule) -> Iterator[tuple[Block, Kernel]]:
    """Pieces that one kernel call each computes, with their kernels."""
    device = AttentionDevice.of(q)

    def kernel_of(piece: Block) -> Kernel:
        lengths = piece.at[0].length, piece.at[1].length
        dropout_p = 0.0 if rule.dropout is None else rule.dropout.p
        dims = q.shape[-1], v.shape[-1]
        return choose(device, Question(q.dtype, dims, lengths, piece.cover, dropout_p, rule.softcap))

    if block.cover is Cover.NONE:
        return
    kernel = kernel_of(block)
    if block.cover in WHOLE_BLOCKS[kernel]:
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
    """Cuts a block into pieces, row by row."""
    queries, keys = (part.length for part in block.at)
    for row in range(0, queries, num_rows):
        for column in range(0, keys, num_columns):
            yield block.part(slice(row, min(row + num_rows, queries)), slice(column, min(column + num_columns, keys)))


def _scoring(q: torch.Tensor, piece: Block, rule: Rule) -> Scoring:
    mask = piece.masking.mask(*piece.at, q.device) if piece.cover is Cover.SOME else None
    factors = None
    if rule.dropout is not None:
        places = (torch.arange(part.start, part.stop, device=q.device) for part in piece.at)
        factors = rule.dropout.factors(q.shape[0], q.shape[1], *places, sum_dtype(q))
    return Scoring(rule.scale, piece.cover, mask, factors, rule.softcap)
