"""Compares a traced step with its program (csrc/plan/ops.h): predicted and traced seconds of each instruction.

Spans and instructions are matched by track and chunk, in order. Several spans of one instruction are added (states read
from a disk one by one); so are several instructions of one span (updates of small chunks after the norm).
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
"""Share of the step; shorter differences are within the accuracy of clocks and launches."""

_TRACKS = {
    _C.Lane.UPLOAD: _C.Track.UPLOAD,
    _C.Lane.DOWNLOAD: _C.Track.DOWNLOAD,
    _C.Lane.GATHER: _C.Track.GATHER,
    _C.Lane.SCATTER: _C.Track.SCATTER,
    _C.Lane.HOST: _C.Track.HOST_ADAM,
    _C.Lane.DISK_READ: _C.Track.DISK_READ,
    _C.Lane.DISK_HOST: _C.Track.DISK_ADAM,
    _C.Lane.DISK_WRITE: _C.Track.DISK_WRITE,
    _C.Lane.ROUND_TRIP: _C.Track.ROUND_TRIP,
}
_Place = tuple[_C.Track, int]
_TRACKS_OF_OPS = {"update_host_states": _C.Track.HOST_STATES, "update_device": _C.Track.DEVICE_ADAM}


_UPDATE_LANES = (_C.Lane.HOST, _C.Lane.DISK_HOST)
_UPDATE_OPS = ("update_device",)


@dataclasses.dataclass(frozen=True)
class PlayedInstruction:
    """An instruction and its predicted time. Seconds count from the begin of the step."""

    op: str
    """Name of its row in csrc/plan/ops.h."""
    lane: _C.Lane
    """Queue or worker that executes it from ``begin_seconds`` on."""
    access: int | None
    """Access in which it is issued; None: after the norm of all gradients."""
    chunk: int | None
    kind: _C.ArrayKind | None
    """The chunk's array; None: it concerns the chunk, the access or the step."""
    amount: int
    """Bytes; for an update, parameters."""
    begin_seconds: float
    seconds: float

    @property
    def end_seconds(self) -> float:
        """End of the instruction."""
        return self.begin_seconds + self.seconds

    @property
    def name(self) -> str:
        """For example ``fetch param.3`` or ``update_host 3``."""
        if self.chunk is None:
            return self.op
        return f"{self.op} {self.chunk}" if self.kind is None else f"{self.op} {self.kind.name.lower()}.{self.chunk}"

    @property
    def shown_amount(self) -> str:
        """Amount with its unit; empty for 0."""
        if self.amount == 0:
            return ""
        is_update = self.lane in _UPDATE_LANES or self.op in _UPDATE_OPS
        return f"{show_count(self.amount)} parameters" if is_update else show_size(self.amount)


@dataclasses.dataclass(frozen=True)
class Compared:
    """An instruction with its traced begin and duration, in seconds."""

    instruction: PlayedInstruction
    traced_begin: float
    traced_seconds: float

    def differs(self, step_seconds: float) -> bool:
        """True if the durations differ by more than 5 % and by more than a thousandth of the step."""
        difference = abs(self.traced_seconds - self.instruction.seconds)
        return difference > max(_TOLERANCE * self.instruction.seconds, _LEAST_SHARE * step_seconds)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The comparison of a step with its program."""

    compared: list[Compared]
    """In order of issue."""
    missing: list[PlayedInstruction]
    """Instructions without a span in the trace."""
    traced_seconds: float

    @property
    def first(self) -> Compared | None:
        """The first instruction that differs; None if all agree."""
        return next((one for one in self.compared if one.differs(self.traced_seconds)), None)

    def lines(self) -> list[str]:
        """Returns the first instruction that differs and a table of all."""
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
        where = "after the norm" if one.access is None else f"access {one.access}"
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
    """Compares a trace from ``_C.Runtime.take_trace`` with the program of its plan."""
    spans: dict[_Place, list[dict[str, Any]]] = defaultdict(list)
    for span in trace["spans"]:
        if span["owner"] == _C.SpanOwner.THIS_STEP and not span["dropped"]:
            spans[span["track"], span["chunk"]].append(span)
    merged = _merged(instructions, spans)
    turns: dict[_Place, list[int]] = defaultdict(list)
    compared: dict[int, Compared] = {}
    for index, one in enumerate(merged):
        place = _place(one)
        if one.op == "compute" and one.access is not None and one.access < len(trace["accesses"]):
            access = trace["accesses"][one.access]
            compared[index] = Compared(one, access["begin_seconds"], access["seconds"] - access["stalled_seconds"])
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
    """Returns the track and chunk of its spans; None if it neither moves nor updates data."""
    track = _TRACKS_OF_OPS.get(one.op, _TRACKS.get(one.lane))
    return None if one.chunk is None or one.amount == 0 or track is None else (track, one.chunk)


def _merged(
    instructions: Sequence[PlayedInstruction], spans: Mapping[_Place, list[dict[str, Any]]]
) -> list[PlayedInstruction]:
    """Merges host updates after the norm that share one span, named by its first chunk."""
    result: list[PlayedInstruction] = []
    left = 0  # parameters of the last result's span still to be matched
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
    """Divides ``spans`` into ``count`` equal groups; one span each if they do not divide evenly."""
    size = len(spans) // count if len(spans) % count == 0 else 1
    return [spans[index : index + size] for index in range(0, len(spans), size or 1)][:count]
