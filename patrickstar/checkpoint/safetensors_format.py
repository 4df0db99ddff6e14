"""Writes the safetensors format, with the position of every byte known in advance.

8 bytes length of the header, little-endian; the header, JSON padded with blanks; the tensors' bytes without gaps.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterable, Sequence

import torch

from patrickstar.checkpoint.errors import CheckpointError

_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
DTYPES: dict[str, torch.dtype] = {key: getattr(torch, name) for key, name in _NAMES.items() if hasattr(torch, name)}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

_ALIGNMENT = 8  # bytes; as the library pads headers
MAX_HEADER_BYTES = 100_000_000  # the library's limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTensor:
    """A tensor of one file."""

    key: str
    """Its name in the file."""
    dtype: torch.dtype
    """The dtype of its elements in the file."""
    shape: tuple[int, ...]
    """Its shape in the file's header."""
    num_bytes: int
    """Size of its elements in the file, in bytes."""


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """The format's name of a dtype.

    Raises:
        CheckpointError: the format lacks the dtype; ``what`` names the tensor.
    """
    if dtype not in NAMES:
        raise CheckpointError(
            f"{what} is of {dtype}, which safetensors do not hold; they hold {', '.join(NAMES.values())}"
        )
    return NAMES[dtype]


def make_header(tensors: Sequence[FileTensor]) -> bytes:
    """The bytes before the tensors' own, which follow in order.

    Raises:
        CheckpointError: the format lacks a dtype, or there are more names than a header holds.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        entries[tensor.key] = {
            "dtype": dtype_name(tensor.dtype, tensor.key),
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset += tensor.num_bytes
    if len(entries) != len(tensors) + 1:
        raise CheckpointError("two tensors of one file have the same name; a name and kind is given once")
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"a header of {len(tensors)} tensors takes {len(text)} bytes, readers take {MAX_HEADER_BYTES}; lower the "
            "bytes per file"
        )
    return struct.pack("<Q", len(text)) + text


def split_into_files(sizes: Iterable[int], max_bytes: int) -> list[list[int]]:
    """Groups tensors of these sizes, in order, into files of at most ``max_bytes``; a larger tensor gets a file of its
    own. Returns lists of indices.
    """
    files: list[list[int]] = []
    room = 0
    for index, num_bytes in enumerate(sizes):
        if not files or num_bytes > room:
            files.append([])
            room = max_bytes
        files[-1].append(index)
        room -= num_bytes
    return files
