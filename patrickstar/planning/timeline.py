"""Converts the uses of a step to the timeline that the core would record with a given layout.

The core determines the holds (csrc/plan/use_holds.h) and the resulting accesses (csrc/plan/played_uses.h).
tests/plan/test_uses.py compares them with real training runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from patrickstar import _C
from patrickstar.activations.call_measurement import MeasuredCall
from patrickstar.planning.leaving import Copies
from patrickstar.planning.step_uses import StepUses


@dataclasses.dataclass(frozen=True)
class TimedTimeline:
    """A timeline with the device time of each access."""

    accesses: list[dict[str, Any]]
    """The accesses of the step in order, each a dict as ``_C.make_plan`` takes it."""
    seconds: list[float]
    """Device time of each access, without waits."""
    waste_bytes: int
    """Highest unused bytes in an access's chunks, beside the parameters that it needs."""
    copies: list[Copies] = dataclasses.field(default_factory=list)
    """Copies of activations, by access; empty: none."""
    calls: list[MeasuredCall] = dataclasses.field(default_factory=list)
    """Checkpointed calls of the step, which save nothing."""

    @property
    def activation_peak_bytes(self) -> int:
        """Highest activation memory of the step."""
        return max((access["activation_peak_bytes"] for access in self.accesses), default=0)


@dataclasses.dataclass(frozen=True)
class Accesses:
    """The accesses of a step without activation memory and times."""

    accesses: list[dict[str, Any]]
    """The accesses in order, as :attr:`TimedTimeline.accesses`, without activation memory."""
    access_of: list[int]
    """By use, the access that follows it; -1: before the first access."""
    waste_bytes: int
    """See :attr:`TimedTimeline.waste_bytes`."""

    def timed(self, uses: StepUses) -> TimedTimeline:
        """Adds activation memory, times and copies of ``uses``, which must make the same calls of the core."""
        peaks, seconds = [0] * len(self.accesses), [0.0] * len(self.accesses)
        copies = [Copies() for _ in self.accesses]
        for use, access, peak in zip(uses.uses, self.access_of, uses.peaks, strict=True):
            if access >= 0:
                peaks[access] = max(peaks[access], peak + uses.static_bytes)
                copies[access].add(use.copies)
            if self.accesses:
                seconds[max(access, 0)] += use.seconds
        accesses = [access | {"activation_peak_bytes": peak} for access, peak in zip(self.accesses, peaks, strict=True)]
        calls = [self._at_accesses(call) for call in uses.calls]
        return TimedTimeline(accesses, seconds, self.waste_bytes, copies, calls)

    def _at_accesses(self, call: MeasuredCall) -> MeasuredCall:
        """The call with positions in accesses in place of uses."""
        places = ("forward_begin", "forward_end", "recompute_begin", "recompute_end")
        uses = {place: getattr(call, place) for place in places}
        accesses = {place: self.access_of[use] if use >= 0 else -1 for place, use in uses.items()}
        return dataclasses.replace(call, **accesses)


def play_accesses(uses: StepUses, layout: _C.Layout, states_on_device: Sequence[bool]) -> Accesses:
    """Returns the accesses of a step with these uses. ``states_on_device``, by chunk: with one rank, gradients of such
    chunks stay on the device unless they are applied at once. With several ranks all gradients leave by the
    reduce-scatter.
    """
    calls = [(use.call, use.params, use.until, use.begin, use.end) for use in uses.uses]
    return Accesses(*_C.play_uses(layout, list(states_on_device), calls))
