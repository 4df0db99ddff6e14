"""Schedules with rising learning rates: range test and one cycle."""

from __future__ import annotations

import logging
import math

import torch

from patrickstar.lr_schedules.base import PerGroup, Schedule, count_of, per_group

logger = logging.getLogger("patrickstar")

_BETA2 = 0.99


class LRRangeTest(Schedule):
    """Raises the learning rate without limit, to find the highest useful value (Smith 2018, section 4.1).

    lr(i) = min_lr * (1 + step_rate * (i + 1) / step_size), the quotient rounded down with ``staircase``.

    Args:
        optimizer: its groups' ``lr`` is set.
        lr_range_test_min_lr: initial value.
        lr_range_test_step_size: iterations in which it grows by ``min_lr * step_rate``.
        lr_range_test_step_rate: that factor.
        lr_range_test_staircase: grow only once per ``step_size`` iterations.
        last_batch_iteration: iteration to resume from.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ):
        self.min_lrs = per_group(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = count_of(lr_range_test_step_size, "lr_range_test_step_size", least=1)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        """Returns each group's learning rate at the present iteration."""
        interval = (self.last_batch_iteration + 1) / self.step_size
        factor = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [lr * factor for lr in self.min_lrs]


class OneCycle(Schedule):
    """One cycle up and down, then decay; momentum moves in the opposite direction (Smith 2018, sections 4.2 and 4.3).

    With t = i + 1, up = ``cycle_first_step_size``, down = ``cycle_second_step_size`` and s the height: t / up while t
    <= up, then (up + down - t) / down (rounded down to stairs if configured):

    lr(i) = min_lr + (max_lr - min_lr) * s, and momentum(i) = max_mom - (max_mom - min_mom) * s, while i < up + down;
    then lr(i) = min_lr / (1 + decay_lr_rate * d) and momentum(i) = max_mom * (1 + decay_mom_rate * d) with d = (i - up
    - down + 1) / decay_step_size.

    As in DeepSpeed, the second beta is always 0.99. The first optimizer step runs with ``cycle_min_mom``, although
    :meth:`get_mom` returns the formula's value.

    Args:
        optimizer: its groups' ``lr`` and ``betas`` are set.
        cycle_min_lr: at both ends of the cycle.
        cycle_max_lr: in its middle.
        decay_lr_rate: of the decay after the cycle.
        cycle_first_step_size: rising iterations.
        cycle_second_step_size: falling iterations; None: as many.
        cycle_first_stair_count: stairs of the rise; 0 or less: every iteration rises.
        cycle_second_stair_count: stairs of the fall; None: as many.
        decay_step_size: iterations per decay interval; 0: no decay.
        cycle_momentum: set the momentum; ignored for optimizers without ``betas``.
        cycle_min_mom: first beta in the middle of the cycle.
        cycle_max_mom: first beta at its ends.
        decay_mom_rate: growth of the momentum after the cycle.
        last_batch_iteration: iteration to resume from.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ):
        self.first_step_size = float(cycle_first_step_size)
        down = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self.second_step_size = float(down)
        if not self.first_step_size > 0:
            raise ValueError(f"cycle_first_step_size is {cycle_first_step_size}; give more than 0 iterations")
        if not self.second_step_size >= 0:
            raise ValueError(f"cycle_second_step_size is {cycle_second_step_size}; give at least 0 iterations")
        self.total_size = self.first_step_size + self.second_step_size
        self.step_ratio = self.first_step_size / self.total_size
        self.first_stair_count = count_of(cycle_first_stair_count, "cycle_first_stair_count", least=-1)
        self.second_stair_count = (
            self.first_stair_count
            if cycle_second_stair_count is None
            else count_of(cycle_second_stair_count, "cycle_second_stair_count", least=-1)
        )
        self.min_lrs = per_group(optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = per_group(optimizer, cycle_max_lr, "cycle_max_lr")
        self.min_moms = [(mom, _BETA2) for mom in per_group(optimizer, cycle_min_mom, "cycle_min_mom")]
        self.max_moms = [(mom, _BETA2) for mom in per_group(optimizer, cycle_max_mom, "cycle_max_mom")]
        self.decay_step_size = decay_step_size
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self._cycles_momentum = cycle_momentum and "betas" in optimizer.defaults
        if cycle_momentum and not self._cycles_momentum:
            logger.warning(
                "OneCycle leaves momentum alone: %s has no betas; cycle_momentum=False silences this",
                type(optimizer).__name__,
            )
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        """Returns each group's learning rate at the present iteration."""
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        return [low / (1 + self.decay_lr_rate * self._decay_intervals()) for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Returns each group's betas at the present iteration by the formula; None if momentum is not set.

        Raises:
            ValueError: ``decay_mom_rate`` raised a momentum to 1; Adam would divide by zero.
        """
        if not self._cycles_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            moms = [high - (high - low) * height for low, high in zip(self._lowest(), self._highest(), strict=True)]
        else:
            moms = [high * (1 + self.decay_mom_rate * self._decay_intervals()) for high in self._highest()]
        self._check_moms(moms)
        return [(mom, _BETA2) for mom in moms]

    def _lowest(self) -> list[float]:
        return [beta1 for beta1, _ in self.min_moms]

    def _highest(self) -> list[float]:
        return [beta1 for beta1, _ in self.max_moms]

    def _check_moms(self, moms: list[float]) -> None:
        if max(moms) >= 1:
            raise ValueError(
                f"OneCycle's momentum is {max(moms):g} at iteration {self.last_batch_iteration} and must stay below 1; "
                f"lower cycle_max_mom or decay_mom_rate ({self.decay_mom_rate:g})"
            )

    def _set_options(self) -> None:
        betas = self._betas_of_groups()
        super()._set_options()
        if betas is not None:
            for group, pair in zip(self.optimizer.param_groups, betas, strict=True):
                group["betas"] = pair

    def _betas_of_groups(self) -> list[tuple[float, float]] | None:
        if self.last_batch_iteration >= 0 or not self._cycles_momentum:
            return self.get_mom()
        self._check_moms(self._lowest())
        return self.min_moms

    def _height(self) -> float:
        t = (self.last_batch_iteration + 1) % self.total_size
        if t <= self.first_step_size:
            length, left, stairs = self.first_step_size, t, self.first_stair_count
        else:
            length, left, stairs = self.second_step_size, self.total_size - t, self.second_stair_count
        return math.floor(left * stairs / length) / stairs if stairs > 0 else left / length

    def _decay_intervals(self) -> float:
        if self.decay_step_size == 0:
            return 0.0
        return (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size
