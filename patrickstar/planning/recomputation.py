"""The choice of what checkpointed calls save: the shortest predicted step within the budgets.

    ladder = Ladder(num_calls, has_products=True)
    chosen = choose_rung(ladder.top, lambda rungs: [predicted_seconds(engine, step, ladder.saved(r)) for r in rungs])

A ladder orders the choices by activation memory. Calls save their products, the last calls first, since their
activations live shortest. Once all do, calls save everything, the last first. Each rung is a whole program: more saved
activations leave less device memory to optimizer states and chunks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from patrickstar import _C
from patrickstar.activations.activation_rules import Saved
from patrickstar.activations.call_measurement import MeasuredCall
from patrickstar.planning.placed_states import earliest_updates, states_on_device
from patrickstar.planning.simulation import choose_plan
from patrickstar.planning.step_plan import SavedCalls
from patrickstar.planning.timeline import TimedTimeline

_COARSE = 8
"""Rungs that are tried at first, beside the lowest; between the best two neighbours the search halves."""
_ROUGH = 4
"""Rungs that are tried for proposals, beside the lowest."""
_FORWARD_OF_RECOMPUTATION = 1.2
"""A forward relative to its recomputation, which stops before the last product. 1.18 for Llama's layers (log.md)."""
_LOSS_OF_PRODUCTS = 2.0
"""A loss with its output layer relative to that layer's products. Not measured."""
_FRAGMENTS = 1.1
"""Device memory of saved activations relative to their bytes: PyTorch's allocator does not fill its segments. With 45
GB saved beside chunk buffers, 2 GB more were reserved than planned (docs/log.md).
"""
WORTH_SAVING = 0.01
"""Least gain for which a higher rung is chosen. Not measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A step in which checkpointed calls saved nothing."""

    timed: TimedTimeline
    rates: _C.Rates


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedEngine:
    """Facts of an engine that decide where its states rest."""

    layout: _C.Layout
    budget: _C.DeviceBudget
    """Device memory for states and chunk buffers, without activations."""
    host_bytes: int
    resting_tiers: list[_C.Tier]
    """By chunk, before activation memory was known."""
    has_device_states: bool
    """False if all states rest on the host (``use_hybrid_adam``)."""
    start: _C.UpdateStart


def steady_seconds(seconds: Sequence[float], calls: Sequence[MeasuredCall], numels: Sequence[int]) -> list[float]:
    """Times of accesses without one-time costs of a first step, such as memory that is mapped.

    * Accesses of different calls at the same place are alike. Each gets their lower quartile, if it took longer.
    * A call's forward takes little longer than its recomputation.
    * Outside of calls, an access takes at most a multiple of the calls' time per element.

    Args:
        seconds: by access.
        calls: of the step.
        numels: by access, elements of the chunks that it reads.
    """
    result = list(seconds)
    inside: set[int] = set()
    forward_seconds = forward_numel = 0.0
    for indices in _alike(calls, len(seconds)).values():
        quartile = sorted(seconds[index] for index in indices)[len(indices) // 4]
        for index in indices:
            result[index] = min(seconds[index], quartile)
        inside.update(indices)
    for call in calls:
        forward = range(call.forward_begin + 1, call.forward_end + 1)
        limit = _FORWARD_OF_RECOMPUTATION * call.recompute_seconds
        total = sum(result[index] for index in forward)
        for index in forward:
            result[index] *= min(limit / total, 1.0) if total > 0 else 1.0
        forward_seconds += min(total, limit)
        forward_numel += sum(numels[index] for index in forward)
    per_element = forward_seconds / max(forward_numel, 1)
    for index in set(range(len(seconds))) - inside:
        result[index] = min(seconds[index], _LOSS_OF_PRODUCTS * per_element * numels[index])
    return result


def _alike(calls: Sequence[MeasuredCall], num_accesses: int) -> dict[tuple[Any, ...], list[int]]:
    """Accesses at the same place of different calls, which have the same number of accesses."""
    places: dict[tuple[Any, ...], list[int]] = {}
    begins = sorted(call.recompute_begin for call in calls)
    for call in calls:
        later = [begin for begin in begins if begin > call.recompute_end]
        end = later[0] if later else num_accesses - 1
        lengths = (call.forward_end - call.forward_begin, call.recompute_end - call.recompute_begin)
        for part, first, last in (
            ("forward", call.forward_begin + 1, call.forward_end),
            ("recomputation", call.recompute_begin + 1, call.recompute_end),
            ("backward", call.recompute_end + 1, end),
        ):
            for index in range(first, last + 1):
                places.setdefault((*lengths, part, index - first), []).append(index)
    return places


class Ladder:
    """The choices for ``num_calls`` calls of a forward, by activation memory. Without ``has_products`` calls save
    nothing or everything.
    """

    def __init__(self, num_calls: int, *, has_products: bool):
        self._num_calls = num_calls
        self.has_products = has_products
        self._levels = (Saved.PRODUCTS, Saved.EVERYTHING) if has_products else (Saved.EVERYTHING,)

    @property
    def top(self) -> int:
        """The highest rung. Rung 0 saves nothing."""
        return len(self._levels) * self._num_calls

    def saved(self, rung: int) -> tuple[Saved, ...]:
        """Choices of the calls, by number."""
        full, rest = divmod(rung, self._num_calls) if self._num_calls else (0, 0)
        levels = (Saved.NOTHING, *self._levels, self._levels[-1])
        return (levels[full],) * (self._num_calls - rest) + (levels[full + 1],) * rest


def step_with_saved(timed: TimedTimeline, saved: Sequence[Saved]) -> TimedTimeline:
    """The timeline of a step that saves nothing, if its calls save ``saved``, by number; further calls save nothing.

    Saved bytes grow during the call's forward and stay until its recomputation, products until that ends. Without
    recomputation, its accesses are left out, and the access before them takes over their gradients, their copies and
    the rest of their time. With saved products, recomputation is shorter by their time.
    """
    uses = [access["uses"] for access in timed.accesses]
    peaks = [access["activation_peak_bytes"] for access in timed.accesses]
    seconds, copies = list(timed.seconds), list(timed.copies)
    left_out: set[int] = set()
    for call in timed.calls:
        kept = saved[call.number] if call.number < len(saved) else Saved.NOTHING
        if kept is Saved.NOTHING:
            continue
        num_bytes = int(_FRAGMENTS * (call.product_bytes if kept is Saved.PRODUCTS else call.saved_bytes))
        forward = max(call.forward_end - call.forward_begin, 1)
        for index in range(max(call.forward_begin, 0), call.recompute_begin + 1):
            share = min((index - call.forward_begin) / forward, 1.0)
            peaks[index] += int(num_bytes * share)
        recomputed = range(call.recompute_begin + 1, call.recompute_end + 1)
        if kept is Saved.PRODUCTS:
            for index in recomputed:
                peaks[index] += num_bytes
            total = sum(seconds[index] for index in recomputed)
            left = max(total - call.product_seconds, 0.0) / total if total > 0 else 1.0
            for index in recomputed:
                seconds[index] *= left
        else:
            before = call.recompute_begin
            moved = [use for index in recomputed for use in uses[index] if use[2] != _C.ArrayUseMode.READ]
            uses[before] = list(dict.fromkeys([*uses[before], *moved]))
            peaks[before] = max(peaks[index] for index in (before, *recomputed[-1:]))
            seconds[before] += sum(seconds[index] for index in recomputed) - call.recompute_seconds
            seconds[before] = max(seconds[before], 0.0)
            if copies:
                copies[before] = dataclasses.replace(copies[before])
            for index in recomputed if copies else ():
                copies[before].add(copies[index])
            left_out.update(recomputed)
    stays = [index for index in range(len(seconds)) if index not in left_out]
    accesses = [
        {**timed.accesses[index], "uses": uses[index], "activation_peak_bytes": peaks[index]} for index in stays
    ]
    of_stays = [copies[index] for index in stays] if copies else []
    return TimedTimeline(accesses, [seconds[index] for index in stays], timed.waste_bytes, of_stays)


def saved_calls(
    timed: TimedTimeline, ladder: Ladder, saved: Sequence[Saved], size: int, *, is_quadratic: bool
) -> SavedCalls:
    """The choice ``saved`` with the bytes of the largest forward of ``timed``. ``size``, ``is_quadratic``: as in
    :class:`SavedCalls`.
    """
    calls = [[call for call in timed.calls if call.number == number] for number in range(len(saved))]
    return SavedCalls(
        tuple(kept.value for kept in saved),
        tuple(max((c.product_bytes for c in same), default=0) * ladder.has_products for same in calls),
        tuple(max((c.saved_bytes for c in same), default=0) for same in calls),
        timed.activation_peak_bytes,
        size,
        is_quadratic,
    )


@dataclasses.dataclass(frozen=True)
class PlacedStep:
    """Placement of states for a step, by chunk."""

    on_device: list[bool]
    tiers: list[_C.Tier]
    updates: list[_C.Recipe]
    """The earliest that memory allows."""


@contextlib.contextmanager
def placed_step(engine: PlacedEngine, timed: TimedTimeline) -> Iterator[PlacedStep]:
    """Places states as the engine does once it knows this timeline. Within the context, the engine's budget has the
    host memory for gradients that this placement leaves.
    """
    layout, budget = engine.layout, engine.budget
    room_before = budget.gradient_room_bytes
    may_move_in = budget if engine.has_device_states else None
    on_device = states_on_device(layout, engine.resting_tiers, timed.accesses, may_move_in)
    tiers = _C.later_resting_tiers(layout, engine.resting_tiers, on_device, engine.host_bytes, budget.backwards)
    try:
        budget.gradient_room_bytes = _C.gradient_room_bytes(layout, tiers, engine.host_bytes)
        room = engine.host_bytes - _C.bytes_on_host(layout, tiers, budget.backwards)
        room -= _C.disk_set_bytes(layout, engine.resting_tiers) + _C.reserved_gradient_bytes(layout)
        room -= _C.leaving_gradient_bytes(layout, timed.accesses, on_device, budget)
        yield PlacedStep(on_device, tiers, earliest_updates(layout, tiers, room, engine.start))
    finally:
        budget.gradient_room_bytes = room_before


def predicted_seconds(engine: PlacedEngine, step: MeasuredStep, saved: Sequence[Saved]) -> float:
    """Seconds of a steady step with this choice, placed and planned as by the engine. Infinite if the device has no
    room.
    """
    timed = step_with_saved(step.timed, saved)
    layout, budget = engine.layout, engine.budget
    with placed_step(engine, timed) as placed:
        on_disk = [tier == _C.Tier.DISK for tier in placed.tiers]
        plan = choose_plan(layout, timed, placed.on_device, on_disk, budget, placed.updates, engine.start, step.rates)
    assert plan.prediction is not None
    return plan.prediction.seconds if plan.least_limit_bytes <= budget.limit_bytes else math.inf


class SavedLimit:
    """Keeps the activation memory of larger forwards to that of the planned ones.

    Args:
        calls: what they save now, with the bytes of other choices.
        peak_bytes: highest activation memory with ``calls``.

    Attributes:
        size: of the inputs of the largest forward so far, as in ``SavedCalls``.
    """

    def __init__(self, calls: SavedCalls, peak_bytes: int):
        self.ladder = Ladder(len(calls.saved), has_products=any(calls.product_bytes))
        self._calls = calls
        self.size = calls.size
        rungs = range(self.ladder.top + 1)
        self.rung = next(rung for rung in rungs if [s.value for s in self.ladder.saved(rung)] == list(calls.saved))
        self._peak_bytes = peak_bytes

    @property
    def calls(self) -> SavedCalls:
        """The present choice, with the bytes of the largest forward so far."""
        growth = self.size / max(self._calls.size, 1)
        return SavedCalls(
            tuple(kept.value for kept in self.ladder.saved(self.rung)),
            tuple(int(size * growth) for size in self._calls.product_bytes),
            tuple(int(size * growth) for size in self._calls.all_bytes),
            int(self._calls.base_bytes * growth),
            self.size,
            self._calls.is_quadratic,
        )

    def follow(self, size: int, rung: int) -> None:
        """Goes down to ``rung`` at most, and as far as a forward of ``size`` requires. All activations are
        taken to grow alike.
        """
        if self._calls.size == 0:
            self._calls = dataclasses.replace(self._calls, size=size)
        self.size = max(self.size, size)
        growth = self.size / max(self._calls.size, 1)
        low, high = 0, min(rung, self.rung)
        while growth > 1 and low < high:
            middle = (low + high + 1) // 2
            fits = (self._calls.base_bytes + self._saved_bytes(middle)) * growth <= self._peak_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        self.rung = high

    def _saved_bytes(self, rung: int) -> int:
        total = 0
        for number, kept in enumerate(self.ladder.saved(rung)):
            if kept is Saved.PRODUCTS:
                total += self._calls.product_bytes[number]
            elif kept is Saved.EVERYTHING:
                total += self._calls.all_bytes[number]
        return int(_FRAGMENTS * total)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A rung of a ladder."""

    rung: int
    tried: dict[int, float]
    """Predicted seconds of all rungs that were tried."""


def recomputation_text(saved: Sequence[Saved], seconds: float, seconds_of_none: float) -> str:
    """A line for users on a choice of predicted ``seconds``; ``seconds_of_none``: if nothing is saved."""
    counts = {kept: saved.count(kept) for kept in Saved}
    texts = [f"recomputing {counts[Saved.NOTHING]} of {len(saved)} checkpointed layers"]
    if counts[Saved.PRODUCTS]:
        texts.append(f"all but products in {counts[Saved.PRODUCTS]}")
    return f"{', '.join(texts)}; {seconds:.3g} s predicted, {seconds_of_none:.3g} s with all recomputed"


def choose_rung(top: int, seconds_of: Callable[[list[int]], list[float]]) -> Choice:
    """The rung up to ``top`` with the shortest step; of almost equal ones the lowest.

    Args:
        top: the highest rung that is considered.
        seconds_of: predicts the steps of several rungs; with several ranks the longest of all ranks.
    """
    known: dict[int, float] = {}

    def play(rungs: list[int]) -> None:
        new = sorted(set(rungs) - known.keys())
        known.update(zip(new, seconds_of(new), strict=True))

    play([0, *(round(top * part / _COARSE) for part in range(1, _COARSE + 1))])
    while True:
        tried = sorted(known)
        at = tried.index(min(tried, key=lambda rung: known[rung]))
        around = [tried[index] for index in (at - 1, at, at + 1) if 0 <= index < len(tried)]
        middles = [(low + high) // 2 for low, high in zip(around, around[1:], strict=False) if high - low > 1]
        if not middles:
            break
        play(middles)
    return _choice(known)


def choose_roughly(top: int, seconds_of: Callable[[list[int]], list[float]]) -> Choice:
    """:func:`choose_rung` among a few rungs: sooner, with a step that may be a little longer."""
    rungs = sorted({round(top * part / _ROUGH) for part in range(_ROUGH + 1)})
    return _choice(dict(zip(rungs, seconds_of(rungs), strict=True)))


def lowest_of_shortest(seconds_of: dict[int, float]) -> int:
    """The lowest rung whose step is about as short as the shortest."""
    least = min(seconds_of.values())
    return min(rung for rung, seconds in seconds_of.items() if seconds <= least * (1 + WORTH_SAVING))


def _choice(seconds_of: dict[int, float]) -> Choice:
    return Choice(lowest_of_shortest(seconds_of), dict(sorted(seconds_of.items())))
