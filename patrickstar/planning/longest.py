"""Finds the longest sequence that fits, with few traces: activations grow about linearly with the tokens."""

from __future__ import annotations

import dataclasses

from patrickstar.planning.planner import Answer, Planner
from patrickstar.planning.question import Question
from patrickstar.planning.setting import DoesNotFitError

LENGTH_UNIT = 1024
"""Unit of lengths; :data:`SMALL_UNIT` if no multiple of it fits."""
SMALL_UNIT = 64
MOST_TOKENS = 2**26
"""Upper limit of the search."""

_GUESSES = 8  # later guesses halve the bracket


def longest(planner: Planner, question: Question) -> Answer:
    """Returns the answer to ``question`` with the longest sequences that fit; its own length is ignored.

    Raises:
        DoesNotFitError: the shortest length does not fit.
        ValueError: the model does not exist or cannot be sharded.
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
    """Searches among multiples of ``unit``."""

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
        """Returns the largest fitting count up to ``limit``; 1 must fit."""
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
        """Linear interpolation between the two counts nearest to the budget."""
        there = self._question.setting.device_bytes
        near = sorted(self._needed, key=lambda count: abs(self._needed[count] - there))[:2]
        first, second = min(near), max(near)
        each = (self._needed[second] - self._needed[first]) / (second - first)
        if each <= 0:
            return 2 * second
        return first + int((there - self._needed[first]) / each)
