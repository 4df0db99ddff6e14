"""The manifest of a checkpoint: the file, elements and checksum of each tensor's shards.

It is JSON after its own checksum:  {"crc32c":"<8 digits>","manifest":<what the checksum is of>}

A manifest that parses without an error describes files whose every byte has a checksum, and tensors whose every element
is stored once. It may come from an untrusted source, so all of it is checked before use.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from patrickstar import _C
from patrickstar.checkpoint.encoding import Encoding
from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.safetensors_format import DTYPES, MAX_HEADER_BYTES, NAMES
from patrickstar.checkpoint.shards import KINDS, role

MANIFEST_NAME = "manifest.json"
FORMAT, VERSION = "patrickstar checkpoint", 2
_READ_VERSIONS = (1, 2)  # version 1 has no encodings

_PREFIX, _MIDDLE, _SUFFIX = b'{"crc32c":"', b'","manifest":', b"}\n"
_CRC = re.compile(r"[0-9a-f]{8}")
_FILE_NAME = re.compile(r"rank[0-9]{5}-[0-9]{5}\.safetensors")
_MAX_DIMS = 64
_MAX_NUMBER = 2**62  # elements or bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredFile:
    """One file of a checkpoint."""

    num_bytes: int
    """Size of the whole file in bytes, header included."""
    header_bytes: int
    """Bytes before the first tensor's."""
    header_crc32c: int
    """CRC-32C checksum of these :attr:`header_bytes` bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredShard:
    """Position of elements [begin, end) of a flattened tensor."""

    file: str
    """Name of the file that holds the shard, a key of :attr:`Manifest.files`."""
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int
    """Size of the shard in bytes."""
    begin: int
    """Index of the first element in the flattened tensor."""
    end: int
    """One past the last element."""
    crc32c: int
    """CRC-32C checksum of the shard's bytes in the file."""
    encoding: Encoding | None = None
    """Form of its bytes, if they are not elements of the tensor's dtype."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.begin


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor and its shards."""

    name: str
    """The parameter's or buffer's name in the user's module; for a random number generator, its rank and own name."""
    kind: str
    """One of ``KINDS``, which :attr:`patrickstar.checkpoint.shards.TensorRange.kind` explains."""
    shape: tuple[int, ...]
    """Shape of the whole tensor, all shards together."""
    dtype: torch.dtype
    """The dtype of its elements when they are read."""
    order: tuple[int, ...] | None
    """Order of dimensions in which it is flattened."""
    shards: tuple[StoredShard, ...]
    """In ascending order, without gaps."""

    @property
    def key(self) -> tuple[str, str]:
        """Key in :attr:`Manifest.tensors`."""
        return self.name, role(self.kind)

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.kind} of {self.name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a checkpoint: its files, their tensors, and further state."""

    num_ranks: int
    """Number of ranks that saved the checkpoint."""
    files: Mapping[str, StoredFile]
    """The safetensors files by name, without the manifest itself."""
    tensors: Mapping[tuple[str, str], StoredTensor]
    """The tensors by :attr:`StoredTensor.key`: their name and the role of their kind."""
    state: Mapping[str, Any]
    """Further state in JSON's types: step counts, options, user state."""

    def to_bytes(self) -> bytes:
        """The bytes of the manifest's file: JSON after its own checksum."""
        described = {
            "format": FORMAT,
            "version": VERSION,
            "num_ranks": self.num_ranks,
            "files": {name: _describe_file(file) for name, file in self.files.items()},
            "tensors": [_describe_tensor(tensor) for tensor in self.tensors.values()],
            "state": self.state,
        }
        body = json.dumps(described, separators=(",", ":"), allow_nan=False).encode()
        return _PREFIX + f"{_C.crc32c(body):08x}".encode() + _MIDDLE + body + _SUFFIX

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parses and checks the manifest's file.

        Raises:
            CheckpointError: it is damaged, or does not describe a whole checkpoint; the message says what is wrong.
        """
        try:
            value = json.loads(_checked_body(data), object_pairs_hook=_unique, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"it is no JSON of ours: {error}") from error
        top = _fields(value, "it", {"format": str, "version": int})
        if top["format"] != FORMAT or top["version"] not in _READ_VERSIONS:
            raise CheckpointError(
                f"its format is {top['format']!r}, version {top['version']}; this PatrickStar reads {FORMAT!r}, "
                f"version {VERSION}: use the PatrickStar that saved it, or save again"
            )
        _fields(value, "it", {"num_ranks": int, "files": dict, "tensors": list, "state": dict})
        manifest = cls(
            num_ranks=_number(value["num_ranks"], "num_ranks"),
            files={name: _parse_file(name, file) for name, file in value["files"].items()},
            tensors=_by_key(_parse_tensor(tensor) for tensor in value["tensors"]),
            state=value["state"],
        )
        manifest.check()
        return manifest

    def check(self) -> None:
        """Raises CheckpointError unless every element is stored once and every byte of every file has a checksum."""
        for name, file in self.files.items():
            if file.header_bytes > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{name}: a header of {file.header_bytes} bytes; at most {MAX_HEADER_BYTES} are read"
                )
        used: dict[str, list[StoredShard]] = {name: [] for name in self.files}
        for tensor in self.tensors.values():
            _check_shards(tensor)
            for shard in tensor.shards:
                if shard.file not in used:
                    raise CheckpointError(f"{tensor} is in {shard.file}, which is not among the files")
                used[shard.file].append(shard)
        for name, shards in used.items():
            end = self.files[name].header_bytes
            for shard in sorted(shards, key=lambda shard: (shard.offset, shard.num_bytes)):
                if shard.offset != end:
                    raise CheckpointError(
                        f"{name}: the bytes at {min(end, shard.offset)} belong to no tensor, or to two"
                    )
                end += shard.num_bytes
            if end != self.files[name].num_bytes:
                raise CheckpointError(f"{name}: has {self.files[name].num_bytes} bytes, its tensors end at {end}")


def _check_shards(tensor: StoredTensor) -> None:
    end = 0
    for shard in tensor.shards:
        if shard.begin != end or shard.end < shard.begin:
            raise CheckpointError(f"{tensor}: element {min(end, shard.begin)} is in no shard, or in two")
        if shard.encoding and tensor.dtype is not torch.float32:
            raise CheckpointError(f"{tensor}: elements of {tensor.dtype} are said to be {shard.encoding.value}")
        needed = shard.encoding.num_bytes(shard.numel) if shard.encoding else shard.numel * tensor.dtype.itemsize
        if shard.num_bytes != needed:
            raise CheckpointError(f"{tensor}: {shard.numel} elements are said to take {shard.num_bytes} bytes")
        end = shard.end
    if end != tensor.numel or not tensor.shards:
        raise CheckpointError(f"{tensor}: {end} of its {tensor.numel} elements are in its shards")


def _by_key(tensors: Iterable[StoredTensor]) -> dict[tuple[str, str], StoredTensor]:
    found: dict[tuple[str, str], StoredTensor] = {}
    for tensor in tensors:
        if tensor.key in found:
            raise CheckpointError(f"{tensor} is there twice")
        found[tensor.key] = tensor
    return found


# Reading.


def _checked_body(data: bytes) -> bytes:
    begin = len(_PREFIX) + 8 + len(_MIDDLE)
    crc, body = data[len(_PREFIX) : len(_PREFIX) + 8], data[begin : -len(_SUFFIX)]
    if data != _PREFIX + crc + _MIDDLE + body + _SUFFIX:
        raise CheckpointError(f"it is not of the form {(_PREFIX + b'...' + _MIDDLE).decode()}...")
    if f"{_C.crc32c(body):08x}".encode() != crc:
        raise CheckpointError("its checksum is not that of its content: it is damaged")
    return body


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object has a key twice")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _fields(value: Any, what: str, types: Mapping[str, type]) -> dict[str, Any]:
    """Checks that ``value`` is an object with at least these fields, of these types."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is a {type(value).__name__} instead of an object")
    for key, expected in types.items():
        if type(value.get(key)) is not expected:
            raise CheckpointError(f"{what} has no {key} of type {expected.__name__}")
    return value


def _number(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
        raise CheckpointError(f"{what} is {str(value)[:40]}; it must be a whole number from 0 to {_MAX_NUMBER}")
    return value


def _crc(value: Any, what: str) -> int:
    if not isinstance(value, str) or not _CRC.fullmatch(value):
        raise CheckpointError(f"{what} is {str(value)[:40]!r} instead of eight hexadecimal digits")
    return int(value, 16)


def _parse_file(name: str, value: Any) -> StoredFile:
    if not _FILE_NAME.fullmatch(name):
        raise CheckpointError(f"a file is named {name[:100]!r}; names are rank00000-00000.safetensors and so on")
    fields = _fields(value, f"the file {name}", {"header_crc32c": str})
    return StoredFile(
        num_bytes=_number(fields.get("bytes"), f"{name}: bytes"),
        header_bytes=_number(fields.get("header_bytes"), f"{name}: header_bytes"),
        header_crc32c=_crc(fields["header_crc32c"], f"{name}: header_crc32c"),
    )


def _parse_tensor(value: Any) -> StoredTensor:
    fields = _fields(value, "a tensor", {"name": str, "kind": str, "dtype": str, "shape": list, "shards": list})
    what = f"{fields['kind'][:40]} of {fields['name'][:200]}"
    if fields["kind"] not in KINDS:
        raise CheckpointError(f"{what}: its kind is none of {', '.join(KINDS)}")
    if fields["dtype"] not in DTYPES:
        raise CheckpointError(f"{what}: its dtype {fields['dtype'][:40]!r} is none of {', '.join(DTYPES)}")
    if len(fields["shape"]) > _MAX_DIMS:
        raise CheckpointError(f"{what}: has {len(fields['shape'])} dimensions, at most {_MAX_DIMS} are read")
    shape = tuple(_number(size, f"{what}: a dimension") for size in fields["shape"])
    _number(math.prod(shape), f"{what}: the number of elements")
    order = fields.get("order")
    if order is not None:
        if not isinstance(order, list) or sorted(map(str, order)) != sorted(map(str, range(len(shape)))):
            raise CheckpointError(f"{what}: order is no permutation of its dimensions")
        order = tuple(_number(dim, f"{what}: order") for dim in order)
    return StoredTensor(
        name=fields["name"],
        kind=fields["kind"],
        shape=shape,
        dtype=DTYPES[fields["dtype"]],
        order=order,
        shards=tuple(_parse_shard(shard, what) for shard in fields["shards"]),
    )


def _parse_shard(value: Any, what: str) -> StoredShard:
    fields = _fields(value, f"a shard of {what}", {"file": str})
    names = {"offset": "offset", "num_bytes": "bytes", "begin": "begin", "end": "end"}
    numbers = {field: _number(fields.get(key), f"{what}: {key} of a shard") for field, key in names.items()}
    encoding = fields.get("encoding")
    if encoding is not None and encoding not in [known.value for known in Encoding]:
        raise CheckpointError(f"{what}: encoding {str(encoding)[:40]!r} of a shard; this PatrickStar does not know it")
    return StoredShard(
        file=fields["file"],
        crc32c=_crc(fields.get("crc32c"), f"{what}: crc32c of a shard"),
        encoding=encoding and Encoding(encoding),
        **numbers,
    )


# Writing.


def _describe_file(file: StoredFile) -> dict[str, Any]:
    return {
        "bytes": file.num_bytes,
        "header_bytes": file.header_bytes,
        "header_crc32c": f"{file.header_crc32c:08x}",
    }


def _describe_tensor(tensor: StoredTensor) -> dict[str, Any]:
    order = {} if tensor.order is None else {"order": list(tensor.order)}
    return {
        "name": tensor.name,
        "kind": tensor.kind,
        "shape": list(tensor.shape),
        "dtype": NAMES[tensor.dtype],
        **order,
        "shards": [_describe_shard(shard) for shard in tensor.shards],
    }


def _describe_shard(shard: StoredShard) -> dict[str, Any]:
    return {
        "file": shard.file,
        "offset": shard.offset,
        "bytes": shard.num_bytes,
        "begin": shard.begin,
        "end": shard.end,
        "crc32c": f"{shard.crc32c:08x}",
        **({"encoding": shard.encoding.value} if shard.encoding else {}),
    }
