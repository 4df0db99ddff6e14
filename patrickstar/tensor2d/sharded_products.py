"""Products of activations whose tokens are sharded over a line of ranks: the two of a pair of linear layers.

    wide = column_product(shard, first, line)          # [b, s/p, in], [out/p, in] -> [b, s, out/p]
    shard = row_product(wide, second, line)            # [b, s, in/p], [in/p, out] -> [b, s/p, out]

[Note: tokens of one rank at a time] Tokens that are gathered travel rank by rank, one ahead of their product, and sums
that are scattered leave rank by rank behind it, so that messages hide behind products as panels do. Inputs are kept
sharded, and gathered again in backward.

[Note: everybody to another one] Each rank begins with another one's tokens: in every exchange all ranks send to as many
others, one each, so that none is served or asked by all at once. What is added up is added in the order of ranks, so
exchanges changes no bit of them; the gradient of a weight, which each rank has alone, in that in which tokens come.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from patrickstar.ranks.exchanges import PendingExchange
from patrickstar.tensor2d.lines import Line
from patrickstar.tensor2d.panels import sum_dtype
from patrickstar.tensor2d.products import add_product

TOKENS = 1
"""The dimension of activations that is sharded."""


def column_product(hidden: torch.Tensor, weight: torch.Tensor, line: Line) -> torch.Tensor:
    """X Wᵀ [b, s, out/p] of shards [b, s/p, in] of X and the weight's [out/p, in]."""
    return _ColumnProduct.apply(hidden, weight, line)


def row_product(hidden: torch.Tensor, weight: torch.Tensor, line: Line) -> torch.Tensor:
    """This rank's tokens [b, s/p, out] of X W, of [b, s, in/p] and [in/p, out]."""
    return _RowProduct.apply(hidden, weight, line)


class _ColumnProduct(torch.autograd.Function):
    """X Wᵀ of shards [b, s/p, in] of X and [out/p, in]."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, line: Line) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.line = line
        parts = {rank: tokens @ weight.t() for rank, tokens in _gathered(hidden, line)}
        return torch.cat([parts[rank] for rank in range(line.size)], dim=TOKENS)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        grad_hidden, grad_weight = None, None
        if ctx.needs_input_grad[0]:
            grad_hidden = _scattered_product(grad, weight, ctx.line)
        if ctx.needs_input_grad[1]:
            total = _empty_gradient(weight)
            parts = grad.chunk(ctx.line.size, TOKENS)
            for index, (rank, tokens) in enumerate(_gathered(hidden, ctx.line)):
                add_product(total, parts[rank].flatten(0, 1).t(), tokens.flatten(0, 1), beta=min(index, 1))
            grad_weight = total.to(weight.dtype)
        return grad_hidden, grad_weight, None


class _RowProduct(torch.autograd.Function):
    """Shards [b, s/p, out] of X W, of [b, s, in/p] and [in/p, out]."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, line: Line) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.line = line
        return _scattered_product(hidden, weight, line)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grads_hidden = {}
        total = _empty_gradient(weight) if needs_weight else None
        tokens = hidden.chunk(ctx.line.size, TOKENS)
        for index, (rank, part) in enumerate(_gathered(grad, ctx.line)):
            if needs_hidden:
                grads_hidden[rank] = part @ weight.t()
            if total is not None:
                add_product(total, tokens[rank].flatten(0, 1).t(), part.flatten(0, 1), beta=min(index, 1))
        grad_hidden = torch.cat([grads_hidden[rank] for rank in range(ctx.line.size)], TOKENS) if needs_hidden else None
        return grad_hidden, None if total is None else total.to(weight.dtype), None


def _gathered(shard: torch.Tensor, line: Line) -> Iterator[tuple[int, torch.Tensor]]:
    """Each rank and its tokens, this one's first, there until the next but one come ([Note: tokens of one rank at a
    time], [Note: everybody to another one]).
    """
    mine = shard.contiguous()
    buffers = [torch.empty_like(mine) for _ in range(min(line.size - 1, 2))]
    if line.size > 1:
        line.meet()
    here = mine
    for step in range(line.size):
        if step + 1 < line.size:
            coming = buffers[step % 2]
            pending = line.swap_apart(-(step + 1), mine, coming, "panels")
        yield (line.rank + step) % line.size, here
        if step + 1 < line.size:
            pending.wait()
            here = coming


def _scattered_product(whole: torch.Tensor, matrix: torch.Tensor, line: Line) -> torch.Tensor:
    """The sum over ranks of ``whole @ matrix``, of which this rank has its tokens: the others' first, so that this
    rank's own are computed while the last sums are on their way ([Note: sums by their owner], [Note: everybody to
    another one]).
    """
    tokens = whole.chunk(line.size, TOKENS)
    summands: dict[int, torch.Tensor] = {}
    pending: PendingExchange | None = None
    for step in range(1, line.size):
        theirs = (tokens[(line.rank + step) % line.size] @ matrix).contiguous()
        if pending is None:
            line.meet()
        sender = (line.rank - step) % line.size
        summands[sender] = torch.empty_like(theirs)
        before, pending = pending, line.swap_apart(step, theirs, summands[sender], "partial sums")
        if before is not None:
            before.wait()
    summands[line.rank] = _wide_product(tokens[line.rank], matrix)
    if pending is not None:
        pending.wait()
    if line.size == 1:
        return summands[line.rank].to(whole.dtype)
    total = summands[0].to(sum_dtype(whole.dtype), copy=True)
    for rank in range(1, line.size):
        total += summands[rank]
    return total.to(whole.dtype)


def _wide_product(tokens: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Not rounded to 16 bits."""
    if sum_dtype(tokens.dtype) == tokens.dtype:
        return tokens @ matrix
    shape = (*tokens.shape[:-1], matrix.shape[1])
    total = torch.empty(shape, dtype=sum_dtype(tokens.dtype), device=tokens.device)
    add_product(total.flatten(0, 1), tokens.flatten(0, 1), matrix, beta=0)
    return total


def _empty_gradient(weight: torch.Tensor) -> torch.Tensor:
    """In which the products of all tokens are added up, in float32 for 16-bit types, and rounded once."""
    return torch.empty(weight.shape, dtype=sum_dtype(weight.dtype), device=weight.device)
