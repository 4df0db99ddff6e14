"""Attention whose scores have a soft cap, by FlexAttention, which compiles a kernel from the function of a score."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

Pair = tuple[torch.Tensor, torch.Tensor]


def capped_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    softcap: float,
    scale: float,
) -> Pair:
    """:func:`attend_with_cap` as a kernel for GPUs."""
    attend = _compiled(is_causal, 0 if mask is None else mask.dim(), torch.is_grad_enabled(), softcap, scale)
    return attend(q, k, v, mask, is_causal, softcap, scale)


@functools.cache
def _compiled(*variant: float) -> Callable[..., Pair]:
    """Each variant has a code object of its own: PyTorch limits a code object's recompilations, and turns a number that
    differs between its calls into a tensor on the CPU, which a kernel for scores cannot read.
    """
    code = attend_with_cap.__code__.replace(co_name=re.sub(r"\W", "_", f"attend_with_cap_{variant}"))
    return torch.compile(types.FunctionType(code, attend_with_cap.__globals__))


def attend_with_cap(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    softcap: float,
    scale: float,
) -> Pair:
    """Output in q's dtype and log-sum-exp in float32, both differentiable.

    ``q`` is [batch, heads, queries, head_dim], ``k`` and ``v`` [batch, key heads, keys, head_dim]. ``mask`` is True
    where a query sees a key: [queries, keys] or [batch, 1, queries, keys].
    """

    def score(value: Any, sequence: Any, _head: Any, query: Any, key: Any) -> Any:
        value = softcap * torch.tanh(value / softcap)
        if is_causal:
            value = torch.where(query >= key, value, -torch.inf)
        if mask is not None:
            seen = mask[query, key] if mask.dim() == 2 else mask[sequence, 0, query, key]
            value = torch.where(seen, value, -torch.inf)
        return value

    options: dict[str, Any] = {"score_mod": score, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if hasattr(flex, "AuxRequest"):  # since PyTorch 2.9
        out, aux = flex.flex_attention(q, k, v, return_aux=flex.AuxRequest(lse=True), **options)
        return out, aux.lse
    return flex.flex_attention(q, k, v, return_lse=True, **options)
