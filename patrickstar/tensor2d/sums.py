"""Sums over a line of ranks that autograd knows."""

from __future__ import annotations

from typing import Any

import torch

from patrickstar.tensor2d.lines import Line
from patrickstar.tensor2d.panels import sum_dtype


def replicated(parameter: torch.Tensor, line: Line) -> torch.Tensor:
    """A parameter that all ranks of ``line`` have, each of which uses it for activations of its own: its gradient is
    the sum of theirs, in float32 for 16-bit types and rounded once, with the same bits on all of them.
    """
    return _Replicated.apply(parameter, line) if line.size > 1 else parameter


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, line: Line) -> torch.Tensor:
        ctx.line = line
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        return ctx.line.sum(grad.to(sum_dtype(grad.dtype))).to(grad.dtype), None


def total_for_everybody(value: torch.Tensor, line: Line) -> torch.Tensor:
    """The sum of ``value`` over ``line``, of which each rank computes gradients as if it were alone: those of the same
    scalar, with respect to what is its own.
    """
    return _Total.apply(value, line) if line.size > 1 else value


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, line: Line) -> torch.Tensor:
        return line.sum(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        return grad, None
