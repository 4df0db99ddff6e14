"""Tensors that leave the device between forward and backward."""

from __future__ import annotations

import enum

import torch

from patrickstar import _C


class CopyPlace(enum.Enum):
    """Where a kept tensor is. It holds device memory everywhere except in ``AWAY``."""

    ON_DEVICE = enum.auto()
    LEAVING = enum.auto()
    AWAY = enum.auto()
    COMING = enum.auto()


class HostCopy:
    """A tensor kept between forward and backward, which may wait in host memory (csrc/engine/offload_store.h).

    Attributes:
        place: where the value is.
        num_bytes: of the tensor.
        ticket: in the core, once it has left; -1 before.
    """

    def __init__(self, runtime: _C.Runtime, tensor: torch.Tensor):
        self._runtime = runtime
        self.place = CopyPlace.ON_DEVICE
        self.num_bytes = tensor.nbytes
        self.shape, self._stride, self._dtype, self._device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self._tensor: torch.Tensor | None = tensor
        self._version = tensor._version
        self._was_changed = False
        self.ticket = -1

    @property
    def is_unchanged(self) -> bool:
        """True if the tensor was not changed in place since it was kept. Nothing can change it on the host."""
        return not self._was_changed and (self._tensor is None or self._tensor._version == self._version)

    @property
    def has_left(self) -> bool:
        """True if a copy to the host is complete or was never begun."""
        return self.place is not CopyPlace.LEAVING or self._runtime.is_offloaded(self.ticket)

    def leave(self) -> bool:
        """Starts the copy to the host; False if the host has no room."""
        assert self._tensor is not None
        self.ticket = self._runtime.offload_activation(self._tensor.data_ptr(), self.num_bytes)
        if self.ticket < 0:
            return False
        self.place = CopyPlace.LEAVING
        return True

    def finish_leaving(self) -> None:
        """Waits for the copy, and releases the device memory."""
        self._await_offloading()
        self._was_changed = not self.is_unchanged
        self.place, self._tensor = CopyPlace.AWAY, None

    def fetch(self) -> None:
        """Starts the copy to the device."""
        self._tensor = torch.empty_strided(self.shape, self._stride, dtype=self._dtype, device=self._device)
        self._version = self._tensor._version
        self._runtime.fetch_activation(self.ticket, self._tensor.data_ptr())
        self.place = CopyPlace.COMING

    def take(self) -> torch.Tensor:
        """The value. It may be taken again: the copy on the device is then the caller's."""
        if self.place is CopyPlace.AWAY:
            self.fetch()
        tensor = self._tensor
        assert tensor is not None
        if self.place is CopyPlace.COMING:
            self._runtime.await_activation(self.ticket)
            self.place, self._tensor = CopyPlace.AWAY, None
        return tensor

    def _await_offloading(self) -> None:
        self._runtime.settle_offloading(self.ticket)

    def __del__(self):
        if self.place is CopyPlace.COMING and not self._runtime.closed:
            self._runtime.await_activation(self.ticket)  # later computation may reuse its memory
        if self.place is not CopyPlace.ON_DEVICE:
            self._runtime.drop_activation(self.ticket)


def is_whole(tensor: torch.Tensor) -> bool:
    """True if the tensor's elements fill one range of memory, in any order, and most of its storage. A part of a larger
    storage frees nothing while something else holds it.
    """
    stride = 1
    for size, step in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1 and step != stride:
            return False
        stride *= size
    return tensor.untyped_storage().nbytes() < 2 * tensor.nbytes
