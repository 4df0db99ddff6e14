"""The check that an engine's parameters and optimizer states are all of one step.

    whole = Wholeness()
    whole.break_up("a backward failed when 3 chunks had been updated")
    whole.check()   # raises StateError, which says so
    whole.mend()    # a checkpoint was loaded

Values do not show that they are mixed, so every call that would train with them or save them asks first.
"""

from __future__ import annotations

import enum

from patrickstar import _C


class State(enum.Enum):
    """Where values come from."""

    WHOLE = enum.auto()
    """One step."""
    IN_STEP = enum.auto()
    """Two steps, since an optimizer's step has failed; the same call finishes it."""
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
    """The state of one engine's values, and why it is not whole."""

    def __init__(self) -> None:
        self.state = State.WHOLE
        self._because = ""

    def interrupt_step(self, because: str) -> None:
        """A step has failed that can be finished."""
        if self.state is not State.MIXED:
            self.state, self._because = State.IN_STEP, because

    def break_up(self, because: str) -> None:
        """Values are mixed from now on. The first cause stays: those after it come of it."""
        if self.state is not State.MIXED:
            self.state, self._because = State.MIXED, because

    def end_step(self) -> None:
        """A step is over: it was finished, if it had failed."""
        if self.state is State.IN_STEP:
            self.mend()

    def mend(self) -> None:
        """All values are of one checkpoint, or the user takes them as they are."""
        self.state, self._because = State.WHOLE, ""

    def check(self) -> None:
        """Raises StateError where values are not whole."""
        if self.state is not State.WHOLE:
            raise _C.StateError(f"{self._because}; {_REMEDIES[self.state]}")

    def check_step(self) -> None:
        """Raises StateError where a step cannot make values whole."""
        if self.state is State.MIXED:
            self.check()
