"""Extends the uses of a shortened model (planning/repeated_layers.py) to those of the whole one.

Two traced periods that follow each other must have the same uses: the same costs and events, while parameters, memory,
numbers and times of the clock differ by constants. Each period between them continues this series::

    forward                                                         backward
    ... | period 1 | those left out | period 2 | ... end ... | period 2 | those left out | period 1 | ...

A period begins with the first use of one of its parameters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from patrickstar import _C
from patrickstar.activations.call_measurement import MeasuredCall
from patrickstar.planning.leaving import Fate, KeptEvent, Span
from patrickstar.planning.repeated_layers import Repetition
from patrickstar.planning.step_uses import StepUses, Use

_ROUNDING = 1e-9


class DoesNotRepeatError(Exception):
    """Layers that look alike have other uses."""


def extended(traced: StepUses, repetition: Repetition) -> StepUses:
    """The uses of all layers, from a trace within ``repetition.shortened()``.

    Raises:
        DoesNotRepeatError: the uses of traced periods differ in more than their place.
    """
    return _Extension(traced, repetition).extended()


def _require(is_true: bool) -> None:
    if not is_true:
        raise DoesNotRepeatError


@dataclasses.dataclass(frozen=True)
class _Pass:
    """The uses of periods 1 and 2 in forward or backward."""

    begins: tuple[int, int]
    """Positions at which period 1 and period 2 begin."""
    length: int
    ticks: int
    """Ticks of the clock during a period."""

    def pairs(self, uses: Sequence[Use]) -> list[tuple[Use, Use]]:
        one, two = (uses[begin : begin + self.length] for begin in self.begins)
        return list(zip(one, two, strict=True))


class _Extension:
    """See :func:`extended`."""

    def __init__(self, traced: StepUses, repetition: Repetition):
        self._traced, self._uses = traced, traced.uses
        self._owned, self._first, self._period = repetition.params, repetition.first, repetition.period
        self._left_out = repetition.num_left_out
        num_traced = len(self._owned) - self._left_out * self._period
        self._places = {
            param: (layer, slot) for layer in range(num_traced) for slot, param in enumerate(self._owned[layer])
        }
        end = next(index for index, use in enumerate(self._uses) if use.call == _C.UseCall.END_FORWARD)
        begins = self._begins(range(end))
        self._forward = self._pass_of((begins[1], begins[2]), (begins[1], begins[2], begins[3]))
        begins = self._begins(range(end, len(self._uses)))
        self._backward = self._pass_of((begins[1], begins[2]), (begins[2], begins[1], begins[0]))
        self._forward_ticks = self._uses[end].clock
        """Ticks of the traced forward; later ones are those of recomputations."""
        self._first_tick = self._uses[self._forward.begins[0]].clock + 1
        numbers = [self._first_number(begin) for begin in self._forward.begins]
        self._first_number_of_1, self._numbers = numbers[0], numbers[1] - numbers[0]
        peaks = [(one.activation_peak_bytes, two.activation_peak_bytes) for one, two in self._forward.pairs(self._uses)]
        self._growth_bytes = next((two - one for one, two in peaks if one), 0)

    def extended(self) -> StepUses:
        forward, backward = self._forward, self._backward
        in_forward, in_backward = forward.pairs(self._uses), backward.pairs(self._uses)
        for one, two in (*in_forward, *in_backward):
            self._check(one, two)
        uses = self._uses[: forward.begins[1]]
        copies = range(1, self._left_out + 2)  # the last one is period 2
        for count in copies:
            uses += [self._continued(one, two, count) for one, two in in_forward]
        uses += map(self._later, self._uses[forward.begins[1] + forward.length : backward.begins[1]])
        for count in reversed(copies):
            uses += [self._continued(one, two, count) for one, two in in_backward]
        uses += map(self._earlier, self._uses[backward.begins[0] :])
        of_period = [one for one, _ in (*in_forward, *in_backward)]
        return dataclasses.replace(
            self._traced,
            uses=uses,
            flops=self._traced.flops + self._left_out * sum(use.flops for use in of_period),
            num_operations=self._traced.num_operations + self._left_out * sum(use.num_operations for use in of_period),
            calls=self._calls(),
        )

    def _begins(self, positions: Iterable[int]) -> dict[int, int]:
        """By traced period, the first of ``positions`` with a use of its parameters."""
        begins: dict[int, int] = {}
        for position in positions:
            for param in self._uses[position].params:
                layer, _ = self._places.get(param, (-1, 0))
                if layer >= self._first - 1:
                    begins.setdefault(1 + max((layer - self._first) // self._period, -1), position)
        _require(all(period in begins for period in range(4)))
        return begins

    def _pass_of(self, begins: tuple[int, int], course: tuple[int, int, int]) -> _Pass:
        """``course``: begins of three periods in the order of the pass."""
        lengths = {end - begin for begin, end in zip(course, course[1:], strict=False)}
        clocks = [self._uses[begin].clock for begin in course]
        ticks = {end - begin for begin, end in zip(clocks, clocks[1:], strict=False)}
        _require(len(lengths) == len(ticks) == 1 and min(lengths) > 0)
        return _Pass(begins, lengths.pop(), ticks.pop())

    def _first_number(self, begin: int) -> int:
        """Number of the next kept or offered tensor."""
        events = (span.event for use in self._uses[begin:] for span in use.spans)
        return next((e.number for e in events if e is not None and e.fate in (Fate.KEPT, Fate.OFFERED)), 0)

    def _check(self, one: Use, two: Use) -> None:
        """Raises DoesNotRepeatError unless ``two`` is ``one`` a period later."""
        _require((one.call, one.until, one.seconds, one.flops) == (two.call, two.until, two.seconds, two.flops))
        _require(one.num_operations == two.num_operations and len(one.spans) == len(two.spans))
        _require([self._moved(param, 1) for param in one.params] == two.params)
        for before, after in ((one.begin, two.begin), (one.end, two.end)):
            _require(after - before in (0, self._forward.ticks, -self._backward.ticks))
        for ours, theirs in zip(one.spans, two.spans, strict=True):
            grown = self._growth_bytes if ours.peak_bytes else 0
            _require(theirs.peak_bytes - ours.peak_bytes == grown)
            _require((ours.event is None) == (theirs.event is None))
            if ours.event is not None and theirs.event is not None:
                _require(theirs.event.number - ours.event.number in (0, self._numbers))
                _require(dataclasses.replace(ours.event, number=theirs.event.number) == theirs.event)

    def _continued(self, one: Use, two: Use, count: int) -> Use:
        """The use ``count`` periods after ``one``."""
        spans = []
        for ours, theirs in zip(one.spans, two.spans, strict=True):
            event = ours.event
            if event is not None and theirs.event is not None:
                number = event.number + count * (theirs.event.number - event.number)
                event = KeptEvent(event.fate, number, event.num_bytes, event.seconds)
            grown = count * (theirs.peak_bytes - ours.peak_bytes)
            spans.append(Span(event, ours.peak_bytes + grown))
        base = self._earlier(one)
        return dataclasses.replace(
            one,
            params=[self._moved(param, count) for param in one.params],
            begin=base.begin + count * (two.begin - one.begin),
            end=base.end + count * (two.end - one.end),
            spans=spans,
        )

    def _later(self, use: Use) -> Use:
        """A use behind all layers that were left out."""
        spans = []
        for span in use.spans:
            event = span.event
            if event is not None and event.number >= self._first_number_of_1:
                event = dataclasses.replace(event, number=event.number + self._left_out * self._numbers)
            grown = self._left_out * self._growth_bytes if span.peak_bytes else 0
            spans.append(Span(event, span.peak_bytes + grown))
        ticks = self._left_out * self._forward.ticks
        return dataclasses.replace(
            use,
            params=[self._moved(param, self._left_out) for param in use.params],
            begin=use.begin + ticks * (use.begin >= self._first_tick),
            end=use.end + ticks * (use.end >= self._first_tick),
            spans=spans,
        )

    def _earlier(self, use: Use) -> Use:
        """A use of period 1 or of what is ahead of it."""
        ticks = self._left_out * (self._forward.ticks + self._backward.ticks)
        return dataclasses.replace(
            use,
            begin=use.begin + ticks * (use.begin > self._forward_ticks),
            end=use.end + ticks * (use.end > self._forward_ticks),
        )

    def _moved(self, param: int, count: int) -> int:
        """The parameter at the same place ``count`` periods later; ``param`` if it is ahead of period 1."""
        layer, slot = self._places.get(param, (-1, 0))
        return param if layer < self._first else self._owned[layer + count * self._period][slot]

    def _calls(self) -> list[MeasuredCall]:
        """The measured calls, in the order of their forwards."""
        calls, forward, backward = self._traced.calls, self._forward, self._backward
        one, two = (
            [call for call in calls if begin <= call.forward_begin + 1 < begin + forward.length]
            for begin in forward.begins
        )
        _require(len(one) == len(two) and bool(one) == bool(calls))
        for ours, theirs in zip(one, two, strict=True):
            _require(_are_alike(_moved_call(ours, len(one), forward.length, -backward.length), theirs))
        ahead = [call for call in calls if call.forward_begin + 1 < forward.begins[0]]
        behind = calls[len(ahead) + len(one) :]
        count = self._left_out
        in_forward, in_backward = count * forward.length, count * backward.length
        return [
            *(_moved_call(call, 0, 0, in_forward + in_backward) for call in (*ahead, *one)),
            *(
                _moved_call(call, n * len(one), n * forward.length, in_forward + in_backward - n * backward.length)
                for n in range(1, count + 1)
                for call in one
            ),
            *(_moved_call(call, count * len(one), in_forward, in_forward) for call in behind),
        ]


def _moved_call(call: MeasuredCall, number: int, forward: int, recompute: int) -> MeasuredCall:
    return dataclasses.replace(
        call,
        number=call.number + number,
        forward_begin=call.forward_begin + forward,
        forward_end=call.forward_end + forward,
        recompute_begin=call.recompute_begin + recompute,
        recompute_end=call.recompute_end + recompute,
    )


def _are_alike(a: MeasuredCall, b: MeasuredCall) -> bool:
    """Times are differences of the clock, which round."""
    times = ("product_seconds", "recompute_seconds")
    return dataclasses.replace(a, **{name: getattr(b, name) for name in times}) == b and all(
        math.isclose(getattr(a, name), getattr(b, name), rel_tol=_ROUNDING) for name in times
    )
