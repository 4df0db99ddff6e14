"""The loss scaler's attributes that DeepSpeed scripts read from an optimizer."""

from __future__ import annotations

from patrickstar import _C
from patrickstar.config import Fp16Config


class LossScaling:
    """Read-only view of a loss scaler under DeepSpeed's names.

    Args:
        scaler: the session's; None without float16, where the scale is 1.
        config: the scaler's configuration section.
    """

    scale_factor = 2.0
    """Factor by which a dynamic scale changes."""

    def __init__(self, scaler: _C.optim.LossScaler | None, config: Fp16Config | None):
        self._scaler = scaler
        options = config or Fp16Config()
        self.scale_window = options.loss_scale_window
        """Steps without overflow after which a dynamic scale grows."""
        self.min_scale = self.min_loss_scale = options.min_loss_scale
        """Lower limit of a dynamic scale."""
        self.delayed_shift = options.hysteresis
        """Number of overflows until a dynamic scale falls."""
        self.consecutive_hysteresis = options.consecutive_hysteresis
        """True: each step without overflow restores that number."""

    @property
    def cur_scale(self) -> float:
        """Factor of the loss."""
        return self._scaler.scale if self._scaler is not None else 1.0

    @property
    def loss_scale(self) -> float:
        """Same as :attr:`cur_scale`."""
        return self.cur_scale

    @property
    def use_grad_scaling(self) -> bool:
        """True in float16, where gradients are scaled."""
        return self._scaler is not None

    @property
    def dynamic(self) -> bool:
        """True if the scale reacts to overflows."""
        return self._scaler is not None and self._scaler.is_dynamic

    @property
    def dynamic_loss_scale(self) -> bool:
        """Same as :attr:`dynamic`."""
        return self.dynamic

    @property
    def cur_iter(self) -> int:
        """Steps that a dynamic scale has seen."""
        return self._count("iteration", 0)

    @property
    def last_overflow_iter(self) -> int:
        """Step of the last overflow; -1 without one."""
        return self._count("last_overflow_iteration", -1)

    @property
    def cur_hysteresis(self) -> int:
        """Overflows until the scale falls, that overflow included."""
        return self._count("hysteresis_left", self.delayed_shift)

    def _count(self, name: str, without: int) -> int:
        return int(self._scaler.state()[name]) if self._scaler is not None else without
