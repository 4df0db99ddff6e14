"""Linear layers that multiply in 8 bits: forward, gradient of the input, gradient of the weight.

    module.__class__ = fp8_class(type(module))   # undone by the former class
    module.fp8_recipe = RECIPES[Fp8Recipe.ROWWISE]

Inputs, weights and gradients are cast on use. Weights, their gradients and results are bfloat16. The backward keeps the
transposed input's codes, half of the input's bytes; a compiled one keeps the input, which its graph may recompute. Calls of other dtypes, under autocast for instance, and of fewer
than 128 rows are computed as before.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from patrickstar.choices import Fp8Recipe
from patrickstar.fp8.casting import TILE, Block, Codes, Format, Sides, cast
from patrickstar.fp8.products import Sum, product


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Blocks and formats of the three products."""

    inputs: Block
    weights: Block
    gradients: Block
    gradient_format: Format = Format.E4M3
    forward_sum: Sum = Sum.EXACT


RECIPES = {
    Fp8Recipe.BLOCK: Recipe(Block.STRIP, Block.SQUARE, Block.STRIP),
    Fp8Recipe.ROWWISE: Recipe(Block.LINE, Block.LINE, Block.LINE, forward_sum=Sum.FAST),
    Fp8Recipe.TENSORWISE: Recipe(Block.MATRIX, Block.MATRIX, Block.MATRIX, Format.E5M2, Sum.FAST),
}
"""Recipes of DeepSeek-V3, and of torchao's configurations of the same names."""


@functools.cache
def fp8_class(base: type[nn.Module]) -> type[nn.Module]:
    """The class of a module of class ``base`` that multiplies in 8 bits: ``nn.Linear``, with a weight ``[out, in]``, or
    transformers' ``Conv1D``, with a weight ``[in, out]``.
    """
    sides = Sides.PLAIN if issubclass(base, nn.Linear) else Sides.TRANSPOSED
    return type(f"Fp8{base.__name__}", (_Fp8Product, base), {"_forward_side": sides})


class _Fp8Product(nn.Module):
    fp8_recipe: Recipe
    _forward_side: Sides
    """Side of the weight whose rows are results."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        rows = x.reshape(-1, x.size(-1))
        if rows.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16 or rows.size(0) < TILE:
            return super().forward(x)
        recipe, needs_grad = self.fp8_recipe, torch.is_grad_enabled() and weight.requires_grad
        with torch.no_grad():
            is_kept = needs_grad and not torch.compiler.is_compiling()
            codes, turned = _cast_input(x, rows, recipe.inputs, Sides.BOTH if is_kept else Sides.PLAIN)
        result = _Multiply.apply(rows, weight, codes, turned, recipe, self._forward_side)
        if bias is not None:
            result = result + bias
        return result.view(*x.shape[:-1], -1)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weight, codes, turned, recipe, side):
        ctx.recipe, ctx.side = recipe, side
        kept = turned[:2] if turned is not None else (rows,) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(weight, *kept)
        return product(codes, _cast_weight(weight, recipe, side), rows.size(0), recipe.forward_sum)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, *inputs = ctx.saved_tensors
        recipe, side = ctx.recipe, ctx.side
        for_rows, for_weight = ctx.needs_input_grad[:2]
        sides = (Sides.PLAIN if for_rows else Sides(0)) | (Sides.TRANSPOSED if for_weight else Sides(0))
        codes, grad_turned = cast(grad, recipe.gradients, sides, recipe.gradient_format)
        grad_rows = grad_weight = None
        if for_rows:
            grad_rows = product(codes, _cast_weight(weight, recipe, Sides.BOTH ^ side), grad.size(0))
        if for_weight:
            turned = Codes(*inputs, recipe.inputs) if len(inputs) == 2 else _turned(*inputs, recipe)
            pair = (grad_turned, turned)
            a, b = pair if side is Sides.PLAIN else reversed(pair)
            grad_weight = product(a, b, a.values.size(0))
        return grad_rows, grad_weight, None, None, None, None


def _turned(rows: Tensor, recipe: Recipe) -> Codes:
    _, turned = cast(rows, recipe.inputs, Sides.TRANSPOSED)
    return turned


def _cast_weight(weight: Tensor, recipe: Recipe, side: Sides) -> Codes:
    plain, transposed = cast(weight, recipe.weights, side)
    return plain if side is Sides.PLAIN else transposed


class _LastInput(threading.local):
    """The last input that was cast, while it exists: query, key and value layers share theirs."""

    def __init__(self) -> None:
        self.entry: tuple[weakref.ref[Tensor], int, Block, Sides, Any] | None = None


_last = _LastInput()


def _cast_input(x: Tensor, rows: Tensor, block: Block, sides: Sides) -> tuple[Codes | None, Codes | None]:
    # The compiler finds common subexpressions. Tensors of inference mode do not count their versions.
    if torch.compiler.is_compiling() or x.is_inference():
        return cast(rows, block, sides)
    entry = _last.entry
    if entry is not None:
        of, version, cast_block, cast_sides, found = entry
        if of() is x and version == x._version and cast_block is block and sides in cast_sides:
            return found
    found = cast(rows, block, sides)
    last = _last

    def forget(reference: weakref.ref[Tensor]) -> None:
        if last.entry is not None and last.entry[0] is reference:
            last.entry = None

    last.entry = (weakref.ref(x, forget), x._version, block, sides, found)
    return found
