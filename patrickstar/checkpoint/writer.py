"""Writes a checkpoint: all ranks write their shards concurrently into files of their own, then one rank writes the
manifest.

Memory, besides the source's: one shard, and blocks of a file (``file_stream.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import logging
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from patrickstar import _C
from patrickstar.checkpoint.disk import Disk, created, locked, write_all
from patrickstar.checkpoint.encoding import Encoding
from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.file_stream import FileStream
from patrickstar.checkpoint.folder import NewFolder, check_tag
from patrickstar.checkpoint.manifest import MANIFEST_NAME, Manifest, StoredFile, StoredShard, StoredTensor
from patrickstar.checkpoint.memory import bytes_of
from patrickstar.checkpoint.peers import OneRank, Peers, phase
from patrickstar.checkpoint.safetensors_format import DTYPES, FileTensor, dtype_name, make_header, split_into_files
from patrickstar.checkpoint.shards import ShardSource, TensorShard, is_row_major
from patrickstar.sizes import show_seconds, show_size

logger = logging.getLogger("patrickstar")

DEFAULT_MAX_FILE_BYTES = 4 * 2**30


class Latest(enum.Enum):
    """Target of the file ``latest`` after a save."""

    NEW = "to the new checkpoint"
    AS_BEFORE = "where it led before"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Options of :func:`save`."""

    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES
    """Limit of one file's tensors; a larger shard gets a file of its own."""
    peers: Peers = dataclasses.field(default_factory=OneRank)
    """The ranks that save together, on one file system."""
    disk: Disk = dataclasses.field(default_factory=Disk)
    """The file system calls; tests replace them."""
    latest: Latest = Latest.NEW
    """Target of the file ``latest`` afterwards."""


def save(
    directory: str | os.PathLike[str],
    tag: str,
    source: ShardSource,
    state: Mapping[str, Any],
    options: SaveOptions | None = None,
) -> Path:
    """Saves the shards of all ranks' sources as ``directory/tag``, and returns this path. All ranks must call it. An
    existing checkpoint of this tag is replaced when the new one is complete.

    Args:
        directory: created if absent.
        tag: a folder's name.
        source: this rank's shards.
        state: further state in JSON's types; rank 0's is stored.
        options: None for the defaults.

    Raises:
        CheckpointError: on all ranks, if one of them cannot save, or the shards do not cover whole tensors. Earlier
            checkpoints are unchanged.
    """
    with Saving(directory, tag, options or SaveOptions()) as saving:
        saving.write(source.shards())
        saving.publish(state)
    return saving.target


class Saving:
    """One checkpoint while it is saved; all ranks make the same calls. A context that discards what was not published.

        with Saving(directory, tag, options) as saving:
            saving.write(shards)      # any number of times, in each this rank's shards
            saving.publish(state)

    Attributes:
        target: the checkpoint's folder.
        peers: the ranks that save together; another object may take over between two calls, also in another thread.
    """

    def __init__(self, directory: str | os.PathLike[str], tag: str, options: SaveOptions):
        self.target = Path(directory).absolute() / check_tag(tag)
        self.peers = options.peers
        self._options = options
        self._began = time.perf_counter()
        self._held = contextlib.ExitStack()
        self._what = f"checkpoint {tag!r} was not saved in {self.target.parent}, what was saved before is as it was"
        self._unpublished: NewFolder | None = None
        self._reports: list[dict[str, Any]] = []

    def __enter__(self) -> Saving:
        """Makes the folder, and locks the one in which it lies.

        Raises:
            CheckpointError: on all ranks, if one of them cannot.
        """
        disk = self._options.disk
        try:
            with phase(self.peers, self._what) as turn:
                turn.say = {"target": str(self.target)}
                if self._is_first:
                    turn.say["token"] = secrets.token_hex(4)
                    begin(NewFolder(disk, self.target, turn.say["token"]), self.target, self._held)
            self._folder = self._unpublished = NewFolder(disk, self.target, turn.heard[0]["token"])
            self._check_targets([said["target"] for said in turn.heard])
        except BaseException:
            self._held.close()
            raise
        self._writer = _RankWriter(self._folder.path, self._options)
        return self

    def __exit__(self, *exc: object) -> None:
        with self._held:
            if self._is_first and self._unpublished is not None:
                self._unpublished.discard()

    def _check_targets(self, targets: Sequence[str]) -> None:
        """Raises CheckpointError, on all ranks, unless they save the same checkpoint."""
        if len(set(targets)) == 1:
            return
        if self._is_first:
            self._folder.discard()
        told = ", ".join(f"rank {rank} {target}" for rank, target in enumerate(targets))
        error = CheckpointError(f"{self._what}: ranks save different checkpoints: {told}; make the same calls on all")
        error.on_all_ranks = True
        raise error

    def write(self, shards: Iterable[TensorShard]) -> None:
        """Writes shards of this rank."""
        with phase(self.peers, self._what) as turn:
            turn.say = self._writer.write(shards)
        self._reports = turn.heard

    def offsets(self, shards: Sequence[TensorShard]) -> list[int]:
        """Offsets in their files that :meth:`write` will give these shards; zeros if it will raise an error."""
        try:
            files = list(_files(shards, self._options.max_file_bytes))
        except CheckpointError:
            return [0] * len(shards)
        return [offset for header, members in files for offset in _offsets(header, members)]

    def publish(self, state: Mapping[str, Any]) -> None:
        """Completes the checkpoint with ``state``, in JSON's types; rank 0's is stored."""
        folder, parent = self._folder, self.target.parent
        with phase(self.peers, self._what):
            if self._is_first:
                manifest = _write_manifest(self._options.disk, folder.path, self._reports, state)
                folder.publish()
        self._unpublished = None
        what = f"checkpoint {self.target.name!r} is complete in {parent}, but 'latest' may not lead to it"
        with phase(self.peers, what):
            if self._is_first:
                folder.make_name_durable()
                folder.discard()  # the replaced checkpoint: on a full disk this frees space for the next file
                if self._options.latest is Latest.NEW:
                    folder.point_latest()
        if self._is_first:
            size = sum(file.num_bytes for file in manifest.files.values())
            took = show_seconds(time.perf_counter() - self._began)
            logger.info("saved to %s (%s in %s)", self.target, show_size(size), took)

    @property
    def _is_first(self) -> bool:
        return self.peers.rank == 0


def begin(folder: NewFolder, target: Path, held: contextlib.ExitStack) -> None:
    """Makes the folder, and locks its parent for ``held``'s lifetime.

    Raises:
        CheckpointError: another process is saving there.
    """
    folder.make_parents()
    try:
        held.enter_context(locked(target.parent, folder.disk))
    except BlockingIOError as error:
        raise CheckpointError(f"another process is saving in {target.parent}; one at a time") from error
    folder.make()


class _RankWriter:
    """Writes the shards of one rank; returns their positions in JSON's types."""

    def __init__(self, folder: Path, options: SaveOptions):
        self._folder = folder
        self._disk = options.disk
        self._rank = options.peers.rank
        self._max_file_bytes = options.max_file_bytes
        self._files: dict[str, dict[str, int]] = {}
        self._records: list[dict[str, Any]] = []

    def write(self, shards: Iterable[TensorShard]) -> dict[str, Any]:
        """Positions of these shards, and of all before."""
        if not self._folder.is_dir():
            raise CheckpointError(f"rank {self._rank} does not see {self._folder}; all ranks need one file system")
        for header, members in _files(list(shards), self._max_file_bytes):
            name = f"rank{self._rank:05d}-{len(self._files):05d}.safetensors"
            self._files[name] = self._write_file(name, header, members)
        return {"files": self._files, "shards": self._records}

    def _write_file(self, name: str, header: bytes, shards: Sequence[TensorShard]) -> dict[str, int]:
        num_bytes = len(header) + sum(shard.num_bytes for shard in shards)
        with created(self._disk, self._folder / name) as fd, FileStream(self._disk, fd, num_bytes) as stream:
            stream.append(memoryview(header))
            for shard, offset in zip(shards, _offsets(header, shards), strict=True):
                crc = _write_shard(stream, shard)
                self._records.append({**_describe(shard), "file": name, "offset": offset, "crc32c": crc})
        return {"num_bytes": num_bytes, "header_bytes": len(header), "header_crc32c": _C.crc32c(header)}


def _files(shards: Sequence[TensorShard], max_file_bytes: int) -> Iterator[tuple[bytes, list[TensorShard]]]:
    """Header and shards of each file."""
    for members in split_into_files([shard.num_bytes for shard in shards], max_file_bytes):
        inside = [shards[member] for member in members]
        yield make_header([_file_tensor(shard) for shard in inside]), inside


def _offsets(header: bytes, shards: Sequence[TensorShard]) -> list[int]:
    """Offsets of the shards in a file of this header."""
    return list(itertools.accumulate((shard.num_bytes for shard in shards), initial=len(header)))[: len(shards)]


def _write_shard(stream: FileStream, shard: TensorShard) -> int:
    """Writes the shard's elements, and returns their checksum."""
    if shard.copies is None:
        values = shard.read()
        data = bytes_of(values)
        if values.dtype != shard.stored_dtype or len(data) != shard.num_bytes:
            raise CheckpointError(
                f"{shard}: read() gave {values.numel()} elements of {values.dtype}, not {shard.num_bytes} bytes of "
                f"{shard.stored_dtype}"
            )
        stream.append(data)
        return _C.crc32c(data)
    crc = 0
    for copy in shard.copies:
        crc = _C.joined_crc32c(crc, copy.crc, len(copy.data))
        stream.give(copy.data, copy.release)
    return crc


def _file_tensor(shard: TensorShard) -> FileTensor:
    """A whole tensor gets its own name and shape, so that any safetensors reader can use it. Encoded ones are bytes."""
    whole = shard.is_whole and is_row_major(shard.shape, shard.order)
    suffix = "" if shard.is_whole else f"[{shard.begin}:{shard.end}]"
    suffix += f":{shard.encoding.value}" if shard.encoding else ""
    shape = shard.shape if whole else (shard.numel,)
    return FileTensor(
        key=f"{shard.kind}/{shard.name}{suffix}",
        dtype=shard.stored_dtype,
        shape=(shard.num_bytes,) if shard.encoding else shape,
        num_bytes=shard.num_bytes,
    )


def _describe(shard: TensorShard) -> dict[str, Any]:
    return {
        "name": shard.name,
        "kind": shard.kind,
        "shape": list(shard.shape),
        "dtype": dtype_name(shard.dtype, str(shard)),
        "order": None if is_row_major(shard.shape, shard.order) else list(shard.order or ()),
        "begin": shard.begin,
        "end": shard.end,
        "num_bytes": shard.num_bytes,
        "encoding": shard.encoding and shard.encoding.value,
    }


def _write_manifest(
    disk: Disk, folder: Path, reports: Sequence[Mapping[str, Any]], state: Mapping[str, Any]
) -> Manifest:
    files = {name: StoredFile(**file) for report in reports for name, file in report["files"].items()}
    manifest = Manifest(
        num_ranks=len(reports),
        files=files,
        tensors=_merge([record for report in reports for record in report["shards"]]),
        state=state,
    )
    data = manifest.to_bytes()
    Manifest.from_bytes(data)  # a manifest that cannot be loaded is not saved
    with created(disk, folder / MANIFEST_NAME) as fd:
        write_all(disk, fd, memoryview(data))
    return manifest


def _merge(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], StoredTensor]:
    """Merges all ranks' shards into tensors."""
    described: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        described.setdefault((record["name"], record["kind"]), []).append(record)
    tensors: dict[tuple[str, str], StoredTensor] = {}
    for (name, kind), parts in described.items():
        first = parts[0]
        for part in parts:
            if any(part[field] != first[field] for field in ("shape", "dtype", "order")):
                raise CheckpointError(f"{kind} of {name}: the ranks disagree about its shape, dtype or order")
        tensor = StoredTensor(
            name=name,
            kind=kind,
            shape=tuple(first["shape"]),
            dtype=DTYPES[first["dtype"]],
            order=None if first["order"] is None else tuple(first["order"]),
            shards=tuple(_stored_shard(part) for part in sorted(parts, key=lambda part: (part["begin"], part["end"]))),
        )
        if tensor.key in tensors:
            raise CheckpointError(
                f"{name} is given as {tensors[tensor.key].kind} and as {kind}; a tensor is of one kind"
            )
        tensors[tensor.key] = tensor
    return tensors


def _stored_shard(part: Mapping[str, Any]) -> StoredShard:
    encoding = part["encoding"] and Encoding(part["encoding"])
    return StoredShard(**{**{field: part[field] for field in _SHARD_FIELDS}, "encoding": encoding})


_SHARD_FIELDS = [field.name for field in dataclasses.fields(StoredShard)]
