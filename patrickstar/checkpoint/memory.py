"""Tensors as bytes and back, without copies and outside of PyTorch's allocators: a checkpoint's shards do not count as
the simulated device's memory.
"""

from __future__ import annotations

import ctypes

import torch


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Bytes of a contiguous CPU tensor, which they keep alive."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"a shard has strides {tensor.stride()} on {tensor.device}; read() gives a contiguous CPU tensor"
        )
    return bytes_at(tensor.data_ptr(), tensor.numel() * tensor.element_size(), owner=tensor)


def bytes_at(address: int, num_bytes: int, owner: object = None) -> memoryview:
    """Writable bytes at an address, which keep ``owner`` alive."""
    if num_bytes == 0:
        return memoryview(b"")
    data = (ctypes.c_char * num_bytes).from_address(address)
    data.owner = owner
    return memoryview(data).cast("B")


def tensor_of(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over writable ``data``, which it keeps alive."""
    return torch.frombuffer(data, dtype=dtype) if len(data) > 0 else torch.empty(0, dtype=dtype, device="cpu")


class Scratch:
    """Reused memory: the system takes longer to provide fresh pages than to fill them."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def take(self, num_bytes: int) -> memoryview:
        """Returns so many bytes, valid until the next call."""
        if num_bytes > len(self._memory):
            self._memory = bytearray(num_bytes)
        return memoryview(self._memory)[:num_bytes]
