"""Ring attention: blockwise attention while keys and values travel round a ring of ranks.

In turn i a rank has the keys and values of rank ``rank - i``; the next ones travel during computation. In backward, the
sums of dK and dV travel with their block, one turn behind it, while the next block is computed. They begin at the rank
after the block's owner, which adds its own part last.

Elements sent per rank, with M elements in its K: 2 (N - 1) M in forward. Backward sends as many, and 2 (N - 1) M
float32 sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from patrickstar.sequence.block import Block, Partial, Rule, Total, attend, attend_backward, merged, sinks_gradient
from patrickstar.sequence.group import Exchange, SequenceGroup
from patrickstar.sequence.kernels import Whole, token_major
from patrickstar.sequence.layout import Mode, Slice, slices_of_rank


class RingAttention(torch.autograd.Function):
    """Attention of this rank's queries to the keys of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        group: SequenceGroup,
        mode: Mode,
        rule: Rule,
    ):
        """Tensors are [batch, heads, tokens of this rank, head_dim]; ``k`` and ``v`` may have fewer heads. ``sinks`` is
        [heads].
        """
        group.meet()
        q, k, v = token_major(q), token_major(k), token_major(v)
        found = Partial(q, v.shape[-1])
        travelling = [k, v]
        for turn in range(group.size):
            coming = None if turn == group.size - 1 else _pass_on(group, travelling)
            for block in blocks_of_turn(group, mode, turn, q.shape[-2], rule):
                attend(found, q, *travelling, block, rule)
            if coming is not None:
                travelling = _arrived(coming)
        out, lse = found.result(sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.group, ctx.mode, ctx.rule = group, mode, rule
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        """Gradients of this rank's queries, keys and values, and its part of that of the sinks."""
        q, k, v, sinks, out, lse = ctx.saved_tensors
        group, mode, rule = ctx.group, ctx.mode, ctx.rule
        group.meet()
        whole = Whole(token_major(grad), out, lse)
        grad_q, own = Total(q), [Total(k), Total(v)]
        travelling, sums = [k, v], None
        for turn in range(group.size):
            coming = None if turn == group.size - 1 else _pass_on(group, travelling)
            parts = own if turn == 0 else [Total(k), Total(v)]
            for block in blocks_of_turn(group, mode, turn, q.shape[-2], rule):
                attend_backward((grad_q, *parts), whole, q, *travelling, block, rule)
            if turn > 0:
                sums = _pass_on(group, _summed(parts, sums))
            if coming is not None:
                travelling = _arrived(coming)
        grad_k, grad_v = (
            (part.result() for part in own) if sums is None else (part.to(q.dtype) for part in _summed(own, sums))
        )
        grad_sinks = None if sinks is None else sinks_gradient(whole, sinks)
        return grad_q.result(), grad_k, grad_v, grad_sinks, None, None, None


def _summed(parts: Sequence[Total], sums: Exchange | None) -> list[torch.Tensor]:
    """Adds this rank's parts to the sums from the previous ranks; None: there were none."""
    if sums is None:
        return [part.wide() for part in parts]
    totals = _arrived(sums)
    for total, part in zip(totals, parts, strict=True):
        part.add_to(total)
    return totals


def _pass_on(group: SequenceGroup, tensors: Sequence[torch.Tensor]) -> Exchange:
    """Sends tensors in their memory order ([Note: token-major tensors])."""
    return group.pass_on([tensor.transpose(1, 2) for tensor in tensors])


def _arrived(exchange: Exchange) -> list[torch.Tensor]:
    return [tensor.transpose(1, 2) for tensor in exchange.wait()]


def blocks_of_turn(group: SequenceGroup, mode: Mode, turn: int, local_length: int, rule: Rule) -> list[Block]:
    """Blocks of this rank's queries and the keys present in this turn, merged where possible. Without windows,
    documents, padding and dropout there is at most one.
    """
    mine = slices_of_rank(group.rank, group.size, local_length, mode)
    others = slices_of_rank((group.rank - turn) % group.size, group.size, local_length, mode)
    blocks = [
        [
            Block(rows, columns, (queries, keys), rule.masking)
            for columns, keys in zip(_places(others), others, strict=True)
        ]
        for rows, queries in zip(_places(mine), mine, strict=True)
    ]
    return merged(blocks, rule)


def _places(slices: tuple[Slice, ...]) -> list[slice]:
    places, begin = [], 0
    for part in slices:
        places.append(slice(begin, begin + part.length))
        begin += part.length
    return places
