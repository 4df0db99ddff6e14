"""Activations that leave the device between forward and backward, where they take more of it than is theirs.

    stash = ActivationStash(runtime, device, storages, chunk_bytes)
    with stash.keeping():
        loss = module(...)
    ...  # its backward
    stash.end_backward()

[Note: kept activations] What autograd saves in such a forward is kept here instead: with activation checkpointing the
inputs of the layers, which are computed again from them. Where they would take more than their share of the device,
what was kept first is copied to host memory and let go ([Note: stashed activations], csrc/engine/stash.h). The copy
back begins when what was kept a little later is used. Its bits are those that were saved.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import enum
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch

from patrickstar import _C
from patrickstar.activations.activation_rules import MOST_LEAVING, ActivationTier, DeviceShares, comes_ahead
from patrickstar.activations.working_activations import ExpectedInputs, WorkingBytes


class ActivationStash:
    """Of one engine. Forwards and backwards come one after the other.

    Attributes:
        runtime: of the engine.
        working: what activations need beside those that are kept.
    """

    def __init__(self, runtime: _C.Runtime, device: torch.device, storages: Collection[int], chunk_bytes: int):
        """``storages``: the addresses (``_cdata``) of those that hold parameters, which have their own way.
        ``chunk_bytes``: what the largest module's chunks take of the device.
        """
        self.runtime = runtime
        self._device = device
        self._storages = frozenset(storages)
        self._shares = DeviceShares(runtime.report()["device_budget_bytes"], chunk_bytes)
        self.working = WorkingBytes(runtime, self._shares)
        self._known: weakref.WeakValueDictionary[Any, Stashed] = weakref.WeakValueDictionary()
        self._on_device: collections.deque[weakref.ref[Stashed]] = collections.deque()
        self._kept_last: collections.deque[weakref.ref[Stashed]] = self._on_device  # gets what is kept now
        self._leaving: collections.deque[Stashed] = collections.deque()
        # On the simulated device memory is counted to the byte: the least budget that an error names must not depend on
        # how far a busy machine's copies are.
        self._most_leaving = MOST_LEAVING if device.type == "cuda" else 0
        self._away: list[tuple[int, weakref.ref[Stashed]]] = []  # by number
        self._num_kept = 0
        self._inputs = ExpectedInputs()
        self._missed_bytes = 0  # what the host had no room for in one piece

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Around a forward whose backward comes."""
        self._on_device.clear()
        self._away.clear()
        self.working.begin_forward()
        self._inputs.begin_forward()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        except BaseException:
            self.finish()
            raise

    @contextlib.contextmanager
    def resting(self, tier: ActivationTier) -> Iterator[None]:
        """Around the forward of a layer without a checkpoint, whose activations rest on ``tier``: they stay on the
        device (KEEP), or leave it together at the layer's end, and are copied while the next layer computes (OFFLOAD).
        What was kept before the layer goes by the rule it was kept by.
        """
        self._kept_last = collections.deque()
        try:
            yield
            if tier is ActivationTier.OFFLOAD:
                self.finish()  # copies of the layer before
                for ref in self._kept_last:
                    kept = ref()
                    if kept is not None and kept.is_unchanged:  # else its backward will say so
                        kept.would_stay = False
                        self._send(kept)
                if self._most_leaving == 0:
                    self.finish()
        finally:
            self._kept_last = self._on_device

    def finish(self) -> None:
        """Returns when no copy to the host runs any more."""
        while self._leaving:
            self._finish_oldest()

    def end_backward(self) -> None:
        """A backward is over, and with it what activations need is known."""
        was_known = self.working.seen is not None
        seen = self.working.learn()
        if seen is not None and not was_known:
            self.runtime.keep_absent_activations(seen.highest_bytes)

    def forget(self) -> None:
        """A forward ran out of memory and is run again: as in the first one, nothing is known."""
        self.working.forget()

    def keep(self, tensor: torch.Tensor) -> torch.Tensor | Stashed:
        """One that backward will ask for, from now on in the stash; the tensor itself where it may not leave."""
        return self._hold(tensor, beyond=tensor.nbytes) if self._may_leave(tensor) else tensor

    def has_room_beside_inputs(self, num_bytes: int) -> bool:
        """Whether device and host can keep so many bytes, and all that autograd is still to save in this forward: as
        many tensors as in the last one. False in the first forward that asks.
        """
        self.working.measure_always()
        self.working.measure()
        if self.working.seen is None:
            return False
        needed = num_bytes + self._inputs.outstanding_bytes() + self._missed_bytes
        host_bytes = self.runtime.host_room_of_activations()
        return self._shares.has_room(needed, self.working.held_bytes, host_bytes, self.working.seen)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Stashed:
        if tensor.grad_fn is not None:
            tensor = tensor.detach()  # an operation's output would keep the graph that saves it, if its backward fails
        if not self._may_leave(tensor):
            return tensor
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        kept = self._known.get(key)
        if kept is None or kept.place is not Place.ON_DEVICE:
            is_input = self._kept_last is self._on_device
            if is_input and self._inputs.is_larger(tensor):
                self.working.forget()
            kept = self._known[key] = self._hold(tensor)
            if is_input:
                self._inputs.note(tensor.nbytes)
        return kept

    def _hold(self, tensor: torch.Tensor, beyond: int = 0) -> Stashed:
        self.working.measure()
        kept = Stashed(self, tensor, self._num_kept, beyond)
        self._num_kept += 1
        self._make_room()
        self._kept_last.append(weakref.ref(kept))
        return kept

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        if (
            type(tensor) is not torch.Tensor
            or tensor.nbytes < self._shares.least_bytes
            or tensor.device != self._device
        ):
            return False
        storage = tensor.untyped_storage()
        # Of a larger tensor that something else may hold, a part that leaves frees nothing.
        whole = _is_dense(tensor) and storage.nbytes() < 2 * tensor.nbytes
        return whole and storage._cdata not in self._storages

    def _make_room(self) -> None:
        """What was kept first leaves, as long as activations take too much."""
        self._let_go()
        excess = self._excess_bytes()
        while excess > 0 and self._on_device:
            kept = self._on_device[0]()
            if kept is not None and kept.is_unchanged:  # else its backward will say so
                if not self._send(kept):
                    return
                excess -= kept.num_bytes
            self._on_device.popleft()
            if len(self._leaving) > self._most_leaving:
                self._finish_oldest()

    def _send(self, kept: Stashed) -> bool:
        """Starts its copy to the host; False where that has no room."""
        if not kept.leave():
            self._missed_bytes = max(self._missed_bytes, 2 * kept.num_bytes)
            return False
        self._leaving.append(kept)
        bisect.insort(self._away, (kept.number, weakref.ref(kept)))
        return True

    def _excess_bytes(self) -> int:
        """By how much activations exceed their share when what is leaving has left."""
        leaving = sum(kept.num_bytes for kept in self._leaving)
        working = self.working
        if working.seen is None:
            return self.runtime.tide_bytes() - self._shares.first_bytes - leaving
        return self._shares.excess_bytes(working.held_bytes - leaving, working.beyond_bytes, working.seen)

    def _let_go(self) -> None:
        while self._leaving and self.runtime.is_stashed(self._leaving[0].ticket):
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        self._leaving.popleft().finish_leaving()

    def _unpack(self, saved: torch.Tensor | Stashed) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        self._let_go()
        if not saved.is_unchanged:
            raise RuntimeError(
                f"a tensor of shape {list(saved.shape)} that a forward saved for its backward was modified in place; "
                "let that operation make a new tensor"
            )
        return saved.take()

    def fetch_ahead(self, used: Stashed) -> None:
        """Starts the copy back of what is needed next, a little later than ``used``."""
        while self._away:
            number, ref = self._away[-1]
            kept = ref()
            if kept is not None and number < used.number:
                if comes_ahead(number, used.number) and kept.place is Place.AWAY:
                    self._away.pop()
                    kept.fetch()
                return
            self._away.pop()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements are a piece of memory, in whatever order."""
    stride = 1
    for size, step in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1 and step != stride:
            return False
        stride *= size
    return True


class Place(enum.Enum):
    """Where a kept tensor is; it holds device memory everywhere but in ``AWAY``."""

    ON_DEVICE = enum.auto()
    LEAVING = enum.auto()
    AWAY = enum.auto()
    COMING = enum.auto()


class Stashed:
    """A tensor that is kept between forward and backward."""

    def __init__(self, stash: ActivationStash, tensor: torch.Tensor, number: int, beyond: int):
        self._stash = stash
        self._runtime = stash.runtime
        self._working = stash.working
        self.place = Place.ON_DEVICE
        self.number = number
        self.num_bytes = tensor.nbytes
        self.shape, self._stride, self._dtype, self._device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self._tensor: torch.Tensor | None = tensor
        self._version = tensor._version
        self._was_changed = False
        self.ticket = -1  # of one that left
        self._is_absent = False
        self.would_stay = True
        """False: it rests on the host, however much room the device has."""
        self._beyond = beyond
        self._working.hold(self.num_bytes, beyond)

    @property
    def is_unchanged(self) -> bool:
        """Since it was kept; nothing changes what is away or on its way back."""
        return not self._was_changed and (self._tensor is None or self._tensor._version == self._version)

    def leave(self) -> bool:
        """Starts the copy to the host; False where that has no room."""
        assert self._tensor is not None
        self.ticket = self._runtime.stash_activation(self._tensor.data_ptr(), self.num_bytes)
        if self.ticket < 0:
            return False
        self.place = Place.LEAVING
        return True

    def finish_leaving(self) -> None:
        """Returns when the copy is over, and lets go of the device's memory."""
        self._runtime.finish_stashing(self.ticket)
        self._was_changed = not self.is_unchanged
        self.place, self._tensor = Place.AWAY, None
        self._working.hold(-self.num_bytes, -self._beyond)
        self._set_absent(True)

    def fetch(self) -> None:
        """Starts the copy back."""
        self._tensor = torch.empty_strided(self.shape, self._stride, dtype=self._dtype, device=self._device)
        self._version = self._tensor._version
        self._runtime.fetch_activation(self.ticket, self._tensor.data_ptr())
        self.place = Place.COMING
        self._set_absent(False)

    def take(self) -> torch.Tensor:
        """Its value, which may be asked for once more: what came back is not held."""
        self._working.measure()
        if self.place is Place.AWAY:
            self.fetch()
        tensor = self._tensor
        assert tensor is not None
        if self.place is Place.COMING:
            self._runtime.await_activation(self.ticket)
            self.place, self._tensor = Place.AWAY, None
            self._working.note_return(self.num_bytes)
        self._stash.fetch_ahead(self)
        return tensor

    def _set_absent(self, is_absent: bool) -> None:
        if self.would_stay:
            self._working.absent_bytes += (is_absent - self._is_absent) * self.num_bytes
        self._is_absent = is_absent

    def __del__(self):
        self._set_absent(False)
        if self.place is Place.COMING and not self._runtime.closed:
            self._runtime.await_activation(self.ticket)  # its memory may be used again, by what compute does later
        if self.place is not Place.ON_DEVICE:
            self._runtime.drop_activation(self.ticket)
        if self.place in (Place.ON_DEVICE, Place.LEAVING):
            self._working.hold(-self.num_bytes, -self._beyond)
