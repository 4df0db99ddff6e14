"""From the uses of a step to the timeline that the core would record with a given layout.

Who holds what until when is the core's (csrc/plan/use_holds.h), with the moments that follow (csrc/plan/played_uses.h);
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
    """A timeline, and how long its moments take on the device when nothing waits."""

    moments: list[dict[str, Any]]
    """The moments of the step in their order, each a dict as ``_C.make_plan`` takes it."""
    seconds: list[float]
    """Time of the device's operations in each moment."""
    waste_bytes: int
    """The most that the chunks which a moment begins with hold beside the parameters that it asks for."""
    copies: list[Copies] = dataclasses.field(default_factory=list)
    """Of activations, by moment."""

    @property
    def tide_peak_bytes(self) -> int:
        """The highest tide of the step: memory of the device that is not the chunks'."""
        return max((moment["tide_peak_bytes"] for moment in self.moments), default=0)


@dataclasses.dataclass(frozen=True)
class Accesses:
    """The moments of a step, whatever the tide is then and however long they take."""

    moments: list[dict[str, Any]]
    """The moments of the step in their order, as :attr:`TimedTimeline.moments`, without a tide."""
    moment_of: list[int]
    """By use, the moment that lasts after it; -1: before the first one."""
    waste_bytes: int
    """As :attr:`TimedTimeline.waste_bytes`."""

    def timed(self, uses: StepUses) -> TimedTimeline:
        """With the tide, the times and the copies of these uses, which call the core as those do that were played."""
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
    """Accesses of a step with these uses. ``states_on_device`` by chunk: with one rank, gradients of such chunks do
    not leave, unless they are applied at once; with several all do, when they are scattered.
    """
    calls = [(use.call, use.params, use.until, use.begin, use.end) for use in uses.uses]
    return Accesses(*_C.play_uses(layout, list(states_on_device), calls))


def make_timeline(uses: StepUses, layout: _C.Layout, states_on_device: Sequence[bool]) -> TimedTimeline:
    """The timeline of a step with these uses, as :func:`play_accesses` takes them."""
    return play_accesses(uses, layout, states_on_device).timed(uses)
