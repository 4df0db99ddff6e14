"""One layer's experts, and the implementations that compute them: a file each.

A file of a peer imports the peer, so that :func:`find` names a peer that is missing. It defines ``IMPLEMENTATION``.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

OURS = "fused"
NAMES = ("fused", "grouped_mm", "liger", "moe_ops", "unsloth", "scattermoe")
"""Modules of this package."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """Experts of transformers, and what they are given."""

    module: nn.Module
    """With ``gate_up_proj`` and ``down_proj``, and biases if ``module.has_bias``."""
    hidden: torch.Tensor
    """``[tokens, hidden size]``"""
    chosen: torch.Tensor
    """``[tokens, experts of a token]``, int64"""
    weights: torch.Tensor
    """``[tokens, experts of a token]``, of the dtype of ``hidden``"""

    @property
    def given(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.hidden, self.chosen, self.weights

    def leaves(self) -> dict[str, torch.Tensor]:
        """The tensors that have gradients."""
        return {"hidden": self.hidden, "weights": self.weights, **dict(self.module.named_parameters())}


def any_configuration(config: Any) -> bool:
    """True: all of Triton's configurations are tried."""
    return True


@dataclasses.dataclass(frozen=True)
class Implementation:
    forward: Callable[[Layer], torch.Tensor]
    products: tuple[str, ...]
    """Parts of the names of kernels that multiply by experts' weights."""
    excluded: str | None = None
    """Why it computes SwiGLU without biases alone; None: it does not."""
    most_elements: int | None = None
    """Elements of all rows beyond which its indices overflow and would reach other memory."""
    preferred: Callable[[Any], bool] = any_configuration
    """True for the few of Triton's configurations that are tried by default."""


def find(name: str) -> Implementation | str:
    """The implementation of ``NAMES``, or why it cannot be had."""
    try:
        return importlib.import_module(f"benchmark.mixtures.{name}").IMPLEMENTATION
    except (ImportError, RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
