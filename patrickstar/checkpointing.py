"""``deepspeed.checkpointing``: activation checkpointing by DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as _checkpoint

__all__ = ["checkpoint", "configure", "is_configured"]

_is_configured = False


def configure(*accepted: Any, **options: Any) -> None:
    """Accepted without effect: the model decides on activation checkpointing, and chunks make room for activations."""
    global _is_configured
    _is_configured = True


def is_configured() -> bool:
    """True if :func:`configure` was called in this process."""
    return _is_configured


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """``torch.utils.checkpoint.checkpoint``: ``function`` is recomputed in backward instead of keeping its
    activations.
    """
    return _checkpoint(function, *args, use_reentrant=False)
