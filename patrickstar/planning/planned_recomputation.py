"""The choice of recomputation in a plan, as an engine makes it after its first step (session/recompute_choice.py)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

from patrickstar import _C
from patrickstar.activations.activation_rules import Saved
from patrickstar.planning.case import Case
from patrickstar.planning.ladder import Ladder
from patrickstar.planning.prediction import Predictor
from patrickstar.planning.recomputation import WORTH_SAVING, Choice, choose_saved, lowest_of_shortest
from patrickstar.planning.setting import DoesNotFitError

Search = Callable[[int, Callable[[list[int]], list[float]]], Choice]
"""``choose_rung``, or ``choose_roughly``."""


def may_pay(case: Case) -> bool:
    """False if another resource than compute bounds the step of ``case``, in which all is recomputed. Saved activations
    take room from chunks, so no other resource gets less to do.
    """
    busy = [seconds for name, seconds in case.step.roofline.items() if name != "compute"]
    return case.step.seconds > (1 + WORTH_SAVING) * max(busy)


def shortest_recomputation(predictor: Predictor, cases: Iterable[Case], choose: Search) -> list[Case]:
    """The case with the shortest step of each setting, by ``choose``.

    Steps are compared at cautious rates. An engine corrects its choice by rates beside a step, which are lower than
    those of updates alone.

    Args:
        predictor: of the cases.
        cases: in which all checkpointed calls are recomputed.
        choose: the search.
    """
    return [_Rungs(predictor, case).shortest(choose) for case in cases]


class _Rungs:
    """The rungs for one setting, whose ``case`` recomputes all calls.

    Saved activations take room: a step is taken to be shorter than that of a lower rung by its computation at most.
    Rungs that would then not be chosen are not simulated.
    """

    def __init__(self, predictor: Predictor, case: Case):
        self._predictor, self._case, self._ladder = predictor, case, predictor.recomputations
        self._asked: set[int] = set()
        self._known: dict[int, float] = {}
        self._computing: dict[int, float] = {}
        """With dequantisation, which higher rungs may do less of."""

    def shortest(self, choose: Search) -> Case:
        """The case that ``choose`` finds."""
        num_sent = self._predictor.most_sent(self._case) if self._ladder.has_products else 0
        choice = choose_saved(self._ladder, num_sent, self._seconds_on, choose)
        if choice.rung == 0:
            return dataclasses.replace(self._case, saved=choice.saved)
        return self._predictor.predict(self._case.setting, choice.saved)

    def _seconds_on(self, ladder: Ladder, rungs: list[int]) -> list[float]:
        """Predicted seconds of the rungs of one ladder; infinite as :meth:`_seconds_of` says."""
        if ladder is self._ladder:
            return [self._seconds_of(rung) for rung in sorted(rungs)]
        return [self._seconds_with(ladder.saved(rung)) for rung in rungs]

    def _seconds_with(self, saved: tuple[Saved, ...]) -> float:
        """Predicted seconds of a step whose calls send products."""
        least = max(seconds - self._computing[rung] for rung, seconds in self._known.items())
        if (least + self._compute(saved)) * (1 + WORTH_SAVING) > min(self._known.values()):
            return math.inf
        try:
            return self._predictor.predict(self._case.setting, saved, _C.cautious).step.seconds
        except DoesNotFitError:
            return math.inf

    def _seconds_of(self, rung: int) -> float:
        """Predicted seconds; infinite if the step does not fit or the rung cannot be worth it."""
        may_be_chosen = not self._known or self._may_be_chosen(rung)
        self._asked.add(rung)
        if not may_be_chosen:
            return math.inf
        try:
            predicted = self._predictor.predict(self._case.setting, self._ladder.saved(rung), _C.cautious)
        except DoesNotFitError:
            return math.inf
        self._known[rung] = predicted.step.seconds
        self._computing[rung] = max(self._compute(self._ladder.saved(rung)), predicted.step.compute_seconds)
        return self._known[rung]

    def _may_be_chosen(self, rung: int) -> bool:
        """True if the rung, or one between it and the next asked for, may be chosen."""
        least, chosen = min(self._known.values()), lowest_of_shortest(self._known)
        if rung < chosen:
            return self._least_seconds(rung, rung) <= least * (1 + WORTH_SAVING)
        last = min((asked - 1 for asked in self._asked if asked > rung), default=self._ladder.top)
        return self._least_seconds(rung, last) * (1 + WORTH_SAVING) < self._known[chosen]

    def _least_seconds(self, first: int, last: int) -> float:
        """Seconds that every step of these rungs takes."""
        lower = [known for known in self._known if known < first]
        beside = max((self._known[known] - self._computing[known] for known in lower), default=0.0)
        return beside + self._compute(self._ladder.saved(last))

    def _compute(self, saved: tuple[Saved, ...]) -> float:
        """Seconds of a step's computation without dequantisation."""
        case = self._case
        seconds = self._predictor.compute_seconds(case.setting, saved)
        return seconds * case.setting.accumulation
