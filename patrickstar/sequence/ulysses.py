"""All-to-all between token shards and head shards.

With fewer key heads than ranks, each head of K and V goes to all ranks that have a query head using it. Their gradients
are summed on the way back.
"""

from __future__ import annotations

from typing import Any

import torch

from patrickstar.sequence.division import exchanged
from patrickstar.sequence.group import HybridGroup, SequenceGroup

Heads = tuple[tuple[int, ...], ...]
"""The heads of each rank."""


class TokensForHeads(torch.autograd.Function):
    """[batch, heads, tokens of this rank, head_dim] to [batch, heads of this rank, tokens of all, head_dim]. Rank i
    gets the heads ``heads_of[i]``, equally many; several ranks may get the same one.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: SequenceGroup | HybridGroup, heads_of: Heads):
        """Sends each rank its heads."""
        ctx.group, ctx.heads_of, ctx.num_heads = group, heads_of, tensor.shape[1]
        return torch.cat(exchanged([tensor[:, list(heads)] for heads in heads_of], group), dim=2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        """Returns to each rank its tokens' gradients of all heads; those of a shared head are summed."""
        parts = exchanged(grad.chunk(ctx.group.size, dim=2), ctx.group)
        batch, _, tokens, head_dim = parts[0].shape
        whole = grad.new_zeros((batch, ctx.num_heads, tokens, head_dim))
        for heads, part in zip(ctx.heads_of, parts, strict=True):
            whole.index_add_(1, torch.tensor(heads, device=grad.device), part)
        return whole, None, None


class HeadsForTokens(torch.autograd.Function):
    """[batch, heads of this rank, tokens of all, head_dim] to [batch, heads, tokens of this rank, head_dim]."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: SequenceGroup | HybridGroup):
        """Heads are in rank order."""
        ctx.group = group
        return torch.cat(exchanged(tensor.chunk(group.size, dim=2), group), dim=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        """The reverse all-to-all."""
        return torch.cat(exchanged(grad.chunk(ctx.group.size, dim=1), ctx.group), dim=2), None


def query_heads(num_heads: int, size: int) -> Heads:
    """The query heads of each rank.

    Raises:
        ValueError: the heads cannot be divided among so many ranks.
    """
    if num_heads % size:
        raise ValueError(
            f"ulysses: {num_heads} heads cannot be divided among {size} ranks; give a number of ranks that divides "
            "them, or use mode ring, zigzag or hybrid"
        )
    each = num_heads // size
    return tuple(tuple(range(rank * each, (rank + 1) * each)) for rank in range(size))


def repeated_heads(num_heads: int, size: int) -> Heads:
    """Like :func:`query_heads`, for any number of ranks: the last ranks may get first heads once more, so that all have
    equally many.
    """
    each = -(-num_heads // size)
    return tuple(tuple(head % num_heads for head in range(rank * each, (rank + 1) * each)) for rank in range(size))


def key_heads(heads_of: Heads, share: int) -> Heads:
    """The key heads of each rank: those that its query heads use. If key heads would be used by unequal numbers of
    query heads, every query head gets its own copy.

    Args:
        heads_of: the query heads of each rank, as :func:`query_heads` or :func:`repeated_heads` returns them.
        share: query heads of one key head.
    """
    each = len(heads_of[0])
    if each % share and share % each:
        return tuple(tuple(head // share for head in heads) for heads in heads_of)
    return tuple(tuple(dict.fromkeys(head // share for head in heads)) for heads in heads_of)
