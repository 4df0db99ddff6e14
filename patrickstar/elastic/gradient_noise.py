"""The gradient noise scale, from squared norms of parts of a step's gradient.

The expected squared norm of the mean gradient of ``b`` samples is ``G + S / b``: ``G`` is that of the true gradient,
``S`` the trace of one sample's covariance. Norms at two sizes give unbiased estimates of both. The noise scale is ``S /
G`` (McCandlish et al., 2018, arXiv:1812.06162, appendix A). A ratio of single estimates is biased, so both are averaged
over steps first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

_DECAY = 0.98  # of a step: averages cover about fifty steps
_LEAST_STEPS = 20


@dataclasses.dataclass(frozen=True)
class GradientParts:
    """Squared norms of one step's gradient, without the loss scale. Parts have equally many samples."""

    num_parts: int
    """Micro-batches of all ranks."""
    part_squares: float
    """Mean over ranks of the squared norm of the first micro-batch's mean gradient."""
    step_squares: float
    """Squared norm of the step's mean gradient."""


class GradientNoise:
    """Moving averages of the gradient's squared norm and of its variance."""

    def __init__(self) -> None:
        self._gradient = self._variance = 0.0
        self._num_steps = 0
        self.scale: float | None = None
        """The noise scale in samples: the last one while the gradient is too small to measure. None: unknown so far."""

    def note(self, parts: GradientParts | None, global_batch: int) -> None:
        """Takes one step. Nothing follows from a step of one part, or without finite norms."""
        if parts is None or parts.num_parts < 2:
            return
        whole, part = float(global_batch), global_batch / parts.num_parts
        gradient = (whole * parts.step_squares - part * parts.part_squares) / (whole - part)
        variance = (parts.part_squares - parts.step_squares) / (1 / part - 1 / whole)
        self._gradient = _DECAY * self._gradient + (1 - _DECAY) * gradient
        self._variance = _DECAY * self._variance + (1 - _DECAY) * variance
        self._num_steps += 1
        if self._num_steps >= _LEAST_STEPS and min(self._gradient, self._variance) > 0:
            self.scale = self._variance / self._gradient

    def state_dict(self) -> dict[str, Any]:
        """The averages, equal on all ranks."""
        return {
            "gradient": self._gradient,
            "variance": self._variance,
            "num_steps": self._num_steps,
            "scale": self.scale,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the averages."""
        self._gradient, self._variance = state["gradient"], state["variance"]
        self._num_steps, self.scale = state["num_steps"], state["scale"]
