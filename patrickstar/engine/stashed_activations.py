"""Activations that leave the device between forward and backward, where they take more of it than is theirs.

    stash = ActivationStash(runtime, device, storages)
    with stash.keeping():
        loss = module(...)

[Note: kept activations] What autograd saves in such a forward is kept here instead: with activation checkpointing the
inputs of the layers, which are computed again from them. Where the tide exceeds its share of the device (``_C`` says by
how much), what was kept first is copied to host memory and let go ([Note: stashed activations], csrc/engine/stash.h).
The copy back begins when what was kept a little later is used. Its bits are those that were saved.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import weakref
from collections.abc import Collection, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from patrickstar import _C
from patrickstar.config import ActivationOffload
from patrickstar.module.chunked_parameter import ChunkedParameter

_LEAST_SHARE = 4096  # of the device's memory: smaller tensors stay, so that hooks cost little
_MOST_LEAVING = 2  # tensors whose copies to the host run: so far may the launching thread be ahead of the device
_FETCHED_AHEAD = 3  # how many tensors before its use the copy back of one begins


def keeper_of_activations(
    module: nn.Module, offload: ActivationOffload, runtime: _C.Runtime, device: torch.device
) -> ActivationKeeper:
    """What each training forward of ``module`` runs in. Its parameters are where they stay."""
    if offload is ActivationOffload.NEVER:
        return StayingActivations()
    params = (param for param in module.parameters() if isinstance(param, ChunkedParameter))
    stash = ActivationStash(runtime, device, {param._patrickstar.storage for param in params})
    if offload is ActivationOffload.ALWAYS:
        return stash
    return CheckpointedActivations(module, stash)


class ActivationKeeper(Protocol):
    """Whose forwards keep activations, and where."""

    def keeping(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward whose backward comes."""
        ...

    def finish(self) -> None:
        """Returns when no copy runs any more."""
        ...


class StayingActivations:
    """They stay on the device, as autograd has them."""

    def keeping(self) -> contextlib.AbstractContextManager[None]:
        """Nothing happens."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """There is none."""


class CheckpointedActivations:
    """Those of a model of Hugging Face may leave while it checkpoints layers, and stay otherwise, being many then."""

    def __init__(self, module: nn.Module, stash: ActivationStash):
        self._layers = [child for child in module.modules() if hasattr(child, "gradient_checkpointing")]
        self._stash = stash

    def keeping(self) -> contextlib.AbstractContextManager[None]:
        """As the layers are just then."""
        checkpoints = any(layer.gradient_checkpointing for layer in self._layers)
        return self._stash.keeping() if checkpoints else contextlib.nullcontext()

    def finish(self) -> None:
        """The stash's."""
        self._stash.finish()


class ActivationStash:
    """Of one engine. Forwards and backwards come one after the other."""

    def __init__(self, runtime: _C.Runtime, device: torch.device, storages: Collection[int]):
        """``storages``: the addresses (``_cdata``) of those that hold parameters, which have their own way."""
        self._runtime = runtime
        self._device = device
        self._storages = frozenset(storages)
        self._least_bytes = runtime.report()["device_budget_bytes"] // _LEAST_SHARE
        self._known: weakref.WeakValueDictionary[Any, _Kept] = weakref.WeakValueDictionary()
        self._on_device: collections.deque[weakref.ref[_Kept]] = collections.deque()
        self._leaving: collections.deque[_Kept] = collections.deque()
        self._away: list[weakref.ref[_Kept]] = []
        self._num_kept = 0

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Around a forward whose backward comes."""
        self._on_device.clear()
        self._away.clear()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        except BaseException:
            self.finish()
            raise

    def finish(self) -> None:
        """Returns when no copy to the host runs any more."""
        while self._leaving:
            self._finish_oldest()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Kept:
        if not self._may_leave(tensor):
            return tensor
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.dtype, tensor._version)
        kept = self._known.get(key)
        if kept is None or kept.place is not _Place.ON_DEVICE:
            kept = self._known[key] = _Kept(self._runtime, tensor, self._num_kept)
            self._num_kept += 1
            self._make_room()
            self._on_device.append(weakref.ref(kept))
        return kept

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.nbytes < self._least_bytes or tensor.device != self._device:
            return False
        storage = tensor.untyped_storage()
        # Of a larger tensor that something else may hold, a part that leaves frees nothing.
        whole = tensor.is_contiguous() and storage.nbytes() < 2 * tensor.nbytes
        return whole and storage._cdata not in self._storages

    def _make_room(self) -> None:
        """What was kept first leaves, as long as activations take too much."""
        self._let_go()
        excess = self._runtime.excess_of_activations() - sum(kept.num_bytes for kept in self._leaving)
        while excess > 0 and self._on_device:
            kept = self._on_device[0]()
            if kept is not None and kept.is_unchanged:  # else its backward will say so
                if not kept.leave():
                    return  # the host has no room
                self._leaving.append(kept)
                self._away.append(weakref.ref(kept))
                excess -= kept.num_bytes
            self._on_device.popleft()
            if len(self._leaving) > _MOST_LEAVING:
                self._finish_oldest()

    def _let_go(self) -> None:
        while self._leaving and self._runtime.is_stashed(self._leaving[0].ticket):
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        self._leaving.popleft().finish_leaving()

    def _unpack(self, saved: torch.Tensor | _Kept) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        self._let_go()
        if not saved.is_unchanged:
            raise RuntimeError(
                f"a tensor of shape {list(saved.shape)} that a forward saved for its backward was modified in place; "
                "let that operation make a new tensor"
            )
        tensor = saved.take()
        self._fetch_ahead(saved)
        return tensor

    def _fetch_ahead(self, used: _Kept) -> None:
        while self._away:
            kept = self._away[-1]()
            if kept is not None and kept.number < used.number:
                if used.number - kept.number <= _FETCHED_AHEAD and kept.place is _Place.AWAY:
                    self._away.pop()
                    kept.fetch()
                return
            self._away.pop()


class _Place(enum.Enum):
    """Where a kept tensor is; it holds device memory everywhere but in ``AWAY``."""

    ON_DEVICE = enum.auto()
    LEAVING = enum.auto()
    AWAY = enum.auto()
    COMING = enum.auto()


class _Kept:
    """A tensor that autograd saved."""

    def __init__(self, runtime: _C.Runtime, tensor: torch.Tensor, number: int):
        self._runtime = runtime
        self.place = _Place.ON_DEVICE
        self.number = number
        self.num_bytes = tensor.nbytes
        self.shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        self._tensor: torch.Tensor | None = tensor
        self._version = tensor._version
        self.ticket = -1  # the stash's, of one that left

    @property
    def is_unchanged(self) -> bool:
        """Since it was saved; nothing changes what is away or on its way back."""
        return self._tensor is None or self._tensor._version == self._version

    def leave(self) -> bool:
        """Starts the copy to the host; False where that has no room."""
        assert self._tensor is not None
        self.ticket = self._runtime.stash_activation(self._tensor.data_ptr(), self.num_bytes)
        if self.ticket < 0:
            return False
        self.place = _Place.LEAVING
        return True

    def finish_leaving(self) -> None:
        """Returns when the copy is over, and lets go of the device's memory."""
        self._runtime.finish_stashing(self.ticket)
        self.place, self._tensor = _Place.AWAY, None

    def fetch(self) -> None:
        """Starts the copy back."""
        self._tensor = torch.empty(self.shape, dtype=self._dtype, device=self._device)
        self._version = self._tensor._version
        self._runtime.fetch_activation(self.ticket, self._tensor.data_ptr())
        self.place = _Place.COMING

    def take(self) -> torch.Tensor:
        """Its value, which may be asked for once more: what came back is not held."""
        if self.place is _Place.AWAY:
            self.fetch()
        tensor = self._tensor
        assert tensor is not None
        if self.place is _Place.COMING:
            self._runtime.await_activation(self.ticket)
            self.place, self._tensor = _Place.AWAY, None
        return tensor

    def __del__(self):
        if self.place is _Place.COMING and not self._runtime.closed:
            self._runtime.await_activation(self.ticket)  # its memory may be used again, by what compute does later
        if self.place is not _Place.ON_DEVICE:
            self._runtime.drop_activation(self.ticket)
