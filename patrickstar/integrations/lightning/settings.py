"""The engine's configuration under Lightning: what the user's says, and what the ``Trainer`` and the module decide."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from patrickstar.config import AdamConfig, Bf16Config, Config, Fp16Config, OptimizerConfig, OptimizerType, parse_config

UserConfig = Mapping[str, Any] | Config | str | os.PathLike[str] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostSettings:
    """What Lightning says, which a configuration may leave out but not contradict."""

    precision: str
    """The ``Trainer``'s, such as ``"bf16-mixed"``."""
    compute_dtype: torch.dtype
    """What that means."""
    gradient_clip_val: float | None
    """The ``Trainer``'s largest global norm; None or 0: the configuration decides."""
    optimizer_type: OptimizerType | None
    """Of the optimizer that ``configure_optimizers`` returned; None: nothing is trained."""


def read_config(config: UserConfig) -> Mapping[str, Any] | Config | None:
    """A dict as it is, or the JSON file that a path names.

    Raises:
        ValueError: the file is not JSON.
    """
    if not isinstance(config, (str, os.PathLike)):
        return config
    path = Path(config)
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def merge(config: Mapping[str, Any] | Config | None, host: HostSettings) -> Config:
    """The configuration with what the host decides.

    Raises:
        ValueError: both say something, and not the same.
    """
    parsed = parse_config(config)
    _check_precision(parsed, host)
    _check_optimizer(config, parsed, host)
    clipping = host.gradient_clip_val or 0.0
    if clipping > 0 and parsed.gradient_clipping not in (0.0, clipping):
        raise ValueError(
            f"gradient_clipping is {parsed.gradient_clipping} in the configuration and Trainer(gradient_clip_val="
            f"{host.gradient_clip_val}); leave one of them out"
        )
    # Not passed on: Lightning clips by itself, through configure_gradient_clipping, which the user may override.
    dtype = host.compute_dtype
    return dataclasses.replace(
        parsed,
        gradient_clipping=0.0 if clipping > 0 else parsed.gradient_clipping,
        fp16=(parsed.fp16 or Fp16Config()) if dtype == torch.float16 else None,
        bf16=(parsed.bf16 or Bf16Config()) if dtype == torch.bfloat16 else None,
        optimizer=dataclasses.replace(parsed.optimizer, type=host.optimizer_type or parsed.optimizer.type),
    )


def _check_precision(parsed: Config, host: HostSettings) -> None:
    for section, dtype, remedy in (
        ("fp16", torch.float16, "16-mixed"),
        ("bf16", torch.bfloat16, "bf16-mixed"),
    ):
        if getattr(parsed, section) is not None and host.compute_dtype != dtype:
            raise ValueError(
                f'the configuration has {section}, but the Trainer precision="{host.precision}"; give '
                f'Trainer(precision="{remedy}"), or leave {section} out'
            )


def _check_optimizer(config: Mapping[str, Any] | Config | None, parsed: Config, host: HostSettings) -> None:
    if host.optimizer_type is None:
        return
    said = "type" in _section(config) or parsed.optimizer.type is not OptimizerConfig().type
    if said and parsed.optimizer.type is not host.optimizer_type:
        raise ValueError(
            f"optimizer.type is {parsed.optimizer.type.value} in the configuration and configure_optimizers returned "
            f"torch.optim.{host.optimizer_type.value}; leave optimizer.type out"
        )
    unsaid = dataclasses.replace(AdamConfig(), use_hybrid_adam=parsed.optimizer.params.use_hybrid_adam)
    if parsed.optimizer.params != unsaid:
        raise ValueError(
            "optimizer.params of the configuration gives options that configure_optimizers gives too; leave all of "
            "them out but use_hybrid_adam"
        )


def _section(config: Mapping[str, Any] | Config | None) -> Mapping[str, Any]:
    section = config.get("optimizer") if isinstance(config, Mapping) else None
    return section if isinstance(section, Mapping) else {}
