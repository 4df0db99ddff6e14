"""The choice of what checkpointed calls save: the shortest predicted step within the budgets.

    def seconds_of(ladder, rungs):
        return [predicted_seconds(engine, step, ladder.saved(rung)) for rung in rungs]

    choice = choose_saved(Ladder(num_calls, has_products=True), most_sent(timed, gbps, room_bytes), seconds_of)
    saved = choice.ladder.saved(choice.rung)

Each rung is a whole program: more saved activations leave less device memory to optimizer states and chunks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from patrickstar import _C
from patrickstar.activations.activation_rules import Saved
from patrickstar.activations.call_measurement import MeasuredCall
from patrickstar.planning.ladder import Ladder
from patrickstar.planning.placed_states import earliest_updates, states_on_device
from patrickstar.planning.saved_steps import sent_bytes, slowdown_of_updates, step_with_saved
from patrickstar.planning.simulation import choose_step
from patrickstar.planning.timeline import TimedTimeline

_COARSE = 8
"""Rungs that are tried at first, beside the lowest; between the best two neighbours the search halves."""
_ROUGH = 4
"""Rungs that are tried for proposals, beside the lowest."""
_FORWARD_OF_RECOMPUTATION = 1.2
"""A forward relative to its recomputation, which stops before the last product. 1.18 for Llama's layers (log.md)."""
_LOSS_OF_PRODUCTS = 2.0
"""A loss with its output layer relative to that layer's products. Not measured."""
_SENDING_PARTS = 3
"""Numbers of calls that are tried as senders of products: equal parts of the most."""
WORTH_SAVING = 0.01
"""Least gain for which a higher rung is chosen. Not measured."""
_WORTH_SENDING = 0.03
"""Least gain for which products are sent: the first steps make their host buffers. GPT 4.31 B within 24 GiB, 3 %
predicted without :func:`slowdown_of_updates`: 5 % gained on one machine, nothing on two others.
"""


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
    scale: _C.ExpectedScale
    """Gradient scale that updates assume."""


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


@dataclasses.dataclass(frozen=True)
class PlacedStep:
    """A step with a choice of what calls save, and where its states rest, by chunk."""

    timed: TimedTimeline
    on_device: list[bool]
    tiers: list[_C.Tier]
    updates: list[_C.Recipe]
    """The earliest that memory allows."""
    room_bytes: int
    """Host memory that is left; negative: too little."""
    host_slowdown: float
    """Time of updates on the host beside copies of products, relative to updates alone."""


@contextlib.contextmanager
def placed_step(engine: PlacedEngine, step: MeasuredStep, saved: Sequence[Saved]) -> Iterator[PlacedStep]:
    """Places states as the engine does once calls save ``saved``. Within the context, the engine's budget has the host
    memory for gradients that this placement leaves.
    """
    layout, budget, timed = engine.layout, engine.budget, step_with_saved(step.timed, saved)
    room_before = budget.gradient_room_bytes
    may_move_in = budget if engine.has_device_states else None
    on_device = states_on_device(layout, engine.resting_tiers, timed.accesses, may_move_in)
    tiers = _C.later_resting_tiers(layout, engine.resting_tiers, on_device, engine.host_bytes, budget.backwards)
    slowdown = 1.0
    if Saved.PRODUCTS_ON_HOST in saved:
        chunks = [layout.chunk(index) for index, is_there in enumerate(on_device) if not is_there]
        numel = sum(chunk["shard_numel"] for chunk in chunks if chunk["trainable"])
        slowdown = slowdown_of_updates(step.timed.calls, saved, numel)
    try:
        budget.gradient_room_bytes = _C.gradient_room_bytes(layout, tiers, engine.host_bytes)
        room = engine.host_bytes - _C.bytes_on_host(layout, tiers, budget.backwards)
        room -= _C.disk_set_bytes(layout, engine.resting_tiers) + _C.reserved_gradient_bytes(layout)
        room -= _C.leaving_gradient_bytes(layout, timed.accesses, on_device, budget)
        room -= sent_bytes(step.timed.calls, saved)
        updates = earliest_updates(layout, tiers, room, engine.start, engine.scale)
        yield PlacedStep(timed, on_device, tiers, updates, room, slowdown)
    finally:
        budget.gradient_room_bytes = room_before


def predicted_seconds(engine: PlacedEngine, step: MeasuredStep, saved: Sequence[Saved]) -> float:
    """Seconds of a steady step with this choice, placed and planned as by the engine. Infinite if the device has no
    room, or the host none for what is sent there.
    """
    rates, alone = step.rates, step.rates.host_adam_params_per_second
    with placed_step(engine, step, saved) as placed:
        if Saved.PRODUCTS_ON_HOST in saved and placed.room_bytes < 0:
            return math.inf
        rates.host_adam_params_per_second = alone / placed.host_slowdown
        try:
            choice = choose_step(
                engine.layout, placed.timed, placed.on_device, engine.budget, placed.updates, engine.start, rates
            )
        finally:
            rates.host_adam_params_per_second = alone
    fits = choice["plan"]["least_limit_bytes"] <= engine.budget.limit_bytes
    return choice["predicted"]["seconds"] if fits else math.inf


@dataclasses.dataclass(frozen=True)
class Choice:
    """A rung of one ladder."""

    rung: int
    tried: dict[int, float]
    """Predicted seconds of all rungs that were tried."""


def recomputation_text(saved: Sequence[Saved], seconds: float, seconds_of_none: float) -> str:
    """A line for users on a choice of predicted ``seconds``; ``seconds_of_none``: if nothing is saved."""
    counts = {kept: saved.count(kept) for kept in Saved}
    texts = [f"recomputing {counts[Saved.NOTHING]} of {len(saved)} checkpointed layers"]
    keeping = counts[Saved.PRODUCTS] + counts[Saved.PRODUCTS_ON_HOST]
    if keeping:
        texts.append(f"all but products in {keeping}")
    if counts[Saved.PRODUCTS_ON_HOST]:
        texts.append(f"products of {counts[Saved.PRODUCTS_ON_HOST]} on the host")
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


@dataclasses.dataclass(frozen=True)
class SavedChoice(Choice):
    """A rung of one of several ladders."""

    ladder: Ladder

    @property
    def saved(self) -> tuple[Saved, ...]:
        """Choices of the calls, by number."""
        return self.ladder.saved(self.rung)

    @property
    def seconds(self) -> float:
        """Predicted seconds of the step."""
        return self.tried[self.rung]


def choose_saved(
    ladder: Ladder,
    num_sent: int,
    seconds_of: Callable[[Ladder, list[int]], list[float]],
    choose: Callable[[int, Callable[[list[int]], list[float]]], Choice] = choose_rung,
) -> SavedChoice:
    """The choice with the shortest step; of almost equal ones the one with fewest bytes on the host, then the lowest.

    Args:
        ladder: without products on the host.
        num_sent: most calls that may send products.
        seconds_of: predicts steps of a ladder's rungs; with several ranks the longest of all ranks.
        choose: the search on ``ladder``. Senders are tried on its rung, and where the other calls save least.
    """
    staying = choose(ladder.top, functools.partial(seconds_of, ladder))
    kept = SavedChoice(staying.rung, staying.tried, ladder)
    choices: list[SavedChoice] = []
    for count in sorted({num_sent * part // _SENDING_PARTS for part in range(1, _SENDING_PARTS + 1)} - {0}):
        sending = ladder.sending(count)
        rungs = [rung for rung in sorted({1, staying.rung}) if sending.sends_at(rung)]
        times = dict(zip(rungs, seconds_of(sending, rungs), strict=True))
        if times:
            choices.append(SavedChoice(lowest_of_shortest(times), times | {0: staying.tried[0]}, sending))
    least = min((choice.seconds for choice in choices), default=math.inf)
    if not choices or least > kept.seconds * (1 - _WORTH_SENDING):
        return kept
    return next(choice for choice in choices if choice.seconds <= least * (1 + WORTH_SAVING))


def lowest_of_shortest(seconds_of: dict[int, float]) -> int:
    """The lowest rung whose step is about as short as the shortest."""
    least = min(seconds_of.values())
    return min(rung for rung, seconds in seconds_of.items() if seconds <= least * (1 + WORTH_SAVING))


def _choice(seconds_of: dict[int, float]) -> Choice:
    return Choice(lowest_of_shortest(seconds_of), dict(sorted(seconds_of.items())))
