"""Differentiable sums over a mesh dimension."""

from __future__ import annotations

from typing import Any

import torch

from patrickstar.tensor2d.lines import Line
from patrickstar.tensor2d.panels import sum_dtype


def replicated(parameter: torch.Tensor, line: Line) -> torch.Tensor:
    """A replicated parameter that each rank uses for its own activations. Its gradient is summed over ranks, in float32
    for 16-bit types, and rounded once; all ranks get the same bits.
    """
    return _Replicated.apply(line, parameter)[0] if line.size > 1 else parameter


def replicated_together(
    parameters: tuple[torch.Tensor, torch.Tensor | None], line: Line
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`replicated` for a weight and an optional bias of one shape, in one exchange."""
    weight, bias = parameters
    if bias is None or line.size == 1:
        return replicated(weight, line), bias
    return _Replicated.apply(line, weight, bias)


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, line: Line, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.line = line
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):  # type: ignore[override]
        wide = sum_dtype(grads[0].dtype)
        total = ctx.line.sum(torch.stack([grad.to(wide) for grad in grads]))
        return None, *(part.to(grad.dtype) for part, grad in zip(total, grads, strict=True))


def world_total(value: torch.Tensor, line: Line) -> torch.Tensor:
    """The sum of ``value`` over ``line``. Each rank's backward computes the gradients of that scalar with respect to
    its own inputs.
    """
    return _Total.apply(value, line) if line.size > 1 else value


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, line: Line) -> torch.Tensor:
        return line.sum(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        return grad, None


def gathered(value: torch.Tensor, line: Line, dim: int) -> torch.Tensor:
    """All-gathers ``value`` along ``dim``. Ranks compute the same scalar of the result, and each gets the gradient of
    its own part.
    """
    return _Gathered.apply(value, line, dim) if line.size > 1 else value


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, line: Line, dim: int) -> torch.Tensor:
        ctx.line, ctx.dim = line, dim
        return torch.cat(line.gather(value), dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        return grad.chunk(ctx.line.size, ctx.dim)[ctx.line.rank], None, None
