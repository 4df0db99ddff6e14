"""The context-parallel attention function."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from patrickstar.sequence.block import Rule
from patrickstar.sequence.dropout import Dropout
from patrickstar.sequence.group import HybridGroup, SequenceGroup
from patrickstar.sequence.layout import Mode
from patrickstar.sequence.masking import Padding, make_masking
from patrickstar.sequence.ring import RingAttention
from patrickstar.sequence.rsa import RingSelfAttention
from patrickstar.sequence.ulysses import HeadsForTokens, TokensForHeads, key_heads, query_heads


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: SequenceGroup | HybridGroup,
    mode: Mode | str = Mode.RING,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    cu_seqlens: Sequence[int] | None = None,
    length: int | None = None,
    padding: torch.Tensor | Padding | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries to the keys of all ranks of ``group``; equal to attention on one rank with all
    tokens.

    Args:
        q: [batch, heads, tokens of this rank, head_dim]. :func:`~patrickstar.sequence.positions_of_rank` gives the
            tokens' positions. All ranks have equally many: pad the end of the sequence.
        k: [batch, key heads, tokens of this rank, head_dim]; the number of key heads divides that of heads.
        v: like ``k``; head_dim may differ.
        group: the ranks that share the sequence; a :class:`HybridGroup` for ``"hybrid"``.
        mode: a :class:`~patrickstar.sequence.Mode` or its value.
        causal: a query sees its own key and those before it.
        window: how many tokens before and after itself a query sees, -1 for no limit.
        cu_seqlens: the documents' first tokens in a packed sequence, and its length; a query sees its own document.
        length: tokens of the whole sequence without its padding.
        padding: bool, [batch, tokens of the whole sequence], True for real tokens, equal on all ranks. Padding is not
            seen, and its outputs and gradients are 0. A :class:`~patrickstar.sequence.Padding` made from it can serve
            several layers.
        dropout_p: probability of dropout ([Note: dropout by position]).
        seed: dropout's seed: equal on all ranks, different for each layer and step.
        scale: factor of the scores; None: 1 / sqrt(head_dim).
        softcap: bound of the scaled scores s, which become softcap * tanh(s / softcap); None: no bound.
        sinks: [heads], a learned score per head that takes part in each softmax and has no value (attention sink);
            its gradient is this rank's part, to be summed over the ranks. None: no sinks.

    Returns:
        [batch, heads, tokens of this rank, head_dim of v], in ``q``'s dtype.

    Raises:
        ValueError: shapes, heads or lengths do not fit; the message says what to change.
    """
    mode = Mode(mode)
    _check(q, k, v, group, mode, dropout_p)
    _check_scores(q, softcap, sinks)
    rule = Rule(
        scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
        masking=make_masking(
            causal=causal,
            window=window,
            cu_seqlens=cu_seqlens,
            length=length,
            padding=padding,
            shape=(q.shape[0], q.shape[-2] * group.size),
        ),
        dropout=Dropout(dropout_p, seed, q.shape[1]) if dropout_p > 0 else None,
        softcap=softcap,
    )
    if isinstance(group, HybridGroup):
        return _by_heads(q, k, v, sinks, group.heads, group.ring, rule)
    if mode is Mode.ULYSSES:
        return _by_heads(q, k, v, sinks, group, None, rule)
    if mode is Mode.RSA:
        return RingSelfAttention.apply(q, k, v, sinks, group, rule)
    return RingAttention.apply(q, k, v, sinks, group, mode, rule)


class _Alone(SequenceGroup):
    """A group of one rank, which has the whole sequence."""

    def __init__(self) -> None:
        self.rank, self.size, self.sent_bytes = 0, 1, 0
        self.meet = lambda: None


def _by_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    heads: SequenceGroup,
    ring: SequenceGroup | None,
    rule: Rule,
) -> torch.Tensor:
    """Ulysses: all-to-all to this rank's heads of all the group's tokens, attention, and all-to-all back."""
    of_queries = query_heads(q.shape[1], heads.size)
    of_keys = key_heads(of_queries, q.shape[1] // k.shape[1])
    q = TokensForHeads.apply(q, heads, of_queries)
    k, v = (TokensForHeads.apply(part, heads, of_keys) for part in (k, v))
    first, last = of_queries[heads.rank][0], of_queries[heads.rank][-1]
    if rule.dropout is not None:
        rule = dataclasses.replace(rule, dropout=dataclasses.replace(rule.dropout, first_head=first))
    sinks = None if sinks is None else sinks[first : last + 1]
    out = RingAttention.apply(q, k, v, sinks, ring or _Alone(), Mode.RING, rule)
    return HeadsForTokens.apply(out, heads)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: SequenceGroup | HybridGroup, mode: Mode, dropout_p: float
) -> None:
    shapes = f"q is {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"{shapes}; give [batch, heads, tokens, head_dim] each")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[2] != k.shape[2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{shapes}; batch, tokens, the heads of k and v and the head_dim of q and k must be the same")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{shapes}; the {k.shape[1]} heads of k must divide the {q.shape[1]} of q")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is of {q.dtype}, k of {k.dtype}, v of {v.dtype}; give one dtype")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p is {dropout_p}; give at least 0 and less than 1")
    if (mode is Mode.HYBRID) != isinstance(group, HybridGroup):
        raise ValueError(f"mode {mode.value} with a {type(group).__name__}; hybrid, and it alone, takes a HybridGroup")


def _check_scores(q: torch.Tensor, softcap: float | None, sinks: torch.Tensor | None) -> None:
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap is {softcap}; give a number above 0, or None for no bound of the scores")
    if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
        raise ValueError(f"sinks is {list(sinks.shape)}; give one score for each of the {q.shape[1]} heads of q")
