"""Attention of some queries to some keys, as a part of attention over the whole sequence.

[Note: blocks of attention] A block's output comes with the log-sum-exp of its scores, by which outputs of several
blocks are merged into what one softmax over all keys gives. Backward needs of a query only its output over all keys,
the log-sum-exp over all keys and the inner product of output and gradient, so that each block gives its part of all
three gradients by itself (Dao, *FlashAttention-2*, arXiv 2307.08691, section 3.1). Sums are kept in float32, in float64
for float64 inputs.
"""

from __future__ import annotations

import dataclasses

import torch

from patrickstar.sequence.dropout import Dropout
from patrickstar.sequence.layout import Slice
from patrickstar.sequence.masking import Cover, Masking

_TILE_SCORES = 2**22  # elements of scores that exist at a time, where no kernel computes a block


@dataclasses.dataclass(frozen=True)
class Rule:
    """What all blocks of one attention share."""

    scale: float
    masking: Masking
    dropout: Dropout | None


@dataclasses.dataclass
class Partial:
    """Attention to the keys so far: ``out`` [batch, heads, queries, head_dim], ``lse`` [batch, heads, queries]."""

    out: torch.Tensor
    lse: torch.Tensor

    @staticmethod
    def nothing(q: torch.Tensor, head_dim: int) -> Partial:
        """To no key."""
        dtype = sum_dtype(q)
        out = q.new_zeros((*q.shape[:-1], head_dim), dtype=dtype)
        return Partial(out, q.new_full(q.shape[:-1], -torch.inf, dtype=dtype))

    def add(self, rows: slice, other: Partial) -> None:
        """Merges, for these queries, attention to other keys."""
        out, lse = self.out[..., rows, :], self.lse[..., rows]
        together = torch.logaddexp(lse, other.lse)
        out.mul_(_weight(lse, together)).add_(other.out * _weight(other.lse, together))
        lse.copy_(together)


def _weight(lse: torch.Tensor, together: torch.Tensor) -> torch.Tensor:
    """The share of one part; of a query that sees nothing at all none."""
    return torch.where(together == -torch.inf, 0.0, torch.exp(lse - together)).unsqueeze(-1)


def sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    """In which sums over blocks are kept."""
    return torch.promote_types(tensor.dtype, torch.float32)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: tuple[Slice, Slice], rule: Rule) -> Partial | None:
    """Of queries ``q`` [batch, heads, queries, head_dim] to ``k`` and ``v`` [batch, heads, keys, head_dim], which lie
    ``at`` these places of the sequence; None where the rule lets no query see a key.
    """
    cover = rule.masking.cover(*at)
    if cover is Cover.NONE:
        return None
    if _has_kernel(q, v, cover, rule):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, cover is Cover.DIAGONAL, scale=rule.scale
        )
        return Partial(out.to(sum_dtype(q)), lse.to(sum_dtype(q)))
    found = [_attend_tile(q[..., rows, :], k, v, tile, at[1], rule) for rows, tile in _tiles(q, k, at[0])]
    return Partial(torch.cat([out for out, _ in found], dim=-2), torch.cat([lse for _, lse in found], dim=-1))


def attend_backward(
    grad: torch.Tensor,
    whole: Partial,
    delta: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    at: tuple[Slice, Slice],
    rule: Rule,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """This block's parts of the gradients of ``q``, ``k`` and ``v``; None where the rule lets no query see a key.

    Args:
        grad: of the output over all keys.
        whole: attention of these queries to all keys.
        delta: the inner product of ``grad`` and the output of each query.
        q: as in :func:`attend`, like ``k``, ``v``, ``at`` and ``rule``.
    """
    cover = rule.masking.cover(*at)
    if cover is Cover.NONE:
        return None
    dtype = sum_dtype(q)
    if _has_kernel(q, v, cover, rule):
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, whole.out.to(q.dtype), whole.lse, 0.0, cover is Cover.DIAGONAL, scale=rule.scale
        )
        return tuple(part.to(dtype) for part in found)
    grad_q = torch.empty(q.shape, dtype=dtype, device=q.device)
    grad_k, grad_v = (torch.zeros(part.shape, dtype=dtype, device=q.device) for part in (k, v))
    for rows, tile in _tiles(q, k, at[0]):
        part_q, part_grad = q[..., rows, :].to(dtype), grad[..., rows, :].to(dtype)
        scores, factors = _scores(part_q, k, tile, at[1], rule)
        probabilities = _probabilities(scores, whole.lse[..., rows])
        grad_probabilities = part_grad @ v.to(dtype).transpose(-1, -2)
        dropped = probabilities
        if factors is not None:
            dropped = probabilities * factors
            grad_probabilities *= factors
        grad_scores = probabilities * (grad_probabilities - delta[..., rows, None]) * rule.scale
        grad_q[..., rows, :] = grad_scores @ k.to(dtype)
        grad_k += grad_scores.transpose(-1, -2) @ part_q
        grad_v += dropped.transpose(-1, -2) @ part_grad
    return grad_q, grad_k, grad_v


def _has_kernel(q: torch.Tensor, v: torch.Tensor, cover: Cover, rule: Rule) -> bool:
    """Whether PyTorch has a kernel that gives the log-sum-exp too."""
    same = q.shape[-1] == v.shape[-1]
    return q.device.type == "cpu" and same and rule.dropout is None and cover in (Cover.ALL, Cover.DIAGONAL)


def _tiles(q: torch.Tensor, k: torch.Tensor, queries: Slice) -> list[tuple[slice, Slice]]:
    batch, heads, length, _ = q.shape
    step = max(1, _TILE_SCORES // max(1, batch * heads * k.shape[-2]))
    return [
        (slice(begin, end), Slice(queries.start + begin, queries.start + end))
        for begin in range(0, length, step)
        for end in (min(begin + step, length),)
    ]


def _attend_tile(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: Slice, keys: Slice, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = sum_dtype(q)
    scores, factors = _scores(q.to(dtype), k, queries, keys, rule)
    lse = torch.logsumexp(scores, dim=-1)
    probabilities = _probabilities(scores, lse)
    if factors is not None:
        probabilities *= factors
    return probabilities @ v.to(dtype), lse


def _scores(
    q: torch.Tensor, k: torch.Tensor, queries: Slice, keys: Slice, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scaled scores, -inf where a query does not see a key, and dropout's factors."""
    scores = (q @ k.to(q.dtype).transpose(-1, -2)) * rule.scale
    places = [torch.arange(part.start, part.stop, device=q.device) for part in (queries, keys)]
    if rule.masking.cover(queries, keys) is not Cover.ALL:
        scores.masked_fill_(~rule.masking.mask(*places), -torch.inf)
    factors = None
    if rule.dropout is not None:
        factors = rule.dropout.factors(q.shape[0], q.shape[1], *places, q.dtype)
    return scores, factors


def _probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(scores - lse); 0 for a query that sees nothing."""
    lse = lse.unsqueeze(-1)
    return torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse))
