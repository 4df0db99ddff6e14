"""Products of activations whose tokens are sharded over ranks: the two of a pair of linear layers.

    wide = column_product(shard, first, line)          # [b, s/p, in], [out/p, in] -> [b, s, out/p]
    shard = row_product(wide, second, line)            # [b, s, in/p], [in/p, out] -> [b, s/p, out]

Tokens are all-gathered rank by rank, one ahead of their product, and sums are reduce-scattered rank by rank after it.
So messages overlap with products ([Note: own first, own last]). Each rank begins with another rank's tokens: in every
exchange each rank sends to one other, so none is a bottleneck.

Inputs are saved sharded and all-gathered again in backward, while the gradient of the input is computed. A weight's
gradient is one product over the tokens of all ranks, in sequence order.

The second layer's bias is replicated. The rank before the owner of a sum adds it to its summand, as part of its
product.
"""

from __future__ import annotations

from typing import Any

import torch

from patrickstar.differentiation import differentiable_once
from patrickstar.tensor2d.lines import Line
from patrickstar.tensor2d.local_products import tokens_into, tokens_onto
from patrickstar.tensor2d.orders import SUMS, Shares, arriving, begin_gathering, cut, scattered
from patrickstar.tensor2d.panels import save_operands

_NO_SECOND_DERIVATIVE = ("sharded products", "leave tensor_parallel out")
TOKENS = 1
"""The sharded dimension of activations."""


def column_product(
    hidden: torch.Tensor, weight: torch.Tensor, line: Line, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """X Wᵀ + bias, [b, s, out/p], from shards [b, s/p, in] of X, the weight's [out/p, in] and [out/p]."""
    return _ColumnProduct.apply(hidden, weight, bias, line)


def row_product(
    hidden: torch.Tensor, weight: torch.Tensor, line: Line, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """This rank's tokens [b, s/p, out] of X W + bias, from [b, s, in/p], [in/p, out] and [out]."""
    return _RowProduct.apply(hidden, weight, bias, line)


class _ColumnProduct(torch.autograd.Function):
    """X Wᵀ from shards [b, s/p, in] of X and [out/p, in]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, line: Line
    ) -> torch.Tensor:
        save_operands(ctx, hidden, weight)
        ctx.line = line
        batch, length, _ = hidden.shape
        out = hidden.new_empty(batch, length * line.size, weight.shape[0])
        parts = out.chunk(line.size, TOKENS)
        for rank, tokens, shares in arriving(hidden, line):
            _multiply(parts[rank], tokens, weight.t(), bias, shares)
        return out

    @staticmethod
    @differentiable_once(*_NO_SECOND_DERIVATIVE)
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        line, grad = ctx.line, grad.contiguous()
        coming = None
        if needs_weight:
            if line.size > 1:
                line.meet()
            coming = begin_gathering(hidden.contiguous(), line)
        grad_hidden = _scattered_product(grad, weight, line) if needs_hidden else None
        grad_bias = grad.sum((0, TOKENS)) if needs_bias else None
        grad_weight = None if coming is None else _product_of_tokens(grad, _in_order(coming()))
        return grad_hidden, grad_weight, grad_bias, None


class _RowProduct(torch.autograd.Function):
    """Shards [b, s/p, out] of X W, from [b, s, in/p] and [in/p, out]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, line: Line
    ) -> torch.Tensor:
        save_operands(ctx, hidden, weight)
        ctx.line = line
        return _scattered_product(hidden, weight, line, bias)

    @staticmethod
    @differentiable_once(*_NO_SECOND_DERIVATIVE)
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        line = ctx.line
        grad_hidden = None
        if needs_hidden:
            grad_hidden = grad.new_empty(grad.shape[0], grad.shape[TOKENS] * line.size, weight.shape[0])
        parts = {}
        if needs_hidden or needs_weight:
            for rank, tokens, shares in arriving(grad, line):
                if grad_hidden is not None:
                    part = grad_hidden.chunk(line.size, TOKENS)[rank]
                    _multiply(part, tokens, weight.t(), None, shares)
                if needs_weight:
                    parts[rank] = tokens
        grad_weight = None
        if needs_weight:
            grad_weight = _product_of_tokens(hidden, _in_order([parts[rank] for rank in range(line.size)]))
        return grad_hidden, grad_weight, grad.sum((0, TOKENS)) if needs_bias else None, None


def _multiply(
    out: torch.Tensor, tokens: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, choices: Shares
) -> None:
    """``out = tokens matrix + bias``; a single sample is cut into pieces by ``choices``."""
    for piece in cut(*out.shape[1:], choices) if len(out) == 1 else [slice(None)]:
        tokens_into(out[:, piece], tokens[:, piece], matrix, bias)


def _in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """Whole sequences from each rank's tokens."""
    return torch.cat(parts, TOKENS) if len(parts) > 1 else parts[0]


def _product_of_tokens(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The gradient of a weight, Aᵀ B over all tokens: one product, rounded once."""
    return a.flatten(0, 1).t() @ b.flatten(0, 1)


def _scattered_product(
    whole: torch.Tensor, matrix: torch.Tensor, line: Line, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Reduce-scatter of ``whole @ matrix`` over ranks, with the bias: this rank's tokens ([Note: own first,
    own last]).
    """
    batch, length = whole.shape[0], whole.shape[TOKENS] // line.size
    features = matrix.shape[1]
    out = whole.new_empty(batch, length, features)
    tokens = whole.chunk(line.size, TOKENS)
    if line.size == 1:
        tokens_into(out, whole, matrix, bias)
        return out
    along_samples = batch > 1  # so that pieces are contiguous
    size, width = (batch, length * features) if along_samples else (length, features)
    pieces = cut(size, width, SUMS, in_tiles=not along_samples)

    def part(of: torch.Tensor, piece: slice) -> torch.Tensor:
        return of[piece] if along_samples else of[:, piece]

    def summand(owner: int, piece: slice) -> torch.Tensor:
        mine = part(tokens[owner], piece)
        found = mine.new_empty(*mine.shape[:2], features)
        is_before = owner == (line.rank + 1) % line.size
        tokens_into(found, mine, matrix, bias if is_before else None)
        return found

    def add_own(piece: slice, others: list[torch.Tensor]) -> None:
        tokens_onto(part(out, piece), others, part(tokens[line.rank], piece), matrix)

    scattered(line, pieces, summand, lambda piece: part(out, piece), add_own)
    return out
