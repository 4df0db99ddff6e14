"""State of plain values and tensors in a file or a message, without pickle: the data cannot name code.

Format: 8 bytes length of the header, little-endian; the header, JSON with the values (codec.py) and each tensor's dtype
and shape; the tensors' bytes without gaps. Memory for reading is bounded by the file's size.
"""

from __future__ import annotations

import json
import math
import os
import struct
from typing import Any, BinaryIO

import torch

from patrickstar import _C
from patrickstar.checkpoint.codec import decode, encode
from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.memory import bytes_of
from patrickstar.checkpoint.safetensors_format import DTYPES, MAX_HEADER_BYTES, dtype_name

_LENGTH = struct.Struct("<Q")


def write_plain_state(file: BinaryIO, value: Any, what: str) -> None:
    """Writes ``value``, made of the codec's types and of tensors on any device.

    Raises:
        CheckpointError: an item is of another type; ``what`` names it.
        OSError: the file cannot be written.
    """
    tensors: list[torch.Tensor] = []
    plain = encode(value, what, tensors)
    entries = [[dtype_name(tensor.dtype, what), list(tensor.shape)] for tensor in tensors]
    header = json.dumps({"state": plain, "tensors": entries}, separators=(",", ":")).encode()
    file.write(_LENGTH.pack(len(header)) + header)
    with _C.HostAllocations():
        for tensor in tensors:
            file.write(bytes_of(tensor.detach().cpu().contiguous()))


def read_plain_state(file: BinaryIO, what: str) -> Any:
    """Reads the result of :func:`write_plain_state`; tensors are on the CPU.

    Raises:
        CheckpointError: the file is malformed.
        OSError: the file cannot be read.
    """
    begin = file.tell()
    left = file.seek(0, os.SEEK_END) - begin
    file.seek(begin)
    try:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        left -= _LENGTH.size + length
        if left < 0 or length > MAX_HEADER_BYTES:
            raise ValueError(f"its header has {length} bytes")
        header = json.loads(file.read(length))
        state, entries = header["state"], [(DTYPES[name], _shape(sizes)) for name, sizes in header["tensors"]]
        needed = sum(math.prod(shape) * dtype.itemsize for dtype, shape in entries)
        if needed != left:
            raise ValueError(f"it has {left} bytes of tensors instead of {needed}")
    except (ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
        raise CheckpointError(f"{what} is nothing that was written: {error}") from error
    with _C.HostAllocations():
        tensors = [torch.empty(shape, dtype=dtype, device="cpu") for dtype, shape in entries]
        for tensor in tensors:
            data = bytes_of(tensor)
            if data and file.readinto(data) != len(data):  # type: ignore[attr-defined]
                raise CheckpointError(f"{what} has ended before its tensors")
    return decode(state, what, tensors)


def _shape(sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, list) or not all(type(size) is int and 0 <= size < 2**48 for size in sizes):
        raise ValueError(f"{str(sizes)[:100]} is no shape")
    return tuple(sizes)
