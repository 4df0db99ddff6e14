"""The loss scaler as DeepSpeed's scripts read it off an optimizer."""

from __future__ import annotations

from patrickstar import _C
from patrickstar.config import Fp16Config


class LossScaling:
    """What a scaler does at present, by DeepSpeed's names; steps alone change it.

    Args:
        scaler: the session's; None without float16, where the scale is 1.
        config: the section that it was made of.
    """

    scale_factor = 2.0
    """What a dynamic scale is multiplied and divided by."""

    def __init__(self, scaler: _C.optim.LossScaler | None, config: Fp16Config | None):
        self._scaler = scaler
        options = config or Fp16Config()
        self.scale_window = options.loss_scale_window
        """Steps without overflow after which a dynamic scale grows."""
        self.min_scale = self.min_loss_scale = options.min_loss_scale
        """A dynamic scale falls no further."""
        self.delayed_shift = options.hysteresis
        """Which overflow is the first to lower a dynamic scale."""
        self.consecutive_hysteresis = options.consecutive_hysteresis
        """Whether a step without overflow restores that count."""

    @property
    def cur_scale(self) -> float:
        """What the loss is multiplied by."""
        return self._scaler.scale if self._scaler is not None else 1.0

    @property
    def loss_scale(self) -> float:
        """The same as :attr:`cur_scale`, by another of DeepSpeed's names."""
        return self.cur_scale

    @property
    def use_grad_scaling(self) -> bool:
        """Whether gradients are scaled at all: in float16."""
        return self._scaler is not None

    @property
    def dynamic(self) -> bool:
        """Whether the scale follows overflows."""
        return self._scaler is not None and self._scaler.is_dynamic

    @property
    def dynamic_loss_scale(self) -> bool:
        """The same as :attr:`dynamic`, by another of DeepSpeed's names."""
        return self.dynamic

    @property
    def cur_iter(self) -> int:
        """Steps that a dynamic scale has seen."""
        return self._count("iteration", 0)

    @property
    def last_overflow_iter(self) -> int:
        """The step of the last overflow; -1: there was none."""
        return self._count("last_overflow_iteration", -1)

    @property
    def cur_hysteresis(self) -> int:
        """How many overflows are left until the scale falls, that one included."""
        return self._count("hysteresis_left", self.delayed_shift)

    def _count(self, name: str, without: int) -> int:
        return int(self._scaler.state()[name]) if self._scaler is not None else without
