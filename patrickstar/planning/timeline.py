"""Converts the uses of a step to the timeline that the core would record with a given layout.

The core determines the holds (csrc/plan/use_holds.h) and the resulting accesses (csrc/plan/played_uses.h).
tests/plan/test_uses.py compares them with real training runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from patrickstar import _C
from patrickstar.planning.leaving import Copies
from patrickstar.planning.uses import StepUses


@dataclasses.dataclass(frozen=True)
class TimedTimeline:
    """A timeline with the device time of each access."""

    moments: list[dict[str, Any]]
    """The accesses of the step in order, each a dict as ``_C.make_plan`` takes it."""
    seconds: list[float]
    """Device time of each access, without waits."""
    waste_bytes: int
    """Highest unused bytes in an access's chunks, beside the parameters that it needs."""
    copies: list[Copies] = dataclasses.field(default_factory=list)
    """Copies of activations, by access."""

    @property
    def tide_peak_bytes(self) -> int:
        """Highest activation memory of the step."""
        return max((moment["tide_peak_bytes"] for moment in self.moments), default=0)


@dataclasses.dataclass(frozen=True)
class Accesses:
    """The accesses of a step without activation memory and times."""

    moments: list[dict[str, Any]]
    """The accesses in order, as :attr:`TimedTimeline.moments`, without activation memory."""
    moment_of: list[int]
    """By use, the access that follows it; -1: before the first access."""
    waste_bytes: int
    """See :attr:`TimedTimeline.waste_bytes`."""

    def timed(self, uses: StepUses) -> TimedTimeline:
        """Adds activation memory, times and copies of ``uses``, which must make the same calls of the core."""
        peaks, seconds = [0] * len(self.moments), [0.0] * len(self.moments)
        copies = [Copies() for _ in self.moments]
        for use, moment in zip(uses.uses, self.moment_of, strict=True):
            if moment >= 0:
                peaks[moment] = max(peaks[moment], use.tide_peak_bytes + uses.static_bytes)
                copies[moment].add(use.copies)
            if self.moments:
                seconds[max(moment, 0)] += use.seconds
        moments = [moment | {"tide_peak_bytes": peak} for moment, peak in zip(self.moments, peaks, strict=True)]
        return TimedTimeline(moments, seconds, self.waste_bytes, copies)


def play_accesses(uses: StepUses, layout: _C.Layout, states_on_device: Sequence[bool]) -> Accesses:
    """Returns the accesses of a step with these uses. ``states_on_device``, by chunk: with one rank, gradients of such
    chunks stay on the device unless they are applied at once. With several ranks all gradients leave by the
    reduce-scatter.
    """
    calls = [(use.call, use.params, use.until, use.begin, use.end) for use in uses.uses]
    return Accesses(*_C.play_uses(layout, list(states_on_device), calls))


def make_timeline(uses: StepUses, layout: _C.Layout, states_on_device: Sequence[bool]) -> TimedTimeline:
    """Returns the timeline of a step with these uses; arguments as in :func:`play_accesses`."""
    return play_accesses(uses, layout, states_on_device).timed(uses)
