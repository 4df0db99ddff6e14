"""From the uses of a step to the timeline that the core would record with a given layout.

The rules are those of csrc/engine/access_tracker.cpp (who holds what until when, what begins a moment) and
gradient_flow.cpp (when a gradient retires); tests/plan/test_uses.py compares the two on real training runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from patrickstar import _C
from patrickstar.planning.leaving import Copies
from patrickstar.planning.uses import Call, StepUses, Use

_READ, _WRITE, _RETIRE = _C.AccessMode.READ, _C.AccessMode.WRITE, _C.AccessMode.RETIRE
_PARAM, _GRAD = _C.ArrayKind.PARAM, _C.ArrayKind.GRAD

_Access = tuple[int, _C.ArrayKind, _C.AccessMode]  # the chunk first


@dataclasses.dataclass(frozen=True)
class TimedTimeline:
    """A timeline, and how long its moments take on the device when nothing waits."""

    moments: list[dict[str, Any]]
    """The moments of the step in their order, each a dict as ``_C.make_plan`` takes it."""
    seconds: list[float]
    """Time of the device's operations in each moment."""
    waste_bytes: int
    """The most that the chunks which a moment begins with hold beside the parameters that it asks for."""
    copies: list[Copies] = dataclasses.field(default_factory=list)
    """Of activations, by moment."""

    @property
    def tide_peak_bytes(self) -> int:
        """The highest tide of the step: memory of the device that is not the chunks'."""
        return max((moment["tide_peak_bytes"] for moment in self.moments), default=0)


@dataclasses.dataclass(frozen=True)
class Accesses:
    """The moments of a step, whatever the tide is then and however long they take."""

    moments: list[tuple[_C.Phase, list[_Access]]]
    """By moment, its phase and its accesses."""
    moment_of: list[int]
    """By use, the moment that lasts after it; -1: before the first one."""
    waste_bytes: int
    """As :attr:`TimedTimeline.waste_bytes`."""

    def timed(self, uses: StepUses) -> TimedTimeline:
        """With the tide, the times and the copies of these uses, which call the core as those do that were played."""
        peaks, seconds = [0] * len(self.moments), [0.0] * len(self.moments)
        copies = [Copies() for _ in self.moments]
        for use, moment in zip(uses.uses, self.moment_of, strict=True):
            if moment >= 0:
                peaks[moment] = max(peaks[moment], use.tide_peak_bytes + uses.static_bytes)
                copies[moment].add(use.copies)
            if self.moments:
                seconds[max(moment, 0)] += use.seconds
        moments = [
            {"phase": phase, "accesses": accesses, "tide_peak_bytes": peak}
            for (phase, accesses), peak in zip(self.moments, peaks, strict=True)
        ]
        return TimedTimeline(moments, seconds, self.waste_bytes, copies)


def play_accesses(uses: StepUses, layout: _C.Layout, states_on_device: Sequence[bool]) -> Accesses:
    """What a step with these uses accesses. ``states_on_device`` by chunk: with one rank, gradients of such chunks do
    not leave, unless they are applied at once; with several all do, when they are scattered.
    """
    model = _AccessModel(layout, states_on_device, uses)
    moment_of = []
    for use in uses.uses:
        model.play(use)
        moment_of.append(len(model.moments) - 1)
    model.end_backward()
    return Accesses(model.moments, moment_of, model.waste_bytes)


def make_timeline(uses: StepUses, layout: _C.Layout, states_on_device: Sequence[bool]) -> TimedTimeline:
    """The timeline of a step with these uses, as :func:`play_accesses` takes them."""
    return play_accesses(uses, layout, states_on_device).timed(uses)


def _param_bytes(chunks: Sequence[dict[str, Any]], layout: _C.Layout) -> dict[int, int]:
    """By parameter, the gap that aligns the next one included."""
    sizes = {}
    for chunk in chunks:
        offsets = [layout.placement(param)[1] for param in chunk["params"]] + [chunk["numel"]]
        for param, begin, end in zip(chunk["params"], offsets[:-1], offsets[1:], strict=True):
            sizes[param] = (end - begin) * itemsize(chunk)
    return sizes


def itemsize(chunk: dict[str, Any]) -> int:
    """Bytes per element of a chunk's parameters and gradients."""
    return 4 if chunk["dtype"] == _C.DType.FLOAT32 else 2


def _ends_at_once(states: _C.StateFormat) -> bool:
    """Whether a gradient is applied when it is complete, since it has nowhere to wait."""
    return states.master != _C.StateType.FLOAT32 and states.gradient == _C.GradientPlace.OF_PARAM


class _Hold:
    __slots__ = ("begin", "params", "until")

    def __init__(self, begin: int, params: list[int], until: _C.HoldUntil):
        self.begin = begin
        self.params = params
        self.until = until


class _AccessModel:
    """The part of the core's bookkeeping that shows in the timeline."""

    def __init__(self, layout: _C.Layout, states_on_device: Sequence[bool], uses: StepUses):
        specs = [layout.chunk(chunk) for chunk in range(layout.num_chunks)]
        chunks = [spec["params"] for spec in specs]
        self.moments: list[tuple[_C.Phase, list[_Access]]] = []
        self.waste_bytes = 0
        self._param_bytes = _param_bytes(specs, layout)
        self._chunk_bytes = [spec["numel"] * itemsize(spec) for spec in specs]
        several = layout.num_ranks > 1
        self._leaves = [  # by chunk: its gradient's slot
            several or not at or _ends_at_once(spec["states"]) for spec, at in zip(specs, states_on_device, strict=True)
        ]
        self._chunk_of = {param: chunk for chunk, params in enumerate(chunks) for param in params}
        self._num_uses = [0] * len(self._chunk_of)
        self._holds = [0] * len(chunks)
        self._alive = [len(params) for params in chunks]  # by chunk: parameters whose value is still of use
        self._is_dead = [False] * len(self._chunk_of)
        self._folds_left = [0] * len(chunks)
        for use in uses.uses:
            if use.call is Call.FOLD:
                self._folds_left[self._chunk_of[use.params[0]]] += 1
        self._written: set[int] = set()
        self._retired: set[int] = set()
        self._scopes: list[_Hold] = []
        self._backward: list[_Hold] = []
        self._transient: list[int] = []
        self._phase = _C.Phase.FORWARD

    def play(self, use: Use) -> None:
        """One call of the core."""
        if use.call is Call.OPEN_SCOPE:
            self._open_scope(use.params, use.until)
        elif use.call is Call.CLOSE_SCOPE:
            self._release_transient()
            self._release(self._scopes.pop().params)
        elif use.call is Call.TOUCH:
            self._touch(use.params)
        elif use.call is Call.END_FORWARD:
            self._release_transient()
            self._phase = _C.Phase.BACKWARD
        elif use.call is Call.ENTER_BACKWARD:
            self._enter_backward(use)
        else:
            self._fold(use.params[0])

    def end_backward(self) -> None:
        """Releases what backward still holds; gradients that are still there retire."""
        self._release_transient()
        for hold in self._backward:
            self._release_backward(hold.params)
        for chunk in sorted(self._written - self._retired):
            self._retire(chunk)

    def _open_scope(self, params: list[int], until: _C.HoldUntil | None) -> None:
        self._release_transient()
        self._acquire(params)
        transient = until == _C.HoldUntil.NEXT_EVENT
        if transient:
            self._transient = list(params)
        self._scopes.append(_Hold(0, [] if transient else list(params), until or _C.HoldUntil.SCOPE_END))

    def _touch(self, params: list[int]) -> None:
        if all(self._num_uses[param] > 0 for param in params):
            return
        self._acquire(params)
        in_leaf = self._scopes and self._scopes[-1].until == _C.HoldUntil.SCOPE_END
        (self._scopes[-1].params if in_leaf else self._transient).extend(params)

    def _enter_backward(self, use: Use) -> None:
        self._release_transient()
        over = [hold for hold in self._backward if hold.begin > use.end]
        self._backward = [hold for hold in self._backward if hold.begin <= use.end]
        for hold in over:
            self._release_backward(hold.params)
        self._acquire(use.params)
        self._backward.append(_Hold(use.begin, list(use.params), _C.HoldUntil.SCOPE_END))

    def _acquire(self, params: list[int]) -> None:
        if not params:
            return
        chunks = [self._chunk_of[param] for param in params]
        all_held = all(self._holds[chunk] > 0 for chunk in chunks)
        for param, chunk in zip(params, chunks, strict=True):
            self._num_uses[param] += 1
            self._holds[chunk] += 1
            self._set_dead(param, False)
        if not all_held:
            held = sum(self._chunk_bytes[chunk] for chunk in set(chunks))
            asked = sum(self._param_bytes[param] for param in set(params))
            self.waste_bytes = max(self.waste_bytes, held - asked)
            self.moments.append((self._phase, [(chunk, _PARAM, _READ) for chunk in sorted(set(chunks))]))

    def _release_transient(self) -> None:
        params, self._transient = self._transient, []
        self._release(params)

    def _release(self, params: list[int]) -> None:
        for param in params:
            self._holds[self._chunk_of[param]] -= 1
            self._num_uses[param] -= 1

    def _release_backward(self, params: list[int]) -> None:
        self._release(params)
        for param in params:
            if self._num_uses[param] == 0:
                self._set_dead(param, True)
        for chunk in dict.fromkeys(self._chunk_of[param] for param in params):
            self._maybe_retire(chunk)

    def _fold(self, param: int) -> None:
        chunk = self._chunk_of[param]
        self._written.add(chunk)
        self._add((chunk, _GRAD, _WRITE))
        if self._num_uses[param] == 0:
            self._set_dead(param, True)
        self._folds_left[chunk] -= 1
        self._maybe_retire(chunk)

    def _maybe_retire(self, chunk: int) -> None:
        if chunk in self._written and self._folds_left[chunk] == 0 and self._alive[chunk] == 0:
            self._retire(chunk)

    def _retire(self, chunk: int) -> None:
        if chunk in self._retired:
            return
        self._retired.add(chunk)
        if self._leaves[chunk]:
            self._add((chunk, _GRAD, _RETIRE))

    def _add(self, access: _Access) -> None:
        if self.moments and access not in self.moments[-1][1]:
            self.moments[-1][1].append(access)

    def _set_dead(self, param: int, dead: bool) -> None:
        if self._is_dead[param] != dead:
            self._is_dead[param] = dead
            self._alive[self._chunk_of[param]] += -1 if dead else 1
