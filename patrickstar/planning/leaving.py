"""Activations that leave the device between forward and backward, in a plan: what the tide is without them.

The rules are those of patrickstar/engine/stashed_activations.py ([Note: kept activations]): once the tide has exceeded
its share of the device, what a forward kept first leaves, and comes back shortly before its use. A trace says what was
kept, used and let go between which peaks of the tide (:class:`Span`); :func:`leave` plays that with a device and a room
on the host. On CUDA memory that was freed stays with PyTorch, so the tide there is the highest so far.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

DEVICE_SHARE = 0.5
"""Of the device: what activations may take before they leave (csrc/engine/stash.cpp)."""
_LEAST_SHARE = 4096  # of the device's memory; these three are those of patrickstar/engine/stashed_activations.py
_MOST_LEAVING = 2
_FETCHED_AHEAD = 3


class Fate(enum.Enum):
    """What becomes of a tensor that a forward keeps for its backward."""

    KEPT = enum.auto()
    USED = enum.auto()
    GONE = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class KeptEvent:
    """Of one such tensor."""

    fate: Fate
    number: int
    """Of the tensor, in the order in which they were kept."""
    num_bytes: int


@dataclasses.dataclass(slots=True)
class Span:
    """The time from an event until the next one, or until the next use of parameters."""

    event: KeptEvent | None = None
    """What it begins with; None: with a use of parameters."""
    peak_bytes: int = 0
    """The highest tide in it, if nothing leaves."""


class KeptTensors:
    """Hooks of autograd that tell ``record`` what a forward keeps, each tensor once. ``is_param`` tells parameters'
    storages, which have their own way, by their address (``_cdata``).
    """

    def __init__(self, record: Callable[[KeptEvent], None], is_param: Callable[[int], bool]):
        self._record = record
        self._is_param = is_param
        self._known: weakref.WeakValueDictionary[Any, _Kept] = weakref.WeakValueDictionary()
        self._count = 0

    def keeping(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward whose backward comes."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Kept:
        storage = tensor.untyped_storage()
        may_leave = tensor.device.type == "meta" and tensor.is_contiguous() and storage.nbytes() < 2 * tensor.nbytes
        if not may_leave or self._is_param(storage._cdata):
            return tensor
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.dtype)
        kept = self._known.get(key)
        if kept is None:
            self._known[key] = kept = _Kept(tensor, self._count, self._record)
            self._count += 1
        return kept

    def _unpack(self, saved: torch.Tensor | _Kept) -> torch.Tensor:
        return saved if isinstance(saved, torch.Tensor) else saved.use()


class _Kept:
    def __init__(self, tensor: torch.Tensor, number: int, record: Callable[[KeptEvent], None]):
        self._tensor = tensor
        self._number = number
        self._record = record
        self._tell(Fate.KEPT)

    def use(self) -> torch.Tensor:
        self._tell(Fate.USED)
        return self._tensor

    def __del__(self):
        self._tell(Fate.GONE)

    def _tell(self, fate: Fate) -> None:
        self._record(KeptEvent(fate, self._number, self._tensor.nbytes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """Where activations are, and where they may go."""

    num_bytes: int
    """Of the device, the configuration's ``device_memory``."""
    room_bytes: int
    """Of the host, beside what parameters and states need."""
    tide_before: int = 0
    """The highest tide of the steps before, on a device whose allocator keeps what was freed."""


@dataclasses.dataclass(frozen=True)
class Tides:
    """Of a step from which activations leave."""

    peaks: list[int]
    """The highest tide in each of the groups of spans."""
    away_bytes: int
    """The most that is on the host at once."""


def leave(groups: Sequence[Sequence[Span]], static_bytes: int, device: Device) -> Tides:
    """The tides of ``groups`` of spans, one after the other, when what exceeds its share of the device leaves.

    Args:
        groups: of the uses of a step, in their order.
        static_bytes: of the tide, beside the spans' peaks.
        device: with its room.
    """
    played = _Played(static_bytes, device)
    peaks = []
    for spans in groups:
        peak = 0
        for span in spans:
            if span.event is not None:
                played.meet(span.event)
            peak = max(peak, span.peak_bytes - played.absent_bytes)
            played.highest = max(played.highest, peak + static_bytes)
        peaks.append(peak)
    return Tides(peaks, played.most_away_bytes)


class _Played:
    """Whether each kept tensor is on the device, leaving it, away, or on its way back."""

    def __init__(self, static_bytes: int, device: Device):
        self.absent_bytes = 0
        self.most_away_bytes = 0
        self.highest = max(device.tide_before, static_bytes)
        self._share = int(device.num_bytes * DEVICE_SHARE)
        self._least_bytes = device.num_bytes // _LEAST_SHARE
        self._room_bytes = device.room_bytes
        self._on_device: dict[int, int] = {}  # by number, bytes; oldest first, as in the others
        self._leaving: dict[int, int] = {}
        self._away: dict[int, int] = {}
        self._on_host: dict[int, int] = {}

    def meet(self, event: KeptEvent) -> None:
        if event.fate is Fate.KEPT and event.num_bytes >= self._least_bytes:
            self._make_room()
            self._on_device[event.number] = event.num_bytes
        elif event.fate is Fate.USED:
            self._come_back(event.number)
            before = next(reversed(self._away), None)
            if before is not None and event.number - _FETCHED_AHEAD <= before < event.number:
                self._come_back(before)
        elif event.fate is Fate.GONE:
            self._come_back(event.number)
            self._room_bytes += self._on_host.pop(event.number, 0)

    def _come_back(self, number: int) -> None:
        self.absent_bytes -= self._away.pop(number, 0)
        self._leaving.pop(number, None)
        self._on_device.pop(number, None)

    def _make_room(self) -> None:
        """Copies that began when the last tensor was kept are over."""
        self._finish(0)
        excess = self.highest - self._share
        while excess > 0 and self._on_device:
            number = next(iter(self._on_device))
            num_bytes = self._on_device[number]
            if num_bytes > self._room_bytes:
                return
            del self._on_device[number]
            self._leaving[number] = self._on_host[number] = num_bytes
            self._room_bytes -= num_bytes
            self.most_away_bytes = max(self.most_away_bytes, sum(self._on_host.values()))
            excess -= num_bytes
            self._finish(_MOST_LEAVING)

    def _finish(self, most_leaving: int) -> None:
        while len(self._leaving) > most_leaving:
            number = next(iter(self._leaving))
            self._away[number] = self._leaving.pop(number)
            self.absent_bytes += self._away[number]
