"""The loss of a language model without its full logits.

Logits take tokens x vocabulary elements, in float32 and several times over while the loss is computed: 25 GB for 16 K
tokens of a vocabulary of 128 K. Here they exist for some tokens at a time.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

_TILE_LOGITS = 2**26  # elements of logits that exist at a time: 256 MiB in float32

Reduction = Literal["mean", "sum"]


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_targets: torch.Tensor | float | None = None,
    softcap: float | None = None,
    tile_tokens: int | None = None,
) -> torch.Tensor:
    """``cross_entropy(linear(hidden, weight, bias).float(), labels)``, with the logits of some tokens at a time.

    Gradients are computed in the forward pass, tile by tile, so nothing is recomputed. That of ``weight`` is
    accumulated in float32. Until backward they take the memory of ``hidden`` and, in float32, of ``weight``.

    Args:
        hidden: [..., hidden size], the last layer's output.
        weight: [vocabulary, hidden size].
        labels: int64, [...]; ``ignore_index`` for tokens that do not count. They must be shifted already.
        bias: [vocabulary].
        ignore_index: as in ``torch.nn.functional.cross_entropy``.
        reduction: ``"mean"`` over the tokens that count, or their ``"sum"``.
        num_targets: other divisor of the sum, such as the tokens that count on all ranks.
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2).
        tile_tokens: tokens whose logits exist at a time; None: as many as take 256 MiB.

    Returns:
        a scalar in float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes do not fit.
    """
    _check(hidden, weight, labels, bias, reduction, tile_tokens)
    rows = hidden.reshape(-1, hidden.shape[-1])
    targets = labels.reshape(-1)
    if tile_tokens is None:
        tile_tokens = max(1, _TILE_LOGITS // weight.shape[0])
    total = _LinearCrossEntropy.apply(rows, weight, bias, targets, ignore_index, softcap, tile_tokens)
    if num_targets is None:
        num_targets = (targets != ignore_index).sum() if reduction == "mean" else 1.0
    return total / num_targets


@torch.no_grad()
def tiled_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    num_targets: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """``cross_entropy(logits.float(), labels)`` without gradients, with some tokens' logits in float32 at a time.
    Arguments and result are those of :func:`linear_cross_entropy`.
    """
    rows, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    tile_tokens = max(1, _TILE_LOGITS // rows.shape[1])
    dtype = torch.promote_types(logits.dtype, torch.float32)
    total = torch.zeros((), dtype=dtype, device=logits.device)
    for some, target in zip(rows.split(tile_tokens), targets.split(tile_tokens), strict=True):
        total += torch.nn.functional.cross_entropy(some.to(dtype), target, ignore_index=ignore_index, reduction="sum")
    return total / ((targets != ignore_index).sum() if num_targets is None else num_targets)


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of the tokens' losses."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        ignore_index: int,
        softcap: float | None,
        tile_tokens: int,
    ) -> torch.Tensor:
        """Computes the loss and the gradients that backward will return."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=dtype, device=hidden.device) if needs_weight else None
        grad_bias = torch.zeros(weight.shape[0], dtype=dtype, device=hidden.device) if needs_bias else None
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        for begin in range(0, hidden.shape[0], tile_tokens):
            rows, target = hidden[begin : begin + tile_tokens], targets[begin : begin + tile_tokens]
            counts = target != ignore_index
            index = torch.where(counts, target, 0)[:, None]
            logits = torch.nn.functional.linear(rows, weight, bias).to(dtype)
            if softcap is not None:
                logits = logits.div_(softcap).tanh_().mul_(softcap)
            lse = torch.logsumexp(logits, dim=-1, keepdim=True)
            total += torch.where(counts, (lse - logits.gather(1, index))[:, 0], 0.0).sum()
            if not any((needs_hidden, needs_weight, needs_bias)):
                continue
            slope = None if softcap is None else 1.0 - (logits / softcap).square()
            grad = logits.sub_(lse).exp_()
            grad.scatter_add_(1, index, torch.full_like(index, -1.0, dtype=dtype))
            grad *= counts[:, None]
            if slope is not None:
                grad *= slope
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                torch.matmul(grad, weight, out=grad_hidden[begin : begin + tile_tokens])
            if grad_weight is not None:
                grad_weight += grad.t() @ rows
        ctx.grads = grad_hidden, grad_weight, grad_bias
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        """Scales the gradients from forward. Works once: they are not kept."""
        if ctx.grads is None:
            raise RuntimeError("linear_cross_entropy: a second backward through the same loss; compute the loss again")
        parts, ctx.grads = ctx.grads, None
        scaled = (
            None if part is None else part.mul_(grad).to(dtype) for part, dtype in zip(parts, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None, None, None)


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: str,
    tile_tokens: int | None,
) -> None:
    shapes = f"hidden is {list(hidden.shape)}, weight {list(weight.shape)}, labels {list(labels.shape)}"
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or hidden.shape[:-1] != labels.shape:
        raise ValueError(f"{shapes}; give [..., hidden size], [vocabulary, hidden size] and [...]")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias is {list(bias.shape)}; weight is {list(weight.shape)}, so it must be {[weight.shape[0]]}"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; give mean or sum")
    if tile_tokens is not None and tile_tokens < 1:
        raise ValueError(f"tile_tokens is {tile_tokens}; give at least 1")
