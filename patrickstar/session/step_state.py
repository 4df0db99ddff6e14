"""Records of a step: how far it has come, its decision, its outcome, and how a session reaches its optimizer.

The core knows the running call and whether gradients are pending (``_C.StepState``). A finished forward leaves nothing
in the core, so forwards that wait for their backward are recorded here.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import threading
from collections.abc import Callable
from typing import Any

from patrickstar.elastic.gradient_noise import GradientParts
from patrickstar.optimizer.core_options import CoreOptions


class StepStage(enum.Enum):
    """The last call of a step."""

    IDLE = "before the first forward of a step"
    FORWARDED = "after a forward, before its backward"
    BACKWARDED = "after a backward, before the step"


class StepCourse:
    """The stage of one engine, and the thread that made the last call."""

    def __init__(self) -> None:
        self.stage = StepStage.IDLE
        self._thread = 0

    def note(self, stage: StepStage) -> None:
        """Records a forward or backward that finished on this thread."""
        self.stage, self._thread = stage, threading.get_ident()

    def end(self) -> None:
        """Records that the step is over, or dropped."""
        self.stage = StepStage.IDLE

    def forget_gradients(self) -> None:
        """Records dropped gradients. A forward that waits for its backward stays."""
        if self.stage is StepStage.BACKWARDED:
            self.end()

    @property
    def is_here(self) -> bool:
        """True between a forward and its step, if this thread made the last call."""
        return self.stage is not StepStage.IDLE and self._thread == threading.get_ident()


@dataclasses.dataclass(frozen=True)
class OptimizerLink:
    """A session's calls to its optimizer. The defaults serve a session without one: no groups."""

    expected_options: Callable[[], list[CoreOptions]] = list
    """Returns the options that the next step is expected to use; empty: unknown."""
    read_groups: Callable[[], list[dict[str, Any]]] = list
    """Returns the optimizer's groups. A host may replace the optimizer's list."""
    tell_groups: Callable[[], None] = lambda: None
    """Gives each parameter's group to the core, and rebuilds the optimizer of parameters that stay with PyTorch."""


@dataclasses.dataclass
class StepOutcome:
    """Result of the last step."""

    grad_norm: float = 0.0
    """Global L2 norm of the unscaled gradients before clipping; not finite if the step was skipped."""
    parts: GradientParts | None = None
    """See ``Engine.gradient_parts``."""
    applied: bool = True
    """True if parameters were updated; also before the first step and after loading."""


class UpdateStage(enum.Enum):
    """The part of an update that runs."""

    CHUNKS = enum.auto()
    """Chunks are updated; the core counts them (``_C.StepState``)."""
    MANAGED = enum.auto()
    """All chunks are updated; PyTorch's optimizer has begun with its own parameters."""


@dataclasses.dataclass
class Decision:
    """All inputs of one update, so that a failed one can be finished."""

    outcome: StepOutcome
    param_groups: list[dict[str, Any]]
    options: list[CoreOptions]
    loss_scale: float
    clip_ratio: float
    """Allowed norm divided by the norm."""
    stage: UpdateStage = UpdateStage.CHUNKS

    @property
    def is_finite(self) -> bool:
        """True if the gradients have no infinities or NaNs."""
        return math.isfinite(self.outcome.grad_norm)
