"""Check that an engine's parameters and optimizer states all come from one step.

    whole = Wholeness()
    whole.break_up("a backward failed when 3 chunks had been updated")
    whole.check()   # raises StateError with that reason
    whole.mend()    # a checkpoint was loaded

Mixed values look like any others, so every call that would train with them or save them checks first.
"""

from __future__ import annotations

import enum

from patrickstar import _C


class State(enum.Enum):
    """The steps that an engine's values come from."""

    WHOLE = enum.auto()
    """One step."""
    IN_STEP = enum.auto()
    """Two steps: an optimizer step failed, and the same call finishes it."""
    MIXED = enum.auto()
    """Several steps or checkpoints."""


_REMEDIES = {
    State.IN_STEP: "call optimizer.step() again, which finishes it, or load a checkpoint",
    State.MIXED: (
        "load a checkpoint to its end before going on, or call engine.accept_mixed_state() to take parameters and "
        "optimizer states as they are"
    ),
}


class Wholeness:
    """State of one engine's values, and the reason if they are not whole."""

    def __init__(self) -> None:
        self.state = State.WHOLE
        self._because = ""

    def interrupt_step(self, because: str) -> None:
        """Records a failed step that can be finished."""
        if self.state is not State.MIXED:
            self.state, self._because = State.IN_STEP, because

    def break_up(self, because: str) -> None:
        """Records mixed values. Keeps the first reason, which causes later ones."""
        if self.state is not State.MIXED:
            self.state, self._because = State.MIXED, because

    def end_step(self) -> None:
        """Records a finished step, also one that had failed before."""
        if self.state is State.IN_STEP:
            self.mend()

    def mend(self) -> None:
        """Records that all values come from one checkpoint, or that the user accepts them."""
        self.state, self._because = State.WHOLE, ""

    def check(self) -> None:
        """Raises StateError unless values come from one step."""
        if self.state is not State.WHOLE:
            raise _C.StateError(f"{self._because}; {_REMEDIES[self.state]}")

    def check_step(self) -> None:
        """Raises StateError if a step cannot make values whole."""
        if self.state is State.MIXED:
            self.check()
