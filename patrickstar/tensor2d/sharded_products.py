"""Products of activations whose tokens are sharded over a line of ranks: the two of a pair of linear layers.

    wide = column_product(shard, first, line)          # [b, s/p, in], [out/p, in] -> [b, s, out/p]
    shard = row_product(wide, second, line)            # [b, s, in/p], [in/p, out] -> [b, s/p, out]

[Note: tokens of one rank at a time] Tokens that are gathered travel rank by rank, one ahead of their product, and sums
that are scattered leave rank by rank behind it, so that messages hide behind products as panels do. Inputs are kept
sharded, and gathered again in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from patrickstar.tensor2d.lines import Line
from patrickstar.tensor2d.panels import Panels, PartialSums, sum_dtype, travelling
from patrickstar.tensor2d.products import add_product

TOKENS = 1
"""The dimension of activations that is sharded."""


def column_product(hidden: torch.Tensor, weight: torch.Tensor, line: Line) -> torch.Tensor:
    """X Wᵀ [b, s, out/p] of shards [b, s/p, in] of X and the weight's [out/p, in]."""
    return _ColumnProduct.apply(hidden, weight, line)


def row_product(hidden: torch.Tensor, weight: torch.Tensor, line: Line) -> torch.Tensor:
    """This rank's tokens [b, s/p, out] of X W, of [b, s, in/p] and [in/p, out]."""
    return _RowProduct.apply(hidden, weight, line)


class _ColumnProduct(torch.autograd.Function):
    """X Wᵀ of shards [b, s/p, in] of X and [out/p, in]."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, line: Line) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.line = line
        return torch.cat([tokens @ weight.t() for tokens in _gathered(hidden, line)], dim=TOKENS)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        grad_hidden, grad_weight = None, None
        if ctx.needs_input_grad[0]:
            grad_hidden = _scattered_product(grad, weight, ctx.line)
        if ctx.needs_input_grad[1]:
            total = _empty_gradient(weight)
            parts = zip(grad.chunk(ctx.line.size, TOKENS), _gathered(hidden, ctx.line), strict=True)
            for index, (part, tokens) in enumerate(parts):
                add_product(total, part.flatten(0, 1).t(), tokens.flatten(0, 1), beta=min(index, 1))
            grad_weight = total.to(weight.dtype)
        return grad_hidden, grad_weight, None


class _RowProduct(torch.autograd.Function):
    """Shards [b, s/p, out] of X W, of [b, s, in/p] and [in/p, out]."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, line: Line) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.line = line
        return _scattered_product(hidden, weight, line)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grads_hidden = []
        total = _empty_gradient(weight) if needs_weight else None
        parts = zip(hidden.chunk(ctx.line.size, TOKENS), _gathered(grad, ctx.line), strict=True)
        for index, (tokens, part) in enumerate(parts):
            if needs_hidden:
                grads_hidden.append(part @ weight.t())
            if total is not None:
                add_product(total, tokens.flatten(0, 1).t(), part.flatten(0, 1), beta=min(index, 1))
        grad_hidden = torch.cat(grads_hidden, TOKENS) if needs_hidden else None
        return grad_hidden, None if total is None else total.to(weight.dtype), None


def _gathered(shard: torch.Tensor, line: Line) -> Iterator[torch.Tensor]:
    """Each rank's tokens, in their order, there until the next but one come ([Note: tokens of one rank at a time])."""
    panels = Panels(shard.contiguous(), TOKENS, line.size, line)
    for (tokens,) in travelling(panels, num_panels=line.size):
        yield tokens


def _scattered_product(whole: torch.Tensor, matrix: torch.Tensor, line: Line) -> torch.Tensor:
    """The sum over ranks of ``whole @ matrix``, of which this rank has its tokens."""
    shape = (whole.shape[0], whole.shape[TOKENS] // line.size, matrix.shape[1])
    sums = PartialSums(whole.new_empty(shape), TOKENS, line.size, line)
    for index, tokens in enumerate(whole.chunk(line.size, TOKENS)):
        wide = sum_dtype(whole.dtype)
        if wide == whole.dtype or not sums.keeps(index):
            sums.add(index, tokens @ matrix)
        else:
            total = torch.empty(tokens.shape[0] * tokens.shape[1], matrix.shape[1], dtype=wide, device=whole.device)
            add_product(total, tokens.flatten(0, 1), matrix, beta=0)
            sums.add(index, total.view(*tokens.shape[:2], -1))
    return sums.finish()


def _empty_gradient(weight: torch.Tensor) -> torch.Tensor:
    """In which the products of all tokens are added up, in float32 for 16-bit types, and rounded once."""
    return torch.empty(weight.shape, dtype=sum_dtype(weight.dtype), device=weight.device)
