"""Experts whose grouped products run in 8 bits: forward, gradients of tokens, gradients of weights.

    module.fp8_recipe = RECIPES[Fp8Recipe.ROWWISE]   # by Fp8Layers, for experts that can
    if multiplies_in_8_bits(module, hidden, num_rows, num_experts):
        out = mixture(hidden, weights, up, down, routing)

Tokens are cast once, and their codes go to the rows of their experts. SwiGLU and its gradient, and the gradient of the
weighted sum, are cast as they are computed. The backward keeps codes of tokens and of SwiGLU, and ``gate_up``.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from patrickstar import _C
from patrickstar.choices import Fp8Recipe
from patrickstar.differentiation import differentiable_once
from patrickstar.fp8.casting import TILE, Block, Codes, device_of, stream_of
from patrickstar.fp8.grouped import (
    Groups,
    cast_rows,
    cast_turned_weights,
    cast_weights,
    empty_codes,
    gathered,
    multiply,
    multiply_columns,
    turn,
)
from patrickstar.fp8.linear import NO_SECOND_DERIVATIVE, RECIPES, Recipe
from patrickstar.module import expert_rows
from patrickstar.module.expert_rows import Routing

LEAST_ROWS = 2048
"""Rows per expert, on average. Fewer are no faster than in bfloat16: casts of weights take as long as products gain,
and PyTorch's kernels of exact sums spill registers unless two sizes of a product are 2048 or more
(``benchmark/results/h200-fp8-experts.txt``).
"""
_CAPABILITY = (9, 0)
_MOST_DIFFERENCE = 0.03
"""Largest distance of results and gradients from the host's, by norm. Codes depend on an exponential's last bit."""


@functools.cache
def exclusion_of_experts(device: torch.device) -> str | None:
    """Reason why experts on ``device`` do not multiply in 8 bits, by a trial; None: they do. The CPU emulates it."""
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability != _CAPABILITY:  # another GPU's error may end the process' use of it
        return f"experts, whose products in 8 bits PyTorch has for Hopper, not for {torch.cuda.get_device_name(device)}"
    try:
        found, expected = trial(device), trial(torch.device("cpu"))
    except RuntimeError as error:
        return f"experts, whose products in 8 bits PyTorch {torch.__version__} refuses: {str(error).splitlines()[0]}"
    pairs = zip(found, expected, strict=True)
    difference = max(((a.cpu() - b).norm() / b.norm()).nan_to_num(nan=float("inf")).item() for a, b in pairs)
    if difference > _MOST_DIFFERENCE:
        return f"experts, whose results in 8 bits with PyTorch {torch.__version__} differ by {difference:.2g}"
    return None


def trial(device: torch.device) -> list[Tensor]:
    """Results and gradients of a mixture, in float32. Of its five experts one has no rows, and one a few."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    num_tokens, hidden, width = 300, 2 * TILE, TILE
    numbers = torch.arange(num_tokens, device="cpu")
    chosen = torch.stack([torch.zeros_like(numbers), 2 + numbers % 2], 1)
    chosen[:7, 0] = 4
    given = (normal(num_tokens, hidden), normal(num_tokens, 2), normal(5, 2 * width, hidden), normal(5, hidden, width))
    scales, dtypes = (1.0, 1.0, 0.1, 0.1), (torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16)
    with torch.enable_grad():
        inputs = [
            (value * scale).to(device, dtype).requires_grad_()
            for value, scale, dtype in zip(given, scales, dtypes, strict=True)
        ]
        out = mixture(*inputs, Routing.of(chosen.to(device), 5), RECIPES[Fp8Recipe.ROWWISE])
        grads = torch.autograd.grad(out, inputs, normal(num_tokens, hidden).to(out))
    return [value.detach().float() for value in (out, *grads)]


def multiplies_in_8_bits(module: nn.Module, hidden: Tensor, num_rows: int, num_experts: int) -> bool:
    """True if this call of fused experts multiplies in 8 bits.

    Args:
        hidden: of the dtype of the weights.
        num_rows: of all experts here together.
        num_experts: here.
    """
    has_rows = num_rows >= LEAST_ROWS * num_experts
    return "fp8_recipe" in vars(module) and hidden.dtype is torch.bfloat16 and has_rows


def mixture(hidden: Tensor, weights: Tensor, up: Tensor, down: Tensor, routing: Routing, recipe: Recipe) -> Tensor:
    """Each token's weighted sum over its experts.

    Args:
        hidden: ``[tokens, hidden size]``, bfloat16.
        weights: ``[tokens, chosen experts]``, bfloat16 or float32.
        up: gate and up projections, ``[experts, 2 * intermediate size, hidden size]``.
        down: ``[experts, hidden size, intermediate size]``.
        routing: of the tokens.
    """
    return _Mixture.apply(hidden, weights, up, down, routing, recipe)


def products(rows: Tensor, up: Tensor, down: Tensor, ends: Tensor, recipe: Recipe) -> Tensor:
    """Rows of tokens, by expert, through their experts; ``ends``: int32, by expert."""
    return _Products.apply(rows, up, down, ends, recipe)


class _Mixture(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weights, up, down, routing, recipe):
        order, positions, ends = routing.order, routing.positions, routing.offsets
        tokens = cast_rows(hidden)
        groups = Groups.of(ends, order.numel())
        rows = gathered(tokens, order // positions.size(1))
        gate_up, gated, rows = _multiply(rows, up, down, groups, recipe)
        ctx.groups = groups.num_tiles
        ctx.save_for_backward(
            up, down, weights, order, positions, ends, groups.padded_ends, gate_up, rows, *tokens[:2], *gated[:2]
        )
        return expert_rows.sum_rows(rows, positions, weights)

    @staticmethod
    @differentiable_once(*NO_SECOND_DERIVATIVE)
    def backward(ctx, grad):
        up, down, weights, order, positions, ends, padded_ends, gate_up, rows, *codes = ctx.saved_tensors
        groups = Groups(ends, padded_ends, ctx.groups)
        sources = order // positions.size(1)
        of_rows = weights.flatten()[order].float()
        grad_codes, by_row = _cast_weighted(grad.contiguous(), rows, sources, of_rows)
        for_hidden, for_weights, *for_experts = ctx.needs_input_grad[:4]
        grad_rows, grad_up, grad_down = _multiply_back(
            grad_codes, up, down, groups, gate_up, _lines(codes[:2]), _lines(codes[2:]), sources,
            for_hidden, *for_experts,
        )  # fmt: skip
        grad_hidden = grad_weights = None
        if for_hidden:
            grad_hidden = expert_rows.sum_rows(grad_rows, positions, None)
        if for_weights:
            grad_weights = torch.where(positions >= 0, by_row[positions.clamp(min=0)], 0.0).to(weights.dtype)
        return grad_hidden, grad_weights, grad_up, grad_down, None, None


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, up, down, ends, recipe):
        codes = cast_rows(rows)
        groups = Groups.of(ends, rows.size(0))
        gate_up, gated, found = _multiply(codes, up, down, groups, recipe)
        ctx.groups = groups.num_tiles
        ctx.save_for_backward(up, down, ends, groups.padded_ends, gate_up, *codes[:2], *gated[:2])
        return found

    @staticmethod
    @differentiable_once(*NO_SECOND_DERIVATIVE)
    def backward(ctx, grad):
        up, down, ends, padded_ends, gate_up, *codes = ctx.saved_tensors
        groups = Groups(ends, padded_ends, ctx.groups)
        found = _multiply_back(
            cast_rows(grad), up, down, groups, gate_up, _lines(codes[:2]), _lines(codes[2:]), None,
            *ctx.needs_input_grad[:3],
        )  # fmt: skip
        return *found, None, None


def _lines(codes: list[Tensor]) -> Codes:
    return Codes(*codes, Block.LINE)


def _multiply(rows: Codes, up: Tensor, down: Tensor, groups: Groups, recipe: Recipe) -> tuple[Tensor, Codes, Tensor]:
    """``gate_up``, codes of SwiGLU, and the results."""
    gate_up = multiply(rows, cast_weights(up), groups, recipe.forward_sum)
    gated = _cast_swiglu(gate_up)
    return gate_up, gated, multiply(gated, cast_weights(down), groups, recipe.forward_sum)


def _multiply_back(
    grad: Codes, up: Tensor, down: Tensor, groups: Groups, gate_up: Tensor, tokens: Codes, gated: Codes,
    sources: Tensor | None, for_rows: bool, for_up: bool, for_down: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of the rows, of ``up`` and of ``down``, as far as they are needed."""
    grad_rows = grad_up = grad_down = None
    if for_down:
        grad_down = multiply_columns(turn(grad, groups), turn(gated, groups), groups)
    if for_rows or for_up:
        of_gated = multiply(grad, cast_turned_weights(down), groups)
        of_gate_up = _cast_swiglu_gradient(gate_up, of_gated)
        del of_gated
        if for_up:
            grad_up = multiply_columns(turn(of_gate_up, groups), turn(tokens, groups, sources), groups)
        if for_rows:
            grad_rows = multiply(of_gate_up, cast_turned_weights(up), groups)
    return grad_rows, grad_up, grad_down


# ---- Casts of what the rows' kernels compute -----------------------------------------------------------


def _cast_swiglu(gate_up: Tensor) -> Codes:
    """``cast_rows(swiglu(gate_up))``."""
    return _lines(_swiglu(gate_up.contiguous()))


def _cast_swiglu_gradient(gate_up: Tensor, grad: Tensor) -> Codes:
    """``cast_rows(swiglu_backward(gate_up, grad))``."""
    return _lines(_swiglu_gradient(gate_up.contiguous(), grad.contiguous()))


def _cast_weighted(grad: Tensor, rows: Tensor, tokens: Tensor, weights: Tensor) -> tuple[Codes, Tensor]:
    """``scale_rows(grad, rows, tokens, weights)``, of which the first result is cast."""
    *codes, grad_weights = _weighted(grad, rows, tokens, weights)
    return _lines(codes), grad_weights


_library = torch.library.Library("patrickstar", "FRAGMENT")
_library.define("cast_fp8_swiglu(Tensor gate_up) -> (Tensor, Tensor)")
_library.define("cast_fp8_swiglu_gradient(Tensor gate_up, Tensor grad) -> (Tensor, Tensor)")
_library.define(
    "cast_fp8_weighted(Tensor grad, Tensor rows, Tensor tokens, Tensor weights) -> (Tensor, Tensor, Tensor)"
)
_swiglu = torch.ops.patrickstar.cast_fp8_swiglu.default
_swiglu_gradient = torch.ops.patrickstar.cast_fp8_swiglu_gradient.default
_weighted = torch.ops.patrickstar.cast_fp8_weighted.default


@torch.library.impl(_library, "cast_fp8_swiglu", "CPU")
def _(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    return cast_rows(expert_rows.swiglu(gate_up))[:2]


@torch.library.impl(_library, "cast_fp8_swiglu", "Meta")
def _(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    return empty_codes(gate_up, gate_up.size(0), gate_up.size(1) // 2)


@torch.library.impl(_library, "cast_fp8_swiglu", "CUDA")
def _(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = empty_codes(gate_up, gate_up.size(0), gate_up.size(1) // 2)
    with device_of(gate_up):
        _C.fp8.cuda_cast_swiglu(
            gate_up.data_ptr(), *codes.shape, codes.data_ptr(), scales.data_ptr(), stream_of(gate_up)
        )  # fmt: skip
    return codes, scales


@torch.library.impl(_library, "cast_fp8_swiglu_gradient", "CPU")
def _(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return cast_rows(expert_rows.swiglu_backward(gate_up, grad))[:2]


@torch.library.impl(_library, "cast_fp8_swiglu_gradient", "Meta")
def _(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return empty_codes(gate_up, *gate_up.shape)


@torch.library.impl(_library, "cast_fp8_swiglu_gradient", "CUDA")
def _(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = empty_codes(gate_up, *gate_up.shape)
    with device_of(gate_up):
        _C.fp8.cuda_cast_swiglu_gradient(
            gate_up.data_ptr(), grad.data_ptr(), *codes.shape, codes.data_ptr(), scales.data_ptr(), stream_of(gate_up)
        )  # fmt: skip
    return codes, scales


@torch.library.impl(_library, "cast_fp8_weighted", "CPU")
def _(grad: Tensor, rows: Tensor, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grad_rows, grad_weights = expert_rows.scale_rows(grad, rows, tokens, weights)
    return *cast_rows(grad_rows)[:2], grad_weights


@torch.library.impl(_library, "cast_fp8_weighted", "Meta")
def _(grad: Tensor, rows: Tensor, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return *empty_codes(rows, *rows.shape), weights.new_empty(rows.size(0))


@torch.library.impl(_library, "cast_fp8_weighted", "CUDA")
def _(grad: Tensor, rows: Tensor, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (codes, scales), grad_weights = empty_codes(rows, *rows.shape), torch.empty_like(weights)
    with device_of(rows):
        _C.fp8.cuda_cast_weighted(
            grad.data_ptr(), rows.data_ptr(), tokens.data_ptr(), weights.data_ptr(), grad_weights.data_ptr(),
            *codes.shape, codes.data_ptr(), scales.data_ptr(), stream_of(rows),
        )  # fmt: skip
    return codes, scales, grad_weights
