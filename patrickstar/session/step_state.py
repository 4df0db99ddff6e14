"""Where in a step an engine is, by the calls that came through.

The core knows the call that runs and whether gradients wait (``_C.StepState``). A forward that came through leaves
nothing with it, so forwards whose backward is to come are known here.
"""

from __future__ import annotations

import enum
import threading


class Stage(enum.Enum):
    """The last call of a step."""

    IDLE = "before the first forward of a step"
    FORWARDED = "after a forward, before its backward"
    BACKWARDED = "after a backward, before the step"


class StepCourse:
    """The stage of one engine, and the thread that made the last call."""

    def __init__(self) -> None:
        self.stage = Stage.IDLE
        self._thread = 0

    def note(self, stage: Stage) -> None:
        """A forward or a backward of this thread came through."""
        self.stage, self._thread = stage, threading.get_ident()

    def end(self) -> None:
        """The step is over, or dropped."""
        self.stage = Stage.IDLE

    def forget_gradients(self) -> None:
        """Gradients are dropped. A forward whose backward is to come stays."""
        if self.stage is Stage.BACKWARDED:
            self.end()

    @property
    def is_here(self) -> bool:
        """True between a forward and its step, where this thread made the last call."""
        return self.stage is not Stage.IDLE and self._thread == threading.get_ident()
