"""The engine's configuration under Lightning: merges the user's with decisions of the ``Trainer`` and the module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from patrickstar.config import Config, parse_config
from patrickstar.engine.optimizer_takeover import TakenOver
from patrickstar.integrations.decided_config import (
    Decision,
    precision_decisions,
    with_optimizer,
    with_precision,
    without_decided,
)

_PRECISION_NAMES = {torch.float32: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Settings from Lightning, which a configuration may leave out but not contradict."""

    precision: str
    """The ``Trainer``'s precision, such as ``"bf16-mixed"``."""
    compute_dtype: torch.dtype
    """The dtype of forward and backward for that precision."""
    gradient_clip_val: float | None
    """The ``Trainer``'s largest global norm; None or 0: the configuration decides."""
    optimizer: TakenOver | None
    """The optimizer of ``configure_optimizers``; None: nothing is trained."""


def merge(config: Mapping[str, Any], trainer: TrainerSettings) -> Config:
    """The configuration with the trainer's decisions. Clipping stays with Lightning, whose
    ``configure_gradient_clipping`` the user may override.

    Raises:
        ValueError: configuration and trainer contradict each other, or the configuration is wrong.
    """
    name = _PRECISION_NAMES[trainer.compute_dtype]
    decisions = precision_decisions(name, f'Trainer(precision="{trainer.precision}")')
    if trainer.gradient_clip_val:
        source = "Trainer's gradient_clip_val"
        decisions.append(Decision(key="gradient_clipping", value=trainer.gradient_clip_val, source=source))
    merged = with_precision(without_decided(config, decisions), name)
    return parse_config(merged if trainer.optimizer is None else with_optimizer(merged, trainer.optimizer))
