"""Ring self-attention as published: whole rows of scores; keys, then values, travel round the ring.

Li et al., arXiv 2105.13120, section 3.2. The scores of a rank's tokens take batch x heads x L / N x L elements and are
kept for backward. So this mode is for comparison, and for lengths at which they fit.

Elements sent per rank, with M elements in its K: 2 (N - 1) M in forward. Backward sends V and K again, 2 (N - 1) M, and
2 N M float32 sums of dV and dK. (The authors' code all-reduces whole dV and dK and keeps a slice.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from patrickstar.sequence.block import Rule
from patrickstar.sequence.group import SequenceGroup
from patrickstar.sequence.kernels import as_many_heads, soft_cap_, sum_dtype, sum_of_heads
from patrickstar.sequence.layout import Mode, slices_of_rank
from patrickstar.sequence.masking import Cover


class RingSelfAttention(torch.autograd.Function):
    """Attention of this rank's queries to the keys of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        group: SequenceGroup,
        rule: Rule,
    ):
        """Tensors are [batch, heads, tokens of this rank, head_dim]; ``k`` and ``v`` may have fewer heads. ``sinks`` is
        [heads].
        """
        group.meet()
        dtype, length = sum_dtype(q), q.shape[-2]
        scores = q.new_empty((*q.shape[:-1], length * group.size), dtype=dtype)

        def score(columns: slice, part: torch.Tensor) -> None:
            torch.matmul(q.to(dtype), as_many_heads(part, q).to(dtype).transpose(-1, -2), out=scores[..., columns])

        _go_round(group, k, score)
        scores *= rule.scale
        slope = None if rule.softcap is None else soft_cap_(scores, rule.softcap)
        queries, everything = _places(group, length)
        slices = _slices(group, length)
        if rule.masking.cover(*slices) is not Cover.ALL:
            scores.masked_fill_(~rule.masking.mask(*slices, q.device), -torch.inf)
        probabilities = torch.softmax(scores, dim=-1).nan_to_num_(0.0)  # a query may see no key
        if sinks is not None:
            lse = torch.logsumexp(scores, dim=-1, keepdim=True)
            probabilities *= torch.sigmoid(lse - sinks.to(dtype)[:, None, None])
        factors = _factors(q, rule, queries, everything)
        dropped = probabilities if factors is None else probabilities * factors
        out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype, device=q.device)

        def weigh(columns: slice, part: torch.Tensor) -> None:
            out.add_(dropped[..., columns] @ as_many_heads(part, q).to(dtype))

        _go_round(group, v, weigh)
        ctx.save_for_backward(q, k, v, sinks, slope, probabilities)
        ctx.group, ctx.rule = group, rule
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        """Gradients of this rank's queries, keys and values, and its part of that of the sinks."""
        q, k, v, sinks, slope, probabilities = ctx.saved_tensors
        group, rule, dtype = ctx.group, ctx.rule, sum_dtype(q)
        group.meet()
        grad = grad.to(dtype)
        factors = _factors(q, rule, *_places(group, q.shape[-2]))
        dropped = probabilities if factors is None else probabilities * factors
        grad_scores = torch.empty_like(probabilities)

        def to_values(columns: slice, part: torch.Tensor) -> torch.Tensor:
            grad_scores[..., columns] = grad @ as_many_heads(part, q).to(dtype).transpose(-1, -2)
            return sum_of_heads(dropped[..., columns].transpose(-1, -2) @ grad, part)

        grad_v = _go_round_with_sums(group, v, to_values)
        if factors is not None:
            grad_scores *= factors
        delta = (grad_scores * probabilities).sum(dim=-1, keepdim=True)
        grad_sinks = None
        if sinks is not None:
            probability = 1.0 - probabilities.sum(dim=-1, keepdim=True)
            grad_sinks = -(probability * delta).sum(dim=(0, 2, 3)).to(sinks.dtype)
        grad_scores -= delta
        grad_scores *= probabilities * rule.scale
        if slope is not None:
            grad_scores *= slope
        grad_q = torch.zeros(q.shape, dtype=dtype, device=q.device)

        def to_keys(columns: slice, part: torch.Tensor) -> torch.Tensor:
            grad_q.add_(grad_scores[..., columns] @ as_many_heads(part, q).to(dtype))
            return sum_of_heads(grad_scores[..., columns].transpose(-1, -2) @ q.to(dtype), part)

        grad_k = _go_round_with_sums(group, k, to_keys)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks, None, None


def _go_round(group: SequenceGroup, part: torch.Tensor, use: Callable[[slice, torch.Tensor], None]) -> None:
    """Calls ``use`` with each rank's columns of the scores and its ``part``, in turn; the next part travels
    meanwhile.
    """
    length = part.shape[-2]
    for turn in range(group.size):
        coming = None if turn == group.size - 1 else group.pass_on([part])
        use(_columns(group, turn, length), part)
        if coming is not None:
            (part,) = coming.wait()


def _go_round_with_sums(
    group: SequenceGroup, part: torch.Tensor, use: Callable[[slice, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Like :func:`_go_round`; the results of ``use`` for one rank's part are summed over all ranks and end at
    that rank.
    """
    length, sums = part.shape[-2], None
    for turn in range(group.size):
        coming = None if turn == group.size - 1 else group.pass_on([part])
        own = use(_columns(group, turn, length), part)
        if sums is not None:
            own = own.add_(sums.wait()[0])
        sums = group.pass_on([own])
        if coming is not None:
            (part,) = coming.wait()
    return sums.wait()[0]  # type: ignore[union-attr]


def _columns(group: SequenceGroup, turn: int, length: int) -> slice:
    owner = (group.rank - turn) % group.size
    return slice(owner * length, (owner + 1) * length)


def _slices(group: SequenceGroup, length: int):
    (mine,) = slices_of_rank(group.rank, group.size, length, Mode.RSA)
    (everything,) = slices_of_rank(0, 1, length * group.size, Mode.RSA)
    return mine, everything


def _places(group: SequenceGroup, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    mine, everything = (torch.arange(part.start, part.stop, device="cpu") for part in _slices(group, length))
    return mine, everything


def _factors(q: torch.Tensor, rule: Rule, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
    if rule.dropout is None:
        return None
    return rule.dropout.factors(q.shape[0], q.shape[1], queries.to(q.device), keys.to(q.device), sum_dtype(q))
