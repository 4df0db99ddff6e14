"""Stalls: how long the device waited for PatrickStar in a step, and for what. Some steps are traced.

A trace is requested two steps before a log line and taken at the line. It covers the whole step before the line's. Work
that the traced step started (updates on the host that run on into the next) is complete by then, so taking it does not
wait. If lines come more often than every third step, every second step is traced, and a line may repeat the last line's
share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from patrickstar import _C

_WORDS = {
    _C.StallCause.UPLOAD: "uploads",
    _C.StallCause.DOWNLOAD: "downloads",
    _C.StallCause.HOST_UPDATE: "adam on host",
    _C.StallCause.HOST_WORK: "work on host",
    _C.StallCause.ROOM: "room on device",
    _C.StallCause.NORM: "norm",
    _C.StallCause.COLLECTIVE: "collectives",
}
"""Causes of waits of the compute queue (csrc/common/tracing.h), as the line names them."""

_STEPS_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class Stalls:
    """Stalls of one step."""

    by_cause: Mapping[str, float]
    """Share of the step's time, by cause; causes that did not occur are left out."""

    @property
    def share(self) -> float:
        """Share of the step's time, for all causes."""
        return sum(self.by_cause.values())

    def text(self) -> str:
        """Text for the line: the share, and its main cause."""
        percent = f"stalled {100 * self.share:.0f} %"
        if not self.by_cause or self.share < 0.005:
            return percent
        return f"{percent} ({max(self.by_cause, key=lambda cause: self.by_cause[cause])})"


class StallSampler:
    """Traces some of an engine's steps; the module's docstring says which.

    Args:
        start_trace: requests the next step's trace (``_C.Runtime.start_stall_trace``).
        take_stalls: returns the stalls once that step is over, else None (``_C.Runtime.take_stalls``).
    """

    def __init__(self, start_trace: Callable[[], None], take_stalls: Callable[[], Mapping[str, Any] | None]):
        self._start_trace = start_trace
        self._take_stalls = take_stalls
        self._steps_since_asked: int | None = None
        self.latest: Stalls | None = None
        """Stalls of the last traced step; None before the first."""

    def end_step(self, *, steps_until_line: int, steps_per_line: int) -> None:
        """Call after each step, and before the line (``steps_until_line`` 0)."""
        if self._steps_since_asked is not None:
            self._steps_since_asked += 1
            self._take()
        is_near = 0 < steps_until_line <= _STEPS_AHEAD or steps_per_line <= _STEPS_AHEAD
        if self._steps_since_asked is None and is_near:
            self._start_trace()
            self._steps_since_asked = 0

    def _take(self) -> None:
        if self._steps_since_asked < _STEPS_AHEAD:
            return
        taken = self._take_stalls()
        if taken is None:  # the step was abandoned, and another one is traced instead
            return
        self._steps_since_asked = None
        seconds = taken["seconds"]
        if seconds > 0:
            self.latest = Stalls({_WORDS[cause]: value / seconds for cause, value in taken["stalled_seconds"].items()})
