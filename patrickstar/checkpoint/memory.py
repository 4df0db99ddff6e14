"""Tensors as bytes and bytes as tensors, without a copy and outside of PyTorch's allocators: the memory of a
checkpoint's shards does not count as the simulated device's.
"""

from __future__ import annotations

import ctypes

import torch


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, valid as long as it is kept."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"a shard has strides {tensor.stride()} on {tensor.device}; read() gives a contiguous CPU tensor"
        )
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")


def tensor_of(data: bytearray, dtype: torch.dtype) -> torch.Tensor:
    """The elements in ``data``, which the tensor keeps."""
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def empty_tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A one-dimensional tensor with memory of its own."""
    return tensor_of(bytearray(numel * dtype.itemsize), dtype)
