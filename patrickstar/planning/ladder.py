"""Choices of what checkpointed calls save, in an order of activation memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from patrickstar.activations.activation_rules import MOST_LEAVING, Saved
from patrickstar.planning.saved_steps import memory_of
from patrickstar.planning.step_plan import SavedCalls
from patrickstar.planning.timeline import TimedTimeline


class Ladder:
    """The choices for ``num_calls`` calls of a forward, by activation memory.

    Calls save their products, the last calls first, since their activations live shortest. Once all do, calls save
    everything, the last first. Without ``has_products`` calls save nothing or everything.

    ``num_sent`` of the calls that would save nothing send their products to the host, evenly spread, once the last call
    saves its products.
    """

    def __init__(self, num_calls: int, *, has_products: bool, num_sent: int = 0):
        self._num_calls = num_calls
        self.has_products = has_products
        self.num_sent = num_sent
        self._levels = (Saved.PRODUCTS, Saved.EVERYTHING) if has_products else (Saved.EVERYTHING,)

    @property
    def top(self) -> int:
        """The highest rung. Rung 0 saves nothing."""
        return len(self._levels) * self._num_calls

    def sends_at(self, rung: int) -> bool:
        """True if calls send products."""
        return Saved.PRODUCTS_ON_HOST in self.saved(rung)

    def sending(self, num_sent: int) -> Ladder:
        """The ladder on which so many calls send their products."""
        return Ladder(self._num_calls, has_products=self.has_products, num_sent=num_sent)

    def saved(self, rung: int) -> tuple[Saved, ...]:
        """Choices of the calls, by number."""
        full, rest = divmod(rung, self._num_calls) if self._num_calls else (0, 0)
        levels = (Saved.NOTHING, *self._levels, self._levels[-1])
        lower = [levels[full]] * (self._num_calls - rest)
        num_sent = min(self.num_sent, len(lower)) if full == 0 and rest > 0 else 0
        for index in range(num_sent):
            lower[index * len(lower) // num_sent] = Saved.PRODUCTS_ON_HOST
        return (*lower, *(levels[full + 1],) * rest)


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


class SavedLimit:
    """Keeps the activation memory of larger forwards to that of the planned ones.

    Args:
        calls: what they save now, with the bytes of other choices.
        peak_bytes: highest activation memory with ``calls``.

    Attributes:
        size: of the inputs of the largest forward so far, as in ``SavedCalls``.
    """

    def __init__(self, calls: SavedCalls, peak_bytes: int):
        num_sent = calls.saved.count(Saved.PRODUCTS_ON_HOST.value)
        self.ladder = Ladder(len(calls.saved), has_products=any(calls.product_bytes), num_sent=num_sent)
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
        total, sent = 0, [0]
        for number, kept in enumerate(self.ladder.saved(rung)):
            if kept is Saved.PRODUCTS:
                total += self._calls.product_bytes[number]
            elif kept is Saved.EVERYTHING:
                total += self._calls.all_bytes[number]
            elif kept is Saved.PRODUCTS_ON_HOST:
                sent.append(self._calls.product_bytes[number])
        return memory_of(total + sum(sorted(sent)[-MOST_LEAVING - 1 :]))
