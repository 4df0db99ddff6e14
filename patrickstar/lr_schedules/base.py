"""Base of the schedules: iteration count, group options, checks of values."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

PerGroup = float | Sequence[float]
"""One value for all parameter groups, or one per group."""


class Schedule(LRScheduler):
    """Base class; subclasses define the learning rates of an iteration."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int):
        if last_batch_iteration >= 0:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])  # required by PyTorch in this case
        super().__init__(optimizer, last_batch_iteration)

    @property
    def last_batch_iteration(self) -> int:
        """The iteration: -1 until the first :meth:`step`."""
        return self.last_epoch - 1

    def get_lr(self) -> list[float]:
        """Returns each group's learning rate at the present iteration."""
        raise NotImplementedError

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advances by one iteration, or goes to the given one, and sets the groups' options."""
        self._step_count += 1
        self.last_epoch = self.last_epoch + 1 if last_batch_iteration is None else last_batch_iteration + 1
        self._set_options()

    def _set_options(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Returns the present iteration as ``last_batch_iteration``."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to a saved iteration and sets the groups' options. Optimizer and schedule may be loaded in any order."""
        self.last_epoch = int(state_dict["last_batch_iteration"]) + 1
        self._set_options()


def per_group(optimizer: torch.optim.Optimizer, value: Any, name: str) -> list[float]:
    """Returns one value per parameter group; ``name`` is the configuration's key.

    Raises:
        ValueError: a value is not a number, or the list's length differs from the number of groups.
    """
    num_groups = len(optimizer.param_groups)
    values = list(value) if isinstance(value, (list, tuple)) else [value] * num_groups
    for item in values:
        if isinstance(item, bool) or not isinstance(item, (numbers.Real, torch.Tensor)):
            raise ValueError(f"{name} is {value!r}; give a number, or a list with one for each parameter group")
    if len(values) != num_groups:
        raise ValueError(
            f"{name} has {len(values)} values and the optimizer {num_groups} parameter groups; give one value for all, "
            "or one for each"
        )
    return [float(item) for item in values]


def count_of(value: Any, name: str, least: int = 0) -> int:
    """Returns ``value`` as an integer; ``name`` is the configuration's key.

    Raises:
        ValueError: it is not a whole number, or is less than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or value % 1 != 0 or value < least:
        raise ValueError(f"{name} is {value!r}; give a whole number, at least {least}")
    return int(value)
