"""Kernels for a block of attention: PyTorch's kernels that return the log-sum-exp, else plain operations.

    kernel = choose(Device.of(q), Question(q.dtype, (128, 128), (4096, 4096), Cover.ALL, dropout_p=0.0))
    out, lse = KERNELS[kernel].forward(q, k, v, scoring)
    grad_q, grad_k, grad_v = KERNELS[kernel].backward(Whole(grad, out, lse), q, k, v, scoring)

``q`` and ``out`` are [batch, heads, queries, head_dim], ``k`` and ``v`` [batch, key heads, keys, head_dim]. ``lse`` is
[batch, heads, queries] in float32 (float64 for float64): the natural logarithm, from all kernels.

[Note: token-major tensors] Tensors have the shape [batch, heads, tokens, head_dim] and the memory order [batch, tokens,
heads, head_dim], as projections return them. So no kernel copies them: flash and memory-efficient attention work in
that order, and the latter's backward assumes it of ``out`` without a check. cuDNN caches plans by the layouts of q, k
and v alone (aten/src/ATen/native/cudnn/MHA.cpp, up to PyTorch 2.11 at least). A plan made for another layout of
``grad`` would be reused wrongly; a constant layout, which most models share, avoids that.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from patrickstar.sequence.flex import capped_attention
from patrickstar.sequence.kernel_choice import Kernel
from patrickstar.sequence.masking import Cover

_LSE_ALIGNMENT = 32  # memory-efficient attention pads the queries of its lse to a multiple of this
_BIAS_ALIGNMENT = 16  # memory-efficient attention's bias: elements between rows are a multiple of this
_aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Scoring:
    """Converts a block's scores into probabilities.

    Attributes:
        scale: factor of the inner products.
        cover: how much of the block is seen; with ``DIAGONAL`` there are as many queries as keys.
        mask: True where a query sees a key; broadcasts to [batch, heads, queries, keys]. None if ``cover`` suffices.
        factors: dropout's factors, [batch, heads, queries, keys]; None without dropout.
        softcap: the scaled scores s become ``softcap * tanh(s / softcap)``; None: they stay.
    """

    scale: float
    cover: Cover
    mask: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    softcap: float | None = None

    @property
    def is_causal(self) -> bool:
        """The kernels' argument of that name."""
        return self.cover is Cover.DIAGONAL


def sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Accumulation dtype for sums over blocks."""
    return torch.promote_types(tensor.dtype, torch.float32)


def token_major(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the memory order of [Note: token-major tensors], if needed."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def as_many_heads(part: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Repeats each key/value head once per query head that attends to it (grouped-query attention)."""
    times = q.shape[1] // part.shape[1]
    return part if times == 1 else part.repeat_interleave(times, dim=1)


def sum_of_heads(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Backward of :func:`as_many_heads`: sums over copies of a head, in :func:`sum_dtype`."""
    heads = like.shape[1]
    return part if part.shape[1] == heads else part.unflatten(1, (heads, -1)).sum(dim=2, dtype=sum_dtype(part))


Pair = tuple[torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Whole(NamedTuple):
    """Attention over all keys, possibly merged from blocks of several kernels."""

    grad: torch.Tensor
    """Gradient of ``out``."""
    out: torch.Tensor
    lse: torch.Tensor


class Passes(NamedTuple):
    """Forward and backward of one kernel.

    ``forward(q, k, v, scoring)`` returns the output, in q's dtype or :func:`sum_dtype`, and the log-sum-exp. They are 0
    and -inf for a query that sees no key. ``backward(whole, q, k, v, scoring)`` returns the block's parts of the
    gradients of q, k and v.
    """

    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Scoring], Pair]
    backward: Callable[[Whole, torch.Tensor, torch.Tensor, torch.Tensor, Scoring], Gradients]


def _cudnn_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> Pair:
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, scoring.is_causal, False, scale=scoring.scale
    )
    return out, lse.reshape(q.shape[:-1])


def _cudnn_backward(whole: Whole, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> Gradients:
    grad, out, lse = whole
    lengths = q.shape[-2], k.shape[-2]
    lse = lse.contiguous()  # the kernel ignores strides and reads a contiguous lse (NVIDIA/cudnn-frontend#304)
    lse = lse.unsqueeze(-1) if _cudnn_lse_dims() == 4 else lse
    unused = _no_dropout(q, torch.int64)
    return _aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, unused, unused, None, None, None, *lengths, 0.0, scoring.is_causal, scale=scoring.scale
    )


@functools.cache
def _cudnn_lse_dims() -> int:
    """Dimensions of the log-sum-exp in this PyTorch's cuDNN operation: some versions add a last one of size 1."""
    q = torch.empty(1, 1, 8, 8, dtype=torch.bfloat16, device="meta")
    return _aten._scaled_dot_product_cudnn_attention(q, q, q, None, True)[1].dim()


def _flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> Pair:
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, scoring.is_causal, False, scale=scoring.scale
    )
    return out, lse


def _flash_backward(whole: Whole, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> Gradients:
    grad, out, lse = whole
    lengths = q.shape[-2], k.shape[-2]
    unused = _no_dropout(q, torch.uint64)
    return _aten._scaled_dot_product_flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        None,
        None,
        *lengths,
        0.0,
        scoring.is_causal,
        unused,
        unused,
        scale=scoring.scale,
    )


def _no_dropout(q: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Placeholder for the arguments that hold dropout's seed and offset."""
    return torch.empty(2, dtype=dtype, device=q.device)


def _efficient_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> Pair:
    k, v = (as_many_heads(part, q) for part in (k, v))
    bias = _bias(q, k, scoring.mask)
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, scoring.is_causal, scale=scoring.scale
    )
    lse = lse[..., : q.shape[-2]]
    if scoring.mask is None:
        return out, lse
    sees_nothing = ~scoring.mask.any(dim=-1)
    return out.masked_fill(sees_nothing.unsqueeze(-1), 0.0), lse.masked_fill(sees_nothing, -torch.inf)


def _efficient_backward(whole: Whole, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> Gradients:
    grad, out, lse = whole
    many = [as_many_heads(part, q) for part in (k, v)]
    length = lse.shape[-1]
    padded = lse.new_full((*lse.shape[:-1], _round_up(length, _LSE_ALIGNMENT)), torch.inf)
    # A query that sees no key gets probabilities exp(score - inf) = 0, instead of NaN from -inf - -inf.
    padded[..., :length] = lse.masked_fill(lse == -torch.inf, torch.inf)
    unused = _no_dropout(q, torch.int64)
    grad_q, grad_k, grad_v, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, *many, _bias(q, k, scoring.mask), out, padded, unused, unused, 0.0, [True, True, True, False],
        scoring.is_causal, scale=scoring.scale,
    )  # fmt: skip
    return grad_q, sum_of_heads(grad_k, k), sum_of_heads(grad_v, v)


def _bias(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """A bias, 0 where the mask is True, else -inf: [batch, heads, queries, keys]. Only the mask's dimensions have
    memory; rows are aligned for the kernel.
    """
    if mask is None:
        return None
    keys = k.shape[-2]
    bias = torch.zeros((*mask.shape[:-1], _round_up(keys, _BIAS_ALIGNMENT)), dtype=q.dtype, device=q.device)
    bias = bias[..., :keys].masked_fill_(~mask, -torch.inf)
    return bias.expand(*q.shape[:-1], keys)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _flex_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> Pair:
    assert scoring.softcap is not None
    return capped_attention(q, k, v, scoring.mask, scoring.is_causal, scoring.softcap, scoring.scale)


def _flex_backward(whole: Whole, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> Gradients:
    """Computes the block's forward again, and differentiates its own output and log-sum-exp: FlexAttention's interface
    offers no more. ``out`` is a sum over blocks of ``share * own`` with ``share = exp(own_lse - lse)``. So the gradient
    of ``own_lse`` is ``share * (grad . (own - out))``.
    """
    grad, out, lse = whole
    leaves = [part.detach().requires_grad_() for part in (q, k, v)]
    with torch.enable_grad():
        own, own_lse = _flex_forward(*leaves, scoring)
    share = torch.exp(own_lse - lse).masked_fill(own_lse == -torch.inf, 0.0)
    grad = grad.to(lse.dtype)
    grad_lse = share * (grad * (own.detach() - out)).sum(dim=-1)
    grads = torch.autograd.grad((own, own_lse), leaves, ((grad * share.unsqueeze(-1)).to(own.dtype), grad_lse))
    return grads[0], grads[1], grads[2]


def _host_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> Pair:
    k, v = (as_many_heads(part, q) for part in (k, v))
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, scoring.is_causal, scale=scoring.scale)


def _host_backward(whole: Whole, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> Gradients:
    grad, out, lse = whole
    many = [as_many_heads(part, q) for part in (k, v)]
    grad_q, grad_k, grad_v = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, *many, out, lse, 0.0, scoring.is_causal, scale=scoring.scale
    )
    return grad_q, sum_of_heads(grad_k, k), sum_of_heads(grad_v, v)


def _plain_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> Pair:
    q, k, v = _wide(q, k, v)
    scores, _ = _scores(q, k, scoring)
    lse = torch.logsumexp(scores, dim=-1)
    probabilities = _probabilities(scores, lse)
    if scoring.factors is not None:
        probabilities *= scoring.factors
    return probabilities @ v, lse


def _plain_backward(whole: Whole, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> Gradients:
    grad, out, lse = whole
    own_k, own_v = k, v
    grad, out = (part.to(sum_dtype(q)) for part in (grad, out))
    q, k, v = _wide(q, k, v)
    scores, slope = _scores(q, k, scoring)
    probabilities = _probabilities(scores, lse)
    grad_probabilities = grad @ v.transpose(-1, -2)
    dropped = probabilities
    if scoring.factors is not None:
        dropped = probabilities * scoring.factors
        grad_probabilities *= scoring.factors
    grad_v = dropped.transpose(-1, -2) @ grad
    delta = (grad * out).sum(dim=-1, keepdim=True)
    grad_scores = probabilities.mul_(grad_probabilities.sub_(delta)).mul_(scoring.scale)
    if slope is not None:
        grad_scores *= slope
    grad_k = grad_scores.transpose(-1, -2) @ q
    return grad_scores @ k, sum_of_heads(grad_k, own_k), sum_of_heads(grad_v, own_v)


def _wide(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """q, k and v in :func:`sum_dtype`, with equal numbers of heads, for plain operations."""
    return [q.to(sum_dtype(q)), *(as_many_heads(part.to(sum_dtype(q)), q) for part in (k, v))]


def soft_cap_(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    """Caps scores in place; returns the derivative of the capped ones by the given ones."""
    tanh = scores.div_(softcap).tanh_()
    slope = 1.0 - tanh.square()
    scores.mul_(softcap)
    return slope


def _scores(q: torch.Tensor, k: torch.Tensor, scoring: Scoring) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scaled scores, -inf where a query does not see a key; the slope of their soft cap, or None."""
    scores = (q @ k.transpose(-1, -2)).mul_(scoring.scale)
    slope = None if scoring.softcap is None else soft_cap_(scores, scoring.softcap)
    if scoring.cover is Cover.DIAGONAL:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(later, -torch.inf)
    if scoring.mask is not None:
        scores.masked_fill_(~scoring.mask, -torch.inf)
    return scores, slope


def _probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(scores - lse), written over ``scores``; 0 for a query that sees no key."""
    return scores.sub_(torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(-1)).exp_()


KERNELS: dict[Kernel, Passes] = {
    Kernel.CUDNN: Passes(_cudnn_forward, _cudnn_backward),
    Kernel.FLASH: Passes(_flash_forward, _flash_backward),
    Kernel.EFFICIENT: Passes(_efficient_forward, _efficient_backward),
    Kernel.HOST: Passes(_host_forward, _host_backward),
    Kernel.FLEX: Passes(_flex_forward, _flex_backward),
    Kernel.PLAIN: Passes(_plain_forward, _plain_backward),
}
