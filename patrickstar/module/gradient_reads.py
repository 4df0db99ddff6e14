"""``param.grad`` of chunked parameters: a read-only copy of the gradient in the chunk."""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING, Protocol

import torch

from patrickstar.module.read_only_copy import ReadOnlyCopy

if TYPE_CHECKING:
    from patrickstar.module.param_handle import ParamHandle


class GradientReader(Protocol):
    """Interface that reads the gradients of an engine's parameters."""

    def read(self, handle: ParamHandle) -> torch.Tensor | None:
        """The parameter's gradient, in its dtype and on its device; None where plain PyTorch has none.

        Raises:
            RuntimeError: the gradient cannot be read now.
        """

    def retain(self, handle: ParamHandle) -> None:
        """Keeps the gradient readable after each step."""

    def drop(self, handle: ParamHandle) -> None:
        """Hides the gradient, as ``param.grad = None`` does."""


class NoGradients:
    """Reader of a module whose engine is not built yet; there are no gradients."""

    def read(self, handle: ParamHandle) -> torch.Tensor | None:
        """Returns None."""
        return None

    def retain(self, handle: ParamHandle) -> None:
        """Does nothing."""

    def drop(self, handle: ParamHandle) -> None:
        """Does nothing."""


def copy_of(gradient: torch.Tensor, name: str) -> ReadOnlyCopy:
    """Wraps ``gradient`` of the parameter ``name``; memory is shared."""
    return ReadOnlyCopy.of(gradient, _refusal(name))


def check_reader(frame: FrameType, name: str) -> None:
    """Raises RuntimeError if the code in ``frame`` would change the gradient of ``name``: PyTorch's clipping, or
    another optimizer.
    """
    clips = frame.f_globals.get("__name__") == "torch.nn.utils.clip_grad"
    if clips or isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
        raise RuntimeError(f"{_refusal(name)}. Parameters are updated by the optimizer that came with the engine")


def _refusal(name: str) -> str:
    return (
        f"the gradient of {name} is in PatrickStar's chunks, and .grad is a copy: it cannot be changed in place. Clip "
        "by the configuration's 'gradient_clipping' or engine.clip_grad_norm_(max_norm), set a gradient by "
        "patrickstar.utils.safe_set_full_grad(param, value)"
    )
