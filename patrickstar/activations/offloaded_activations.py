"""Activation offload: saved tensors leave the device between forward and backward if they exceed their share of it.

offload store = OffloadStore(runtime, device, storages, chunk_bytes)
with offload_store.keeping():
    loss = module(...)
...  # its backward offload_store.end_backward()
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch

from patrickstar import _C
from patrickstar.activations.activation_rules import MOST_LEAVING, DeviceShares, comes_ahead
from patrickstar.activations.host_copies import CopyPlace, HostCopy, is_whole
from patrickstar.activations.working_activations import ExpectedInputs, WorkingBytes


class OffloadStore:
    """Keeps the tensors that autograd saves in the forwards of one engine.

    With activation checkpointing these are the inputs of layers, which are recomputed from them. If they exceed their
    share of the device (``DeviceShares``), the oldest are copied to host memory and released
    (csrc/engine/offload_store.h). The copy to the device begins when a slightly younger tensor is used. Its bits are
    the saved ones.

    Forwards and backwards must not overlap.

    Attributes:
        runtime: of the engine.
        working: working memory beside kept activations.
    """

    def __init__(self, runtime: _C.Runtime, device: torch.device, storages: Collection[int], chunk_bytes: int):
        """``storages``: addresses (``_cdata``) of storages that hold parameters, which never leave through the offload
        store. ``chunk_bytes``: device bytes of the largest module's chunks.
        """
        self.runtime = runtime
        self._device = device
        self._storages = frozenset(storages)
        self._shares = DeviceShares(runtime.report()["device_budget_bytes"], chunk_bytes)
        self.working = WorkingBytes(runtime, self._shares)
        self._known: weakref.WeakValueDictionary[Any, Offloaded] = weakref.WeakValueDictionary()
        self._on_device: collections.deque[weakref.ref[Offloaded]] = collections.deque()
        self._leaving: collections.deque[Offloaded] = collections.deque()
        self._most_leaving = most_leaving(device)
        self._away: list[tuple[int, weakref.ref[Offloaded]]] = []  # by number
        self._num_kept = 0
        self._inputs = ExpectedInputs()
        self._missed_bytes = 0  # twice the largest tensor that found no host buffer

    @property
    def least_bytes(self) -> int:
        """Smaller tensors stay."""
        return self._shares.least_bytes

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Wraps a forward whose backward follows."""
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

    def finish(self) -> None:
        """Waits for all running copies to the host."""
        while self._leaving:
            self._finish_oldest()

    def end_backward(self) -> None:
        """Learns the working memory of the finished step."""
        was_known = self.working.seen is not None
        seen = self.working.learn()
        if seen is not None and not was_known:
            self.runtime.keep_absent_activations(seen.highest_bytes)

    def forget(self) -> None:
        """Drops the measurement before a forward that ran out of memory is run again."""
        self.working.forget()

    def keep(self, tensor: torch.Tensor) -> torch.Tensor | Offloaded:
        """Puts a tensor that backward reads into the offload store; returns the tensor itself if it may not leave."""
        return self._hold(tensor, beyond=tensor.nbytes) if self._may_leave(tensor) else tensor

    def has_room_beside_inputs(self, num_bytes: int) -> bool:
        """True if device and host can keep ``num_bytes`` beside everything that autograd will still save in this
        forward.

        The last forward's count of tensors is expected again. False in the first forward that calls this.
        """
        self.working.measure_always()
        self.working.measure()
        if self.working.seen is None:
            return False
        needed = num_bytes + self._inputs.outstanding_bytes() + self._missed_bytes
        host_bytes = self.runtime.host_room_of_activations()
        return self._shares.has_room(needed, self.working.held_bytes, host_bytes, self.working.seen)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Offloaded:
        if tensor.grad_fn is not None:
            tensor = tensor.detach()  # a saved output would keep its graph alive if the backward fails
        if not self._may_leave(tensor):
            return tensor
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        kept = self._known.get(key)
        if kept is None or kept.place is not CopyPlace.ON_DEVICE:
            if self._inputs.is_larger(tensor):
                self.working.forget()
            kept = self._known[key] = self._hold(tensor)
            self._inputs.note(tensor.nbytes)
        return kept

    def _hold(self, tensor: torch.Tensor, beyond: int = 0) -> Offloaded:
        self.working.measure()
        kept = Offloaded(self, tensor, self._num_kept, beyond)
        self._num_kept += 1
        self._make_room()
        self._on_device.append(weakref.ref(kept))
        return kept

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.nbytes < self.least_bytes or tensor.device != self._device:
            return False
        return is_whole(tensor) and tensor.untyped_storage()._cdata not in self._storages

    def _make_room(self) -> None:
        """Sends the oldest tensors to the host while activations exceed their share."""
        self._let_go()
        excess = self._excess_bytes()
        while excess > 0 and self._on_device:
            kept = self._on_device[0]()
            if kept is not None and kept.is_unchanged:  # else its backward raises
                if not self._send(kept):
                    return
                excess -= kept.num_bytes
            self._on_device.popleft()
            if len(self._leaving) > self._most_leaving:
                self._finish_oldest()

    def _send(self, kept: Offloaded) -> bool:
        """Starts the copy of ``kept`` to the host; False if the host has no room."""
        if not kept.leave():
            self._missed_bytes = max(self._missed_bytes, 2 * kept.num_bytes)
            return False
        self._leaving.append(kept)
        bisect.insort(self._away, (kept.number, weakref.ref(kept)))
        return True

    def _excess_bytes(self) -> int:
        """Bytes by which activations will exceed their share once running copies have finished."""
        leaving = sum(kept.num_bytes for kept in self._leaving)
        working = self.working
        if working.seen is None:
            return self.runtime.activation_bytes() - self._shares.first_bytes - leaving
        return self._shares.excess_bytes(working.held_bytes - leaving, working.beyond_bytes, working.seen)

    def _let_go(self) -> None:
        while self._leaving and self.runtime.is_offloaded(self._leaving[0].ticket):
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        self._leaving.popleft().finish_leaving()

    def _unpack(self, saved: torch.Tensor | Offloaded) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        self._let_go()
        if not saved.is_unchanged:
            raise RuntimeError(
                f"a tensor of shape {list(saved.shape)} that a forward saved for its backward was modified in place; "
                "let that operation make a new tensor"
            )
        return saved.take()

    def fetch_ahead(self, used: Offloaded) -> None:
        """Starts the copy to the device of the tensor that is needed a little later than ``used``."""
        while self._away:
            number, ref = self._away[-1]
            kept = ref()
            if kept is not None and number < used.number:
                if comes_ahead(number, used.number) and kept.place is CopyPlace.AWAY:
                    self._away.pop()
                    kept.fetch()
                return
            self._away.pop()


def most_leaving(device: torch.device) -> int:
    """``MOST_LEAVING`` on a GPU. None on the simulated device, which counts memory to the byte: the least budget in an
    error must not depend on the progress of copies on a busy machine.
    """
    return MOST_LEAVING if device.type == "cuda" else 0


class Offloaded(HostCopy):
    """A tensor of an :class:`OffloadStore`, which leaves if the device has no room.

    Attributes:
        number: of the tensor, in the order of the forward.
    """

    def __init__(self, offload_store: OffloadStore, tensor: torch.Tensor, number: int, beyond: int):
        super().__init__(offload_store.runtime, tensor)
        self._offload_store = offload_store
        self._working = offload_store.working
        self.number = number
        self._is_absent = False
        self._beyond = beyond
        self._working.hold(self.num_bytes, beyond)

    def finish_leaving(self) -> None:
        """See :class:`HostCopy`."""
        super().finish_leaving()
        self._working.hold(-self.num_bytes, -self._beyond)
        self._set_absent(True)

    def fetch(self) -> None:
        """See :class:`HostCopy`."""
        super().fetch()
        self._set_absent(False)

    def take(self) -> torch.Tensor:
        """See :class:`HostCopy`."""
        self._working.measure()
        returns = self.place in (CopyPlace.AWAY, CopyPlace.COMING)
        tensor = super().take()
        if returns:
            self._working.note_return(self.num_bytes)
        self._offload_store.fetch_ahead(self)
        return tensor

    def _await_offloading(self) -> None:
        self._runtime.finish_offloading(self.ticket)

    def _set_absent(self, is_absent: bool) -> None:
        self._working.absent_bytes += (is_absent - self._is_absent) * self.num_bytes
        self._is_absent = is_absent

    def __del__(self):
        self._set_absent(False)
        super().__del__()
        if self.place in (CopyPlace.ON_DEVICE, CopyPlace.LEAVING):
            self._working.hold(-self.num_bytes, -self._beyond)
