"""Comparison of losses and gradients that were computed in two ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import nn

_LOSS_TOLERANCE = 5e-6
_INFLUENCE_TOLERANCE = 0.02
_GRADIENT_TOLERANCE = 2e-4
_ROUNDING = 2e-5
"""Allowed difference of any gradient, as a share of the largest gradient's norm: some gradients are nearly zero."""
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Computed:
    """Results of one computation."""

    loss: float
    other_loss: float
    """Loss with another first token."""
    gradients: Mapping[str, torch.Tensor]
    """Gradients by the names in the unchanged module."""


def not_callable(name: str, module: nn.Module, error: Exception, beside: str, key: str) -> ValueError:
    """Error of a module whose unchanged copy could not be called, to be compared with ``beside``."""
    return ValueError(
        f"{name} ({type(module).__name__}) could not be called on the host to compare it with {beside} "
        f'({type(error).__name__}: {error}); leave {key} out, or set "prove_rewrites" to false where you know it to be '
        "right"
    )


def not_equal(name: str, module: nn.Module, found: list[str], rewritten: str, key: str) -> ValueError:
    """Error of a module that computes something else once ``rewritten``; ``found``: :func:`differences`."""
    return ValueError(
        f"{name} ({type(module).__name__}) computes something else {rewritten}: {'; '.join(found)}. Leave {key} out "
        '(or set "prove_rewrites" to false where you know that this is no fault)'
    )


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of the trained parameters by name."""
    return {name: gradient_of(param) for name, param in module.named_parameters() if param.requires_grad}


def gradient_of(param: nn.Parameter) -> torch.Tensor:
    """The gradient, or zeros if there is none."""
    return torch.zeros_like(param) if param.grad is None else param.grad.detach()


def differences(plain: Computed, rewritten: Computed) -> list[str]:
    """A text for each difference beyond rounding; empty: none."""
    found = []
    if not abs(plain.loss - rewritten.loss) <= _LOSS_TOLERANCE * abs(plain.loss):
        found.append(f"the loss of a few tokens is {rewritten.loss:.7g} instead of {plain.loss:.7g}")
    change, other_change = plain.other_loss - plain.loss, rewritten.other_loss - rewritten.loss
    allowed = _INFLUENCE_TOLERANCE * abs(change) + _LOSS_TOLERANCE * abs(plain.loss)
    if not abs(change - other_change) <= allowed:
        found.append(f"another first token changes it by {other_change:.3g} instead of {change:.3g}")
    norms = {name: gradient.norm().item() for name, gradient in plain.gradients.items()}
    rounding = _ROUNDING * max(norms.values(), default=0.0)
    wrong = {}
    for name, norm in norms.items():
        other = rewritten.gradients.get(name)
        gap = norm if other is None else (plain.gradients[name] - other).norm().item()
        if not gap <= _GRADIENT_TOLERANCE * norm + rounding:
            wrong[name] = gap / max(norm, rounding)
    if wrong:
        names = sorted(wrong, key=wrong.__getitem__, reverse=True)
        shown = ", ".join(f"{name} by {wrong[name]:.2g} of its norm" for name in names[:_SHOWN])
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        found.append(f"gradients differ: {shown}{more}")
    return found
