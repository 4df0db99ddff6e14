"""The longest sequence that fits: found by few traces, since activations grow by about as much with each token."""

from __future__ import annotations

import dataclasses

from patrickstar.planning.planner import Answer, Planner
from patrickstar.planning.question import Question
from patrickstar.planning.setting import DoesNotFitError

LENGTH_UNIT = 1024
"""Lengths are multiples of it, or where no such length fits of :data:`SMALL_UNIT`."""
SMALL_UNIT = 64
MOST_TOKENS = 2**26
"""That are looked for."""

_GUESSES = 8  # after which the bracket is halved


def longest(planner: Planner, question: Question) -> Answer:
    """The answer to ``question`` with the longest sequences that fit, whatever length it has.

    Raises:
        DoesNotFitError: not even the shortest length does.
        ValueError: there is no such model, or it cannot be divided.
    """
    refusal: DoesNotFitError | None = None
    for unit in (LENGTH_UNIT, SMALL_UNIT):
        most = planner.most_tokens(question) or MOST_TOKENS
        if most < unit:
            continue
        search = _Search(planner, question, unit)
        if search.fits(1):
            return planner.answer(search.question(search.most(most // unit)))
        refusal = planner.refusal(search.question(1))
    if refusal is None:
        raise ValueError(f"--longest: the model has fewer than {SMALL_UNIT} positions; give --seq-len")
    raise refusal


class _Search:
    """Of lengths of so many units."""

    def __init__(self, planner: Planner, question: Question, unit: int):
        self._planner, self._question, self._unit = planner, question, unit
        self._needed: dict[int, int] = {}

    def question(self, count: int) -> Question:
        workload = dataclasses.replace(self._question.workload, length=count * self._unit)
        return dataclasses.replace(self._question, workload=workload)

    def fits(self, count: int) -> bool:
        question = self.question(count)
        self._needed[count] = self._planner.needed_device_bytes(question)
        return self._planner.refusal(question) is None

    def most(self, limit: int) -> int:
        """The largest count up to ``limit`` that fits, where 1 does."""
        low, high = 1, limit + 1  # low fits, high is not known to
        guess = 8
        for tried in range(limit):
            if high - low == 1:
                break
            guess = min(max(guess, low + 1), high - 1)
            if self.fits(guess):
                low = guess
            else:
                high = guess
            guess = self._guess() if tried < _GUESSES else (low + high) // 2
        return low

    def _guess(self) -> int:
        """Where the line through the two counts next to the budget crosses it."""
        there = self._question.setting.device_bytes
        near = sorted(self._needed, key=lambda count: abs(self._needed[count] - there))[:2]
        first, second = min(near), max(near)
        each = (self._needed[second] - self._needed[first]) / (second - first)
        if each <= 0:
            return 2 * second
        return first + int((there - self._needed[first]) / each)
