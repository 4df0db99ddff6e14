"""The choice of recomputation in a plan, as an engine makes it after its first step (session/recompute_choice.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from patrickstar import _C
from patrickstar.planning.prediction import Case, Predictor
from patrickstar.planning.recomputation import WORTH_SAVING, Choice
from patrickstar.planning.setting import DoesNotFitError, Setting

Search = Callable[[int, Callable[[list[int]], list[float]]], Choice]
"""``choose_rung``, or ``choose_roughly``."""


def may_pay(case: Case) -> bool:
    """False if another resource than compute bounds the step of ``case``, in which all is recomputed. Saved activations
    take room from chunks, so no other resource gets less to do.
    """
    busy = [seconds for name, seconds in case.step.roofline.items() if name != "compute"]
    return case.step.seconds > (1 + WORTH_SAVING) * max(busy)


def shortest_recomputation(predictor: Predictor, settings: Iterable[Setting], choose: Search) -> list[Case]:
    """The case with the shortest step of each setting, by ``choose``. The engine compares steps at cautious rates.

    Raises:
        DoesNotFitError: a setting does not fit if all checkpointed calls are recomputed.
    """
    return [_shortest(predictor, setting, choose) for setting in settings]


def _shortest(predictor: Predictor, setting: Setting, choose: Search) -> Case:
    ladder = predictor.recomputations

    def seconds_of(rung: int) -> float:
        try:
            return predictor.predict(setting, ladder.saved(rung), _C.cautious).step.seconds
        except DoesNotFitError:
            return math.inf

    choice = choose(ladder.top, lambda rungs: [seconds_of(rung) for rung in rungs])
    return predictor.predict(setting, ladder.saved(choice.rung))
