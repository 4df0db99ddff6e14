"""All-to-all between token shards and head shards.

With fewer key heads than ranks, each head of K and V goes to all ranks that have a query head using it. Their gradients
are summed on the way back.
"""

from __future__ import annotations

from typing import Any

import torch

from patrickstar.sequence.group import SequenceGroup


class TokensForHeads(torch.autograd.Function):
    """[batch, heads, tokens of this rank, head_dim] to [batch, heads of this rank, tokens of all, head_dim]. Rank i
    gets the heads ``heads_of[i]``, equally many; several ranks may get the same one.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: SequenceGroup, heads_of: tuple[tuple[int, ...], ...]):
        """Sends each rank its heads."""
        ctx.group, ctx.heads_of, ctx.num_heads = group, heads_of, tensor.shape[1]
        group.meet()
        parts = [tensor[:, list(heads)] for heads in heads_of]
        return torch.cat(group.all_to_all(parts), dim=2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        """Returns to each rank its tokens' gradients of all heads; those of a shared head are summed."""
        ctx.group.meet()
        parts = ctx.group.all_to_all(list(grad.chunk(ctx.group.size, dim=2)))
        batch, _, tokens, head_dim = parts[0].shape
        whole = grad.new_zeros((batch, ctx.num_heads, tokens, head_dim))
        for heads, part in zip(ctx.heads_of, parts, strict=True):
            whole.index_add_(1, torch.tensor(heads, device=grad.device), part)
        return whole, None, None


class HeadsForTokens(torch.autograd.Function):
    """[batch, heads of this rank, tokens of all, head_dim] to [batch, heads, tokens of this rank, head_dim]."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: SequenceGroup):
        """Heads are in rank order."""
        ctx.group = group
        group.meet()
        return torch.cat(group.all_to_all(list(tensor.chunk(group.size, dim=2))), dim=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        """The reverse all-to-all."""
        ctx.group.meet()
        return torch.cat(ctx.group.all_to_all(list(grad.chunk(ctx.group.size, dim=1))), dim=2), None


def query_heads(num_heads: int, size: int) -> tuple[tuple[int, ...], ...]:
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


def key_heads(num_heads: int, num_key_heads: int, size: int) -> tuple[tuple[int, ...], ...]:
    """The key heads of each rank: those that its query heads use. If key heads would be used by unequal numbers of
    query heads, every query head gets its own copy.
    """
    share, each = num_heads // num_key_heads, num_heads // size  # query heads of a key head, and of a rank
    of_queries = query_heads(num_heads, size)
    if each % share and share % each:
        return tuple(tuple(head // share for head in heads) for heads in of_queries)
    return tuple(tuple(dict.fromkeys(head // share for head in heads)) for heads in of_queries)
