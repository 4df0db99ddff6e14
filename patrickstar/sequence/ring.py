"""Blockwise attention while keys and values travel round a ring of ranks ([Note: blocks of attention]).

[Note: the ring] In turn i a rank has the keys and values of rank ``rank - i``; the next ones travel while it computes.
In backward the sums of dK and dV travel with their block, one turn behind it, and arrive at their owner last. Elements
sent by a rank, with M those of its K: 2 (N - 1) M forward, 2 (N - 1) M and 2 N M backward, the sums in float32.
"""

from __future__ import annotations

from typing import Any

import torch

from patrickstar.sequence.block import Partial, Rule, attend, attend_backward, sum_dtype
from patrickstar.sequence.group import SequenceGroup
from patrickstar.sequence.layout import Mode, Slice, slices_of_rank


class RingAttention(torch.autograd.Function):
    """Of this rank's queries to the keys of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: SequenceGroup, mode: Mode, rule: Rule
    ):
        """Tensors are [batch, heads, tokens of this rank, head_dim]; ``k`` and ``v`` may have fewer heads."""
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        found = Partial.nothing(q, v.shape[-1])
        travelling = [k, v]
        for turn in range(group.size):
            is_last = turn == group.size - 1
            coming = None if is_last else group.pass_on(travelling)
            for rows, columns, at in _blocks(group, mode, turn, q.shape[-2]):
                block_k, block_v = (as_many_heads(part[..., columns, :], q) for part in travelling)
                part = attend(q[..., rows, :], block_k, block_v, at, rule)
                if part is not None:
                    found.add(rows, part)
            if coming is not None:
                travelling = coming.wait()
        ctx.save_for_backward(q, k, v, found.out, found.lse)
        ctx.group, ctx.mode, ctx.rule = group, mode, rule
        return found.out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        """Gradients of this rank's queries, keys and values."""
        q, k, v, out, lse = ctx.saved_tensors
        group, mode, rule = ctx.group, ctx.mode, ctx.rule
        grad, dtype = grad.contiguous(), sum_dtype(q)
        delta = (grad.to(dtype) * out).sum(dim=-1)
        grad_q = torch.zeros(q.shape, dtype=dtype, device=q.device)
        travelling, sums = [k, v], None
        for turn in range(group.size):
            coming = None if turn == group.size - 1 else group.pass_on(travelling)
            own = [torch.zeros(part.shape, dtype=dtype, device=q.device) for part in (k, v)]
            for rows, columns, at in _blocks(group, mode, turn, q.shape[-2]):
                block_k, block_v = (as_many_heads(part[..., columns, :], q) for part in travelling)
                whole = Partial(out[..., rows, :], lse[..., rows])
                found = attend_backward(
                    grad[..., rows, :], whole, delta[..., rows], q[..., rows, :], block_k, block_v, at, rule
                )
                if found is not None:
                    grad_q[..., rows, :] += found[0]
                    for total, part in zip(own, found[1:], strict=True):
                        total[..., columns, :] += sum_of_heads(part, total)
            if sums is not None:  # of the ranks that had this block before
                own = [total.add_(part) for total, part in zip(own, sums.wait(), strict=True)]
            sums = group.pass_on(own)
            if coming is not None:
                travelling = coming.wait()
        grad_k, grad_v = sums.wait()  # type: ignore[union-attr]
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


def _blocks(
    group: SequenceGroup, mode: Mode, turn: int, local_length: int
) -> list[tuple[slice, slice, tuple[Slice, Slice]]]:
    """Rows of this rank, columns of the rank whose keys are here in this turn, and where both are in the sequence."""
    mine = slices_of_rank(group.rank, group.size, local_length, mode)
    others = slices_of_rank((group.rank - turn) % group.size, group.size, local_length, mode)
    return [
        (rows, columns, (queries, keys))
        for rows, queries in zip(_places(mine), mine, strict=True)
        for columns, keys in zip(_places(others), others, strict=True)
    ]


def _places(slices: tuple[Slice, ...]) -> list[slice]:
    places, begin = [], 0
    for part in slices:
        places.append(slice(begin, begin + part.length))
        begin += part.length
    return places


def as_many_heads(part: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Each head of ``part`` as often as heads of ``q`` use it."""
    times = q.shape[1] // part.shape[1]
    return part if times == 1 else part.repeat_interleave(times, dim=1)


def sum_of_heads(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What :func:`as_many_heads` did, backwards."""
    heads = like.shape[1]
    return part if part.shape[1] == heads else part.unflatten(1, (heads, -1)).sum(dim=2)
