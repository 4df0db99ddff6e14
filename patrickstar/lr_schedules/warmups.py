"""Schedules with a warm-up, constant or decaying afterwards."""

from __future__ import annotations

import enum
import logging
import math
from typing import Any

import torch

from patrickstar.config.nearest import nearest
from patrickstar.lr_schedules.base import PerGroup, Schedule, count_of, per_group

logger = logging.getLogger("patrickstar")


class WarmupType(str, enum.Enum):
    """Shape of the warm-up from 0 at iteration 0 to 1 at iteration n."""

    LOG = "log"
    """log(i + 1) / log(n), which reaches 1 at iteration n - 1."""
    LINEAR = "linear"
    """i / n."""


class WarmupLR(Schedule):
    """Rises from ``warmup_min_lr`` to ``warmup_max_lr``, then stays.

    lr(i) = min_lr + (max_lr - min_lr) * w(i), where w is that of :class:`WarmupType` for n = max(2,
    ``warmup_num_steps``) while i < n, then 1.

    Args:
        optimizer: its groups' ``lr`` is set.
        warmup_min_lr: initial value.
        warmup_max_lr: final value; None: the groups' own ``lr``.
        warmup_num_steps: iterations of the rise; 0 and 1 count as 2.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: iteration to resume from.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        self.warmup_type = _warmup_type(warmup_type)
        self.warmup_num_steps = max(2, count_of(warmup_num_steps, "warmup_num_steps"))
        self.min_lrs = per_group(optimizer, warmup_min_lr, "warmup_min_lr")
        own = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
        self.max_lrs = per_group(optimizer, own if warmup_max_lr is None else warmup_max_lr, "warmup_max_lr")
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        """Returns each group's learning rate at the present iteration."""
        gamma = self._gamma()
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _gamma(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return _warmup(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Rises like :class:`WarmupLR`, then falls linearly.

    From iteration n on, lr(i) = min_lr + (max_lr - min_lr) * max(0, (total_num_steps - i) / max(1, total_num_steps -
    n)).

    Args:
        optimizer: its groups' ``lr`` is set.
        total_num_steps: the iteration at which the rate is back at ``warmup_min_lr``.
        warmup_min_lr: first and last value.
        warmup_max_lr: highest value; None: the groups' own ``lr``.
        warmup_num_steps: iterations of the rise; 0 and 1 count as 2.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: iteration to resume from.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        self.total_num_steps = _total(total_num_steps, warmup_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _gamma(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return super()._gamma()
        return max(
            0.0,
            (self.total_num_steps - self.last_batch_iteration) / max(1, self.total_num_steps - self.warmup_num_steps),
        )


class WarmupCosineLR(Schedule):
    """Scales each group's own learning rate: up, then down along half a cosine (Loshchilov & Hutter 2017, eq. 5).

    With n = max(2, ``warmup_num_steps``) and w of :class:`WarmupType`: lr(-1) = 0; while i < n, lr(i) = lr *
    (warmup_min_ratio + (1 - warmup_min_ratio) * w(i)); then lr(i) = lr * max(0, cos_min_ratio + (1 - cos_min_ratio) *
    (1 + cos(pi * p)) / 2) with p = min(1, (i - n + 1) / max(1, total_num_steps - n)).

    Args:
        optimizer: its groups' ``lr`` is the highest value, and is set.
        total_num_steps: one more than the iteration at which ``cos_min_ratio`` is reached.
        warmup_min_ratio: initial ratio.
        warmup_num_steps: iterations of the rise; 0 and 1 count as 2.
        cos_min_ratio: final ratio.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: iteration to resume from.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        self.warmup_type = _warmup_type(warmup_type)
        self.warmup_num_steps = max(2, count_of(warmup_num_steps, "warmup_num_steps"))
        self.total_num_steps = _total(total_num_steps, warmup_num_steps)
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        super().__init__(optimizer, last_batch_iteration)

    def get_lr_ratio(self) -> float:
        """Returns the present ratio to the groups' own learning rates."""
        iteration = self.last_batch_iteration
        if iteration < 0:
            return 0.0
        if iteration < self.warmup_num_steps:
            rise = _warmup(iteration, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * rise
        progress = min(
            1.0, (iteration - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps)
        )
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)

    def get_lr(self) -> list[float]:
        """Returns each group's learning rate at the present iteration."""
        ratio = self.get_lr_ratio()
        return [float(lr) * ratio for lr in self.base_lrs]


def _total(total_num_steps: Any, warmup_num_steps: Any) -> int:
    total, warmup = count_of(total_num_steps, "total_num_steps"), count_of(warmup_num_steps, "warmup_num_steps")
    if total < warmup:
        logger.warning("total_num_steps (%d) is less than warmup_num_steps (%d)", total, warmup)
    return total


def _warmup_type(name: str) -> WarmupType:
    known = [member.value for member in WarmupType]
    if name not in known:
        raise ValueError(f"warmup_type is {name!r}: did you mean {nearest(str(name), known)!r}? There are {known}")
    return WarmupType(name)


def _warmup(iteration: int, num_steps: int, kind: WarmupType) -> float:
    """Returns the finished share of the rise; 0 before iteration 0."""
    if iteration < 0:
        return 0.0
    return math.log(iteration + 1) / math.log(num_steps) if kind is WarmupType.LOG else iteration / num_steps
