"""Simulates activation offload and selective recomputation in a plan: activation memory after offloading.

The rules are those of patrickstar/activations/offloaded_activations.py, the limits those of activation_rules.py. When
the first step's activation memory exceeds its share of the device, the oldest kept tensors are offloaded and return
shortly before use. On CUDA freed memory stays with PyTorch, so the highest value so far counts.

Later steps keep what fits beside the first step's largest need (:class:`DeviceShares`); plans then assume that it had
stayed from the start. Results of attention are kept where there is room. A trace lists kept, used and released tensors
between peaks of activation memory (:class:`Span`); :func:`leave` plays the list on a device with a host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from patrickstar.activations.activation_rules import MOST_LEAVING, DeviceShares, SeenStep, comes_ahead


class Fate(enum.Enum):
    """Events of a tensor that a forward keeps for its backward."""

    KEPT = enum.auto()
    OFFERED = enum.auto()
    """A result of attention, recomputed in backward unless it is kept."""
    USED = enum.auto()
    GONE = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class KeptEvent:
    """An event of a kept tensor."""

    fate: Fate
    number: int
    """Number of the tensor, in the order of keeping and offering."""
    num_bytes: int
    seconds: float = 0.0
    """Recomputation time of an offered tensor that is used."""


@dataclasses.dataclass(slots=True)
class Span:
    """The time from an event to the next one, or to the next use of parameters."""

    event: KeptEvent | None = None
    """Its first event; None: it begins with a use of parameters."""
    peak_bytes: int = 0
    """Highest activation memory in it without offload."""


class KeptTensors:
    """Autograd hooks that report each kept tensor once to ``record``. ``is_param`` identifies parameters' storages by
    address (``_cdata``); those are skipped.
    """

    def __init__(self, record: Callable[[KeptEvent], None], is_param: Callable[[int], bool]):
        self._record = record
        self._is_param = is_param
        self._known: weakref.WeakValueDictionary[Any, _Kept] = weakref.WeakValueDictionary()
        self._count = 0
        self._offers: list[KeptEvent] = []
        self._used_offer: KeptEvent | None = None
        self._in_backward = False

    def begin_backward(self) -> None:
        """Marks the begin of backward: further attention calls are recomputations, in reverse order."""
        self._in_backward = True

    def note_attention(self, num_bytes: int, seconds: float) -> None:
        """Records an attention call that yields ``num_bytes`` in ``seconds``."""
        if not self._in_backward:
            event = KeptEvent(Fate.OFFERED, self._count, num_bytes)
            self._count += 1
            self._offers.append(event)
            self._record(event)
        elif self._offers:
            self._used_offer = dataclasses.replace(self._offers.pop(), fate=Fate.USED, seconds=seconds)
            self._record(self._used_offer)

    def end_attention(self) -> None:
        """Records the end of a recomputed call's backward."""
        if self._used_offer is not None:
            self._record(dataclasses.replace(self._used_offer, fate=Fate.GONE))
        self._used_offer = None

    def keeping(self) -> contextlib.AbstractContextManager[None]:
        """Context of a forward that has a backward."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Kept:
        if type(tensor) is not torch.Tensor:
            return tensor
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
class LinkedDevice:
    """A device with its limits and free host memory."""

    shares: DeviceShares
    room_bytes: int
    """Host bytes that parameters and states leave free."""
    seen: SeenStep | None = None
    """Measurements of earlier steps; None: this is the first step."""


@dataclasses.dataclass(frozen=True)
class ActivationLevels:
    """Activation memory of a step with offload."""

    peaks: tuple[int, ...]
    """Peak of each group of spans; in a first step, including tensors that stay from the next step on."""
    away_bytes: int
    """Most bytes on the host at once."""
    seen: SeenStep
    """The engine's measurements after the step."""
    saved_seconds: tuple[float, ...]
    """By group: recomputation seconds of attention that were saved."""
    kept_calls: int
    """Number of attention calls with kept results."""
    copies: tuple[Copies, ...]
    enough_room_bytes: int
    """Every ``room_bytes`` of at least this gives the same levels."""


@dataclasses.dataclass(slots=True)
class Copies:
    """Copies of activations, in bytes."""

    leaving: int = 0
    """To the host."""
    coming: int = 0
    """Back to the device, begun in this group."""
    needed: int = 0
    """Bytes of returning tensors used in this group."""

    def add(self, other: Copies) -> None:
        """Adds ``other``."""
        self.leaving += other.leaving
        self.coming += other.coming
        self.needed += other.needed

    def as_core(self) -> tuple[int, int, int]:
        """The tuple that ``_C.simulate`` takes per access."""
        return self.leaving, self.coming, self.needed


def leave(groups: Sequence[Sequence[Span]], static_bytes: int, device: LinkedDevice) -> ActivationLevels:
    """Returns the activation memory of consecutive ``groups`` of spans with offload.

    Args:
        groups: by use of parameters in a step, in order.
        static_bytes: activation memory beside the spans' peaks.
        device: limits and host memory.
    """
    events = [span.event for spans in groups for span in spans if span.event is not None]
    played = _Played(static_bytes, device, events)
    peaks, saved, copies = [], [], []
    for spans in groups:
        peak = 0
        played.copies = Copies()
        seconds_before = played.saved_seconds
        for span in spans:
            if span.event is not None:
                played.meet(span.event)
            alive = span.peak_bytes - played.absent_bytes
            peak = max(peak, alive)
            played.note_activations(alive + static_bytes)
        peaks.append(peak)
        saved.append(played.saved_seconds - seconds_before)
        copies.append(played.copies)
    seen = device.seen or device.shares.seen(played.working_bytes, played.highest_whole)
    if device.seen is None:
        most = seen.highest_bytes - static_bytes
        whole = (max(span.peak_bytes for span in spans) for spans in groups)
        peaks = [max(peak, min(high, most)) for peak, high in zip(peaks, whole, strict=True)]
    return ActivationLevels(
        peaks=tuple(peaks),
        away_bytes=played.most_away_bytes,
        seen=seen,
        saved_seconds=tuple(saved),
        kept_calls=played.kept_calls,
        copies=tuple(copies),
        enough_room_bytes=played.enough_room_bytes,
    )


class _Held:
    """Kept tensors by number, oldest first."""

    __slots__ = ("_sizes", "num_bytes")

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, number: int) -> int:
        """Bytes of the tensor; 0 if it is absent."""
        return self._sizes.get(number, 0)

    def put(self, number: int, num_bytes: int) -> None:
        self.num_bytes += num_bytes - self[number]
        self._sizes[number] = num_bytes

    def take(self, number: int) -> int:
        """Removes the tensor and returns its bytes."""
        num_bytes = self._sizes.pop(number, 0)
        self.num_bytes -= num_bytes
        return num_bytes

    @property
    def oldest(self) -> int:
        return next(iter(self._sizes))

    @property
    def newest(self) -> int | None:
        return next(reversed(self._sizes), None)


class _Played:
    """State of each kept tensor: on the device, leaving, on the host, or returning."""

    def __init__(self, static_bytes: int, device: LinkedDevice, events: Sequence[KeptEvent]):
        self.absent_bytes = 0
        self.most_away_bytes = 0
        self.enough_room_bytes = 0
        self.highest_whole = static_bytes  # activation memory without offload
        self.working_bytes = 0
        self.saved_seconds = 0.0
        self.kept_calls = 0
        self.copies = Copies()
        self._highest = static_bytes
        self._shares = device.shares
        self._seen = device.seen
        self._used_again = {event.number for event in events if event.fate is Fate.USED}
        self._num_inputs = sum(event.fate is Fate.KEPT for event in events)
        self._input_bytes = 0
        self._kept_offers: set[int] = set()
        self._least_bytes = device.shares.least_bytes
        self._room_bytes = device.room_bytes
        self._on_device, self._leaving, self._away = _Held(), _Held(), _Held()
        self._coming, self._in_use, self._on_host = _Held(), _Held(), _Held()

    def meet(self, event: KeptEvent) -> None:
        if event.fate is Fate.KEPT:
            self._num_inputs -= 1
            self._input_bytes = event.num_bytes
            self._keep(event)
        elif event.fate is Fate.OFFERED:
            if event.number in self._used_again and self._has_room_beside_inputs(event.num_bytes):
                self._kept_offers.add(event.number)
                self.absent_bytes -= event.num_bytes
                self._keep(event)
        elif event.fate is Fate.USED:
            self._fetch(event.number)
            returned = self._coming.take(event.number)
            self.copies.needed += returned
            in_use = returned or self._on_device[event.number] or self._leaving[event.number]
            self._take(event.number)
            if event.number in self._kept_offers:
                self._kept_offers.remove(event.number)
                self.saved_seconds += event.seconds
                self.kept_calls += 1
                self.absent_bytes += event.num_bytes  # from now on the trace recomputes it
            else:
                self._in_use.put(event.number, in_use)
            before = self._away.newest
            if before is not None and comes_ahead(before, event.number):
                self._fetch(before)
        elif event.fate is Fate.GONE:
            self._take(event.number)
            self._in_use.take(event.number)
            self._room_bytes += self._on_host.take(event.number)

    def note_activations(self, num_bytes: int) -> None:
        """Records the present activation memory."""
        if num_bytes > self._highest:
            self._highest = num_bytes
        if num_bytes + self.absent_bytes > self.highest_whole:
            self.highest_whole = num_bytes + self.absent_bytes
        working_bytes = num_bytes - self._held_bytes
        if working_bytes > self.working_bytes:
            self.working_bytes = working_bytes

    @property
    def _held_bytes(self) -> int:
        return self._on_device.num_bytes + self._leaving.num_bytes + self._in_use.num_bytes

    def _keep(self, event: KeptEvent) -> None:
        if event.num_bytes >= self._least_bytes:
            self._make_room()
            self._on_device.put(event.number, event.num_bytes)

    def _has_room_beside_inputs(self, num_bytes: int) -> bool:
        if self._seen is None:
            return False
        needed = num_bytes + self._num_inputs * self._input_bytes
        self._note_room(needed)
        return self._shares.has_room(needed, self._held_bytes, self._room_bytes, self._seen)

    def _note_room(self, num_bytes: int) -> None:
        """``num_bytes`` more are compared with the free host memory."""
        self.enough_room_bytes = max(self.enough_room_bytes, self._on_host.num_bytes + num_bytes)

    def _excess_bytes(self) -> int:
        if self._seen is None:
            return self._highest - self._shares.first_bytes
        beyond = sum(self._on_device[number] + self._leaving[number] for number in self._kept_offers)
        return self._shares.excess_bytes(self._held_bytes, beyond, self._seen)

    def _fetch(self, number: int) -> None:
        num_bytes = self._away.take(number)
        if num_bytes:
            self.absent_bytes -= num_bytes
            self.copies.coming += num_bytes
            self._coming.put(number, num_bytes)

    def _take(self, number: int) -> None:
        self.absent_bytes -= self._away.take(number)
        self._leaving.take(number)
        self._on_device.take(number)

    def _make_room(self) -> None:
        """Copies that began when the last tensor was kept are over."""
        self._finish(0)
        excess = self._excess_bytes()
        while excess > 0 and self._on_device:
            number = self._on_device.oldest
            num_bytes = self._on_device[number]
            self._note_room(num_bytes)
            if num_bytes > self._room_bytes:
                return
            self._on_device.take(number)
            self._leaving.put(number, num_bytes)
            self._on_host.put(number, num_bytes)
            self.copies.leaving += num_bytes
            self._room_bytes -= num_bytes
            self.most_away_bytes = max(self.most_away_bytes, self._on_host.num_bytes)
            excess -= num_bytes
            self._finish(MOST_LEAVING)

    def _finish(self, most_leaving: int) -> None:
        while len(self._leaving) > most_leaving:
            number = self._leaving.oldest
            num_bytes = self._leaving.take(number)
            self._away.put(number, num_bytes)
            self.absent_bytes += num_bytes
