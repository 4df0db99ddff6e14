"""A traced step beside its program (csrc/plan/ops.h): the seconds of each instruction, predicted and traced.

Spans and instructions are matched by track and chunk, in their order. Where a chunk has several spans for each
instruction (its states are read from a disk one by one), their seconds are added up; where a span stands for several
instructions (updates of small chunks after the norm), theirs are.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from patrickstar import _C
from patrickstar.sizes import show_count, show_size

_TOLERANCE = 0.05
_LEAST_SHARE = 0.001
"""A share of the step: shorter differences are the clock's and the launches'."""

_TRACKS = {
    _C.Lane.UPLOAD: _C.Track.UPLOAD,
    _C.Lane.DOWNLOAD: _C.Track.DOWNLOAD,
    _C.Lane.GATHER: _C.Track.GATHER,
    _C.Lane.SCATTER: _C.Track.SCATTER,
    _C.Lane.HOST: _C.Track.HOST_ADAM,
    _C.Lane.DISK_READ: _C.Track.DISK_READ,
    _C.Lane.DISK_HOST: _C.Track.DISK_ADAM,
    _C.Lane.DISK_WRITE: _C.Track.DISK_WRITE,
    _C.Lane.VISIT: _C.Track.VISIT,
}
_Place = tuple[_C.Track, int]
_TRACKS_OF_OPS = {"update_host_states": _C.Track.HOST_STATES, "update_device": _C.Track.DEVICE_ADAM}


_UPDATE_LANES = (_C.Lane.HOST, _C.Lane.DISK_HOST)
_UPDATE_OPS = ("update_device",)


@dataclasses.dataclass(frozen=True)
class PlayedInstruction:
    """An instruction, and when it is carried out. Seconds count from the beginning of the step."""

    op: str
    """The name of its row in csrc/plan/ops.h."""
    lane: _C.Lane
    """Queue or worker that is busy with it from ``begin_seconds`` on."""
    moment: int | None
    """Moment of the step in which it is issued; None: after the norm of all gradients."""
    chunk: int | None
    kind: _C.ArrayKind | None
    """The array of the chunk; None: the instruction concerns the chunk, the moment or the step."""
    amount: int
    """Bytes; of an update, parameters."""
    begin_seconds: float
    seconds: float

    @property
    def end_seconds(self) -> float:
        """End of its seconds."""
        return self.begin_seconds + self.seconds

    @property
    def name(self) -> str:
        """Such as ``fetch param.3`` or ``update_host 3``."""
        if self.chunk is None:
            return self.op
        return f"{self.op} {self.chunk}" if self.kind is None else f"{self.op} {self.kind.name.lower()}.{self.chunk}"

    @property
    def shown_amount(self) -> str:
        """Amount with its unit; empty where it is 0."""
        if self.amount == 0:
            return ""
        is_update = self.lane in _UPDATE_LANES or self.op in _UPDATE_OPS
        return f"{show_count(self.amount)} parameters" if is_update else show_size(self.amount)


@dataclasses.dataclass(frozen=True)
class Compared:
    """An instruction that the trace has as well. Seconds."""

    instruction: PlayedInstruction
    traced_begin: float
    traced_seconds: float

    def differs(self, step_seconds: float) -> bool:
        """True where the seconds differ by more than 5 % and by more than a thousandth of the step."""
        difference = abs(self.traced_seconds - self.instruction.seconds)
        return difference > max(_TOLERANCE * self.instruction.seconds, _LEAST_SHARE * step_seconds)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A step and its program."""

    compared: list[Compared]
    """Compared instructions, in the order in which they are issued."""
    missing: list[PlayedInstruction]
    """Instructions of which the trace has no span."""
    traced_seconds: float

    @property
    def first(self) -> Compared | None:
        """The first instruction that differs; None: none does."""
        return next((one for one in self.compared if one.differs(self.traced_seconds)), None)

    def lines(self) -> list[str]:
        """First instruction that differs, then a table of all."""
        return [
            self._verdict(),
            f"{len(self.compared)} instructions compared, {len(self.missing)} not in the trace",
            f"{'predicted ms':>24} {'traced ms':>23}",
            f"{'begin':>12} {'takes':>11} {'begin':>11} {'takes':>11}  {'lane':10} instruction",
            *(self._line(one) for one in self.compared),
        ]

    def _verdict(self) -> str:
        if self.first is None:
            return f"no instruction differs from its prediction by more than {_TOLERANCE:.0%}"
        one = self.first.instruction
        where = "after the norm" if one.moment is None else f"moment {one.moment}"
        return (
            f"first that differs by more than {_TOLERANCE:.0%}: {one.name} ({where}), predicted "
            f"{one.seconds * 1e3:.3f} ms, traced {self.first.traced_seconds * 1e3:.3f} ms"
        )

    def _line(self, one: Compared) -> str:
        instruction = one.instruction
        times = (instruction.begin_seconds, instruction.seconds, one.traced_begin, one.traced_seconds)
        shown = " ".join(f"{value * 1e3:11.3f}" for value in times)
        mark = "  <" if one.differs(self.traced_seconds) else ""
        return f" {shown}  {instruction.lane.name.lower():10} {instruction.name}{mark}"


def compare(trace: dict[str, Any], instructions: Sequence[PlayedInstruction]) -> Comparison:
    """Compares the step that ``_C.Runtime.take_trace`` gave with the program of its plan."""
    spans: dict[_Place, list[dict[str, Any]]] = defaultdict(list)
    for span in trace["spans"]:
        if span["owner"] == _C.SpanOwner.THIS_STEP and not span["dropped"]:
            spans[span["track"], span["chunk"]].append(span)
    merged = _merged(instructions, spans)
    turns: dict[_Place, list[int]] = defaultdict(list)
    compared: dict[int, Compared] = {}
    for index, one in enumerate(merged):
        place = _place(one)
        if one.op == "compute" and one.moment is not None and one.moment < len(trace["moments"]):
            moment = trace["moments"][one.moment]
            compared[index] = Compared(one, moment["begin_seconds"], moment["seconds"] - moment["stalled_seconds"])
        elif place is not None:
            turns[place].append(index)
    for place, indices in turns.items():
        for index, group in zip(indices, _groups(spans[place], len(indices)), strict=False):
            seconds = sum(span["seconds"] for span in group)
            compared[index] = Compared(merged[index], group[0]["begin_seconds"], seconds)
    listed = {index for indices in turns.values() for index in indices}
    return Comparison(
        compared=[compared[index] for index in sorted(compared)],
        missing=[merged[index] for index in sorted(listed - compared.keys())],
        traced_seconds=trace["seconds"],
    )


def _place(one: PlayedInstruction) -> _Place | None:
    """The track and chunk of its spans; None: it moves and updates nothing."""
    track = _TRACKS_OF_OPS.get(one.op, _TRACKS.get(one.lane))
    return None if one.chunk is None or one.amount == 0 or track is None else (track, one.chunk)


def _merged(
    instructions: Sequence[PlayedInstruction], spans: Mapping[_Place, list[dict[str, Any]]]
) -> list[PlayedInstruction]:
    """Host updates after the norm that the engine made in one span, which has the first one's chunk, as one."""
    result: list[PlayedInstruction] = []
    left = 0  # parameters of the span that the last result stands for
    for one in instructions:
        place = _place(one)
        is_update = place is not None and one.lane == _C.Lane.HOST
        if is_update and not spans.get(place) and 0 < one.amount <= left:
            last = result[-1]
            left -= one.amount
            result[-1] = dataclasses.replace(last, amount=last.amount + one.amount, seconds=last.seconds + one.seconds)
            continue
        left = spans[place][0]["numel"] - one.amount if is_update and spans.get(place) else 0
        result.append(one)
    return result


def _groups(spans: list[dict[str, Any]], count: int) -> list[list[dict[str, Any]]]:
    """``spans`` in so many groups of as many, or one span each where that does not come out even."""
    size = len(spans) // count if len(spans) % count == 0 else 1
    return [spans[index : index + size] for index in range(0, len(spans), size or 1)][:count]
