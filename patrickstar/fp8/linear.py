"""Linear layers that multiply in 8 bits: forward, gradient of the input, gradient of the weight.

    module.__class__ = fp8_class(type(module))   # undone by the former class
    module.fp8_recipe = RECIPES[Fp8Recipe.ROWWISE]

Inputs, weights and gradients are cast on use. Weights, their gradients and results are bfloat16. The backward keeps the
transposed input's codes, half of the input's bytes; a compiled one keeps the input, which its graph may recompute.
Autocast to bfloat16 applies first. Calls of other dtypes, of nested tensors and of fewer than 128 rows are computed as
before. Copies and pickles of a module are of its former class.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from patrickstar.choices import Fp8Recipe
from patrickstar.differentiation import differentiable_once
from patrickstar.fp8.casting import TILE, Block, Codes, Format, Sides, cast, stream_of
from patrickstar.fp8.products import Sum, cast_weight, multiply, product


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
NO_SECOND_DERIVATIVE = ("products in 8 bits", "leave fp8 out, or name the layers in fp8.skip_modules")
_AUTOCAST = frozenset([torch.float32, torch.float16, torch.bfloat16])
"""Dtypes that autocast changes."""


@functools.cache
def fp8_class(base: type[nn.Module]) -> type[nn.Module]:
    """The class of a module of class ``base`` that multiplies in 8 bits: ``nn.Linear``, with a weight ``[out, in]``, or
    transformers' ``Conv1D``, with a weight ``[in, out]``.
    """
    sides = Sides.PLAIN if issubclass(base, nn.Linear) else Sides.TRANSPOSED
    return type(f"Fp8{base.__name__}", (_Fp8Product, base), {"_forward_side": sides, "_former_class": base})


class _Fp8Product(nn.Module):
    fp8_recipe: Recipe
    _forward_side: Sides
    """Side of the weight whose rows are results."""
    _former_class: type[nn.Module]

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        is_bfloat16 = _computes_in(input) is weight.dtype is torch.bfloat16
        if not is_bfloat16 or input.is_nested or input.numel() < TILE * input.size(-1):
            return super().forward(input)
        x = input if input.dtype is torch.bfloat16 else input.to(torch.bfloat16)
        if torch.compiler.is_compiling():  # the compiler finds common casts, and chooses what backward keeps
            rows = _CompiledMultiply.apply(x.flatten(0, -2), weight, self.fp8_recipe, self._forward_side)
            result = rows if input.dim() == 2 else rows.view(*input.shape[:-1], -1)
        else:
            sides = Sides.BOTH if torch.is_grad_enabled() and weight.requires_grad else Sides.PLAIN
            result = _Multiply.apply(x, weight, (input,), self.fp8_recipe, self._forward_side, sides)
        return result if bias is None else result + bias

    def __reduce_ex__(self, protocol: int) -> Any:
        """Copies and pickles as a module of the former class."""
        state = {name: value for name, value in vars(self).items() if name != "fp8_recipe"}
        return copyreg._reconstructor, (self._former_class, object, None), state


def _computes_in(x: Tensor) -> torch.dtype:
    """Dtype in which a product of ``x`` is computed: autocast's, or its own."""
    is_cast = not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.dtype in _AUTOCAST
    return torch.get_autocast_dtype(x.device.type) if is_cast else x.dtype


class _Multiply(torch.autograd.Function):
    """Keeps the transposed input's codes."""

    @staticmethod
    def forward(ctx, x, weight, source, recipe, side, sides):
        ctx.recipe, ctx.side, ctx.shape = recipe, side, x.shape
        codes, turned = _cast_input(*source, x, recipe.inputs, sides)
        if sides is Sides.BOTH:
            ctx.save_for_backward(weight, *turned[:2])
        else:  # the cast may be another layer's
            ctx.save_for_backward(weight)
        return multiply(codes, weight, recipe.weights, side, x.shape[:-1], recipe.forward_sum)

    @staticmethod
    @differentiable_once(*NO_SECOND_DERIVATIVE)
    def backward(ctx, grad):
        weight, *turned = ctx.saved_tensors
        recipe = ctx.recipe
        for_rows, for_weight = ctx.needs_input_grad[:2]
        grad_rows, grad_weight = _gradients(
            grad,
            weight if for_rows else None,
            Codes(*turned, recipe.inputs) if for_weight else None,
            recipe,
            ctx.side,
        )
        if for_rows and len(ctx.shape) > 2:
            grad_rows = grad_rows.view(ctx.shape)
        return grad_rows, grad_weight, None, None, None, None


class _CompiledMultiply(torch.autograd.Function):
    """Keeps the input. A graph that recomputes it keeps nothing. The compiler removes the copy; it is there for graphs
    that write into the input later.
    """

    @staticmethod
    def forward(ctx, rows, weight, recipe, side):
        ctx.recipe, ctx.side = recipe, side
        ctx.save_for_backward(rows.clone(), weight)
        codes, _ = cast(rows, recipe.inputs, Sides.PLAIN)
        return product(codes, cast_weight(weight, recipe.weights, side), rows.size(0), recipe.forward_sum)

    @staticmethod
    @differentiable_once(*NO_SECOND_DERIVATIVE)
    def backward(ctx, grad):
        rows, weight = ctx.saved_tensors
        recipe = ctx.recipe
        for_rows, for_weight = ctx.needs_input_grad[:2]
        turned = None
        if for_weight:
            _, turned = cast(rows, recipe.inputs, Sides.TRANSPOSED)
        return *_gradients(grad, weight if for_rows else None, turned, recipe, ctx.side), None, None


def _gradients(
    grad: Tensor, weight: Tensor | None, turned: Codes | None, recipe: Recipe, side: Sides
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a product's input and weight: the first needs ``weight``, the second the transposed input."""
    sides = Sides.BOTH
    if weight is None:
        sides = Sides.TRANSPOSED
    elif turned is None:
        sides = Sides.PLAIN
    codes, grad_turned = cast(grad, recipe.gradients, sides, recipe.gradient_format)
    grad_rows = grad_weight = None
    if weight is not None:
        grad_rows = product(codes, cast_weight(weight, recipe.weights, side.other), grad.numel() // grad.size(-1))
    if turned is not None:
        a, b = (grad_turned, turned) if side is Sides.PLAIN else (turned, grad_turned)
        grad_weight = product(a, b, a.values.size(0))
    return grad_rows, grad_weight


class _LastInput(threading.local):
    """The last input that was cast, while it exists: query, key and value layers share theirs."""

    def __init__(self) -> None:
        self.entry: tuple[weakref.ref[Tensor], tuple[int, ...], Block, Sides, Any] | None = None


_last = _LastInput()


def _cast_input(x: Tensor, converted: Tensor, block: Block, sides: Sides) -> tuple[Codes | None, Codes | None]:
    """Casts ``converted``, which has the values of ``x``."""
    if x.is_inference() or isinstance(x, nn.Parameter):  # neither has a version that counts all writes
        return cast(converted, block, sides)
    entry, state = _last.entry, _state_of(x)
    if entry is not None:
        of, cast_state, cast_block, cast_sides, found = entry
        if of() is x and cast_state == state and cast_block is block and cast_sides in (sides, Sides.BOTH):
            return found
    found = cast(converted, block, sides)
    mine = vars(_last)  # of this thread; another one may free the input

    def forget(reference: weakref.ref[Tensor]) -> None:
        if mine["entry"] is not None and mine["entry"][0] is reference:
            mine["entry"] = None

    _last.entry = (weakref.ref(x, forget), state, block, sides, found)
    return found


def _state_of(x: Tensor) -> tuple[int, ...]:
    """Numbers that differ if ``x`` has other values, or if its codes may not have been computed yet."""
    stream = stream_of(x) if x.is_cuda and torch.cuda.is_initialized() else 0
    return x._version, x.untyped_storage()._cdata, stream
