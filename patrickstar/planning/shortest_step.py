"""Searches the shortest step: an engine may be given less memory than exists."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Sequence

from patrickstar import _C
from patrickstar.machine.state_scheme import lacks_room_ahead, may_put_values_in_place, room_ahead_bytes
from patrickstar.planning.case import Case
from patrickstar.planning.placing import device_budget
from patrickstar.planning.prediction import Predictor
from patrickstar.planning.setting import DoesNotFitError, Setting
from patrickstar.sizes import size_in_words

# Tried numbers of chunks with states on the device. They do not depend on the budgets, so a larger budget tries all
# choices of a smaller one. The search stops after _PATIENCE numbers without a shorter step. Shares of the other chunks
# get whole updates in backward; the rest get two-phase updates.
_STATE_COUNTS = (*range(9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 160, 192, 256)
_PATIENCE = 2
_SHARES_WHOLE = (0.0, 0.25, 0.5, 0.75)
_HALVINGS = 12
_GRAIN_BYTES = 2**28  # of a budget that is written into a configuration


def shortest_cases(cases: Sequence[Case]) -> list[Case]:
    """Returns the cases whose predicted steps are within the simulator's tolerance of the shortest."""
    longest = min(case.step.seconds for case in cases) * (1 + _C.PREDICTION_TOLERANCE)
    return [case for case in cases if case.step.seconds <= longest]


def host_bytes_for_values_in_place(layout: _C.Layout, setting: Setting) -> int | None:
    """The most host memory with which an engine puts new parameters in place of old ones; None: not with less."""
    if _C.puts_values_in_place(layout) or not setting.may_put_values_in_place:
        return None
    if not may_put_values_in_place(layout, setting.optimizer_config()):
        return None
    num_bytes = room_ahead_bytes(layout, setting.state_device_bytes) - 1
    num_bytes -= num_bytes % (_GRAIN_BYTES if num_bytes >= 64 * _GRAIN_BYTES else 1)
    return num_bytes if 0 < num_bytes < setting.host_bytes else None


class ShortestStep:
    """Searches the budgets of an engine with one layout."""

    def __init__(self, predictor: Predictor):
        self._predictor = predictor

    def choose(self, usual: Case) -> Case:
        """Returns the case with the shortest step within the budgets of ``usual``, an engine's case with all of them.
        More memory may give a step that is longer by the simulator's tolerance.

        Memory alone determines how many chunks have states on the device (num_device_state_chunks,
        csrc/plan/placement.h), but another number may be faster. With ample ``host_memory``, the next forward waits for
        states left on the host, or for whole updates instead of parameters only. With an ample device, updates on the
        GPU take time that the host would hide. The search therefore also tries less ``host_memory`` and a lower
        ``margin_use_ratio``.
        """
        cases, setting = [usual], usual.setting
        if setting.hybrid_adam and not usual.is_hidden:
            count_now, most = self._state_counts(setting)
            fewer = (self._with_fewer(setting, count) for count in reversed(_STATE_COUNTS) if count < count_now)
            more = (
                self._with_less_host(setting, count, 0) for count in (*_STATE_COUNTS, most) if count_now < count <= most
            )
            num_others = len(self._predictor.chunks) - count_now
            whole = [self._with_less_host(setting, count_now, int(share * num_others)) for share in _SHARES_WHOLE]
            cases += self._descend(fewer, cases[0], _PATIENCE)
            cases += self._descend(filter(self._is_for, more), cases[0], _PATIENCE)
            cases += self._descend(filter(self._is_for, whole), cases[0], len(whole))
        return shortest_cases(cases)[0]

    def _is_for(self, setting: Setting | None) -> bool:
        """True if an engine with the budgets of ``setting`` would choose this layout."""
        layout = self._predictor.layout
        if setting is None:
            return False
        if _C.puts_values_in_place(layout) or not may_put_values_in_place(layout, setting.optimizer_config()):
            return True
        return not lacks_room_ahead(layout, device_bytes=setting.state_device_bytes, host_bytes=setting.host_bytes)

    def _descend(self, settings: Iterable[Setting | None], begin: Case, patience: int) -> list[Case]:
        """Returns the cases of ``settings`` in order, skipping None, until ``patience`` cases in a row give no shorter
        step.
        """
        cases, shortest, worse = [], begin.step.seconds, 0
        for setting in settings:
            if setting is None:
                continue
            with contextlib.suppress(DoesNotFitError):
                cases.append(self._predictor.predict(setting))
                worse = worse + 1 if cases[-1].step.seconds >= shortest else 0
                shortest = min(shortest, cases[-1].step.seconds)
            if worse == patience:
                break
        return cases

    def _state_counts(self, setting: Setting) -> tuple[int, int]:
        """Numbers of leading chunks with states on the device: with these budgets, and with so little host memory that
        no other update could begin in backward.
        """
        budget = device_budget(setting)
        usual = self._predictor.placer.num_state_chunks(setting, budget)
        if not setting.updates_take_memory:
            return usual, usual
        budget.host_limit_bytes = 0
        return usual, self._predictor.placer.num_state_chunks(setting, budget)

    def _with_fewer(self, setting: Setting, count: int) -> Setting | None:
        """Returns the setting with the largest ``margin_use_ratio`` that puts ``count`` chunks' states on the device,
        or None.
        """
        budget = device_budget(setting)
        budget.host_limit_bytes = 2**62
        low, high = 0.0, setting.margin_use_ratio
        for _ in range(_HALVINGS):
            budget.margin_use_ratio = (low + high) / 2
            low, high = (
                (low, budget.margin_use_ratio)
                if self._predictor.placer.num_state_chunks(setting, budget) > count
                else ((low + high) / 2, high)
            )
        for ratio in (math.floor(low * 1000) / 1000, low):  # a rounded ratio if it works as well
            budget.margin_use_ratio = ratio
            if ratio > 0.0 and self._predictor.placer.num_state_chunks(setting, budget) == count:
                return dataclasses.replace(setting, margin_use_ratio=ratio)
        return None

    def _with_less_host(self, setting: Setting, count: int, num_whole: int) -> Setting | None:
        """Returns the setting with the ``host_memory`` that puts ``count`` chunks' states on the device, gives
        ``num_whole`` others whole updates in backward, and the rest two-phase updates. None if that is not less.
        """
        if not setting.updates_take_memory:
            return None
        on_host = [chunk for chunk in self._predictor.chunks[count:] if chunk["trainable"]]
        states = sum(chunk["resting_tier_bytes"] - chunk["param_bytes"] for chunk in on_host[:num_whole])
        num_bytes = size_in_words(self._bytes_ahead(count) + self._predictor.timelines.away_bytes(setting) + states)
        return dataclasses.replace(setting, host_bytes=num_bytes) if num_bytes < setting.host_bytes else None

    def _bytes_ahead(self, first: int) -> int:
        """Host bytes of the chunks from ``first`` on, with new compute values beside the old ones."""
        rest = self._predictor.chunks[first:]
        new_values = sum(chunk["new_value_bytes"] for chunk in rest if chunk["trainable"])
        resting_tiers = sum(chunk["resting_tier_bytes"] for chunk in rest)
        return _C.reserved_gradient_bytes(self._predictor.layout) + resting_tiers + new_values
