"""Reads a checkpoint by ranges, saved by any ranks, and verifies the checksum of everything it reads.

Memory, besides the sink's: one stored shard, its decoded elements, and one wanted range; for blocks, one parameter.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from patrickstar import _C
from patrickstar.checkpoint.blocks import KEY as BLOCKS
from patrickstar.checkpoint.blocks import ComposedTensor, composed
from patrickstar.checkpoint.encoding import Encoding
from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.folder import find_checkpoint, read_small_file
from patrickstar.checkpoint.manifest import MANIFEST_NAME, Manifest, StoredFile, StoredShard, StoredTensor
from patrickstar.checkpoint.memory import Scratch, tensor_of
from patrickstar.checkpoint.shards import ShardSink, TensorRange, flattened, is_row_major, role, row_major

_MAX_MANIFEST_BYTES = 2**30
_BLOCK_BYTES = 2**20  # read at a time: stays in the cache
_NUM_NAMED = 3


class Checkpoint:
    """One checkpoint, open for reading; a context manager. It stays readable while its tag is saved again.

    Raises:
        CheckpointError: there is none, or its manifest is damaged.
    """

    def __init__(self, path: Path):
        self.path = path
        """The checkpoint's own folder, which contains the manifest."""
        self._files: dict[str, int] = {}
        self._last: tuple[StoredShard, torch.Tensor] | None = None
        self._composed: tuple[tuple[StoredTensor, ...], dict[str, torch.Tensor]] | None = None
        self._shard_memory, self._decoded_memory, self._range_memory = Scratch(), Scratch(), Scratch()
        try:
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path} is no checkpoint: {error.strerror}") from error
        try:
            self._stored = Manifest.from_bytes(read_small_file(path / MANIFEST_NAME, _MAX_MANIFEST_BYTES))
            self.manifest = composed(self._stored)
            """The manifest with whole tensors in place of blocks (:mod:`patrickstar.checkpoint.blocks`)."""
            self.origin = f"a PatrickStar checkpoint of {self.manifest.num_ranks} ranks"
            """Says which program wrote it, on how many ranks."""
        except (CheckpointError, OSError) as error:
            self.close()
            reason = error.strerror if isinstance(error, OSError) else error
            raise CheckpointError(f"{path / MANIFEST_NAME}: {reason}; load another checkpoint") from error

    @classmethod
    def find(cls, directory: str | os.PathLike[str], tag: str | None = None) -> Checkpoint:
        """Opens the checkpoint of a tag, or the latest. Raises CheckpointError."""
        return cls(find_checkpoint(directory, tag))

    def close(self) -> None:
        """Closes the folder and all files opened in it. Idempotent."""
        descriptors = [*self._files.values(), *([self._folder] if self._folder >= 0 else [])]
        self._files, self._folder = {}, -1
        for fd in descriptors:
            _close(fd)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def tensor(self, name: str, kind: str) -> StoredTensor | None:
        """The tensor of a name and a kind's role, or None."""
        return self.manifest.tensors.get((name, role(kind)))

    def check(self, sink: ShardSink, rank: int = 0, num_ranks: int = 1) -> None:
        """Checks that everything a sink wants can be read, except the tensors' bytes. Each file that no rank wants is
        checked by one of the ranks.

        Raises:
            CheckpointError: the sink wants other tensors than are stored, or a file is missing or has another size or
                header.
        """
        self._check(list(sink.wanted()))
        self.check_files(rank, num_ranks)

    def check_files(self, rank: int = 0, num_ranks: int = 1) -> None:
        """Checks the files' existence, sizes and headers; each file is checked by one of the ranks.

        Raises:
            CheckpointError: a file is missing or differs.
        """
        for file in list(self.manifest.files)[rank::num_ranks]:
            if file not in self._files:
                self._open(file)
                _close(self._files.pop(file))

    def _check(self, wanted: Sequence[TensorRange]) -> None:
        check_match(self.manifest, wanted, self.path)
        for file in sorted({shard.file for item in wanted for shard in self._shards_of(item)}):
            self._open(file)

    def _shards_of(self, item: TensorRange) -> Iterator[StoredShard]:
        stored = self.manifest.tensors.get(item.key)
        if stored is not None:
            if isinstance(stored, ComposedTensor):
                yield from stored.shards
                return
            whole = not _is_flattened_alike(stored, item)
            begin, end = (0, stored.numel) if whole else (item.begin, item.end)
            yield from (shard for shard in stored.shards if max(begin, shard.begin) < min(end, shard.end))

    def rng_states(self, rank: int) -> dict[str, torch.Tensor]:
        """The states of a rank's random number generators, by generator. Raises CheckpointError."""
        states = {}
        for stored in self.manifest.tensors.values():
            if stored.kind == "rng" and stored.name.startswith(f"rank{rank}."):
                states[stored.name.partition(".")[2]] = self._read_range(stored, 0, stored.numel).clone()
        return states

    def left_out(self, num_ranks: int) -> str:
        """Describes the state that ``num_ranks`` ranks do not take over; empty: they take all."""
        return "" if num_ranks == self.manifest.num_ranks else "random numbers go on as they are on other ranks"

    def load(self, sink: ShardSink) -> None:
        """Writes everything the sink wants into it.

        Raises:
            CheckpointError: :meth:`check` fails (nothing was written then), or a tensor is damaged.
        """
        wanted = list(sink.wanted())
        self._check(wanted)
        for item in wanted:
            stored = self.manifest.tensors.get(item.key)
            if stored is not None and (item.numel > 0 or item.is_whole):
                sink.write(item, self.read(stored, item))

    @property
    def described_blocks(self) -> Any:
        """The description of blocks in the manifest's state (checkpoint/blocks.py); None without blocks."""
        return self._stored.state.get(BLOCKS)

    def load_as_stored(self, sink: ShardSink) -> None:
        """:meth:`load` for a sink that wants tensors by the names of blocks.

        Raises:
            CheckpointError: a tensor is missing or damaged.
        """
        for item in sink.wanted():
            stored = self._stored.tensors.get(item.key)
            if stored is None and item.key[1] != "value":
                continue
            if stored is None or stored.shape != item.shape:
                raise CheckpointError(f"{self.path} has no {item} of shape {list(item.shape)}; load another checkpoint")
            if item.numel > 0 or item.is_whole:
                sink.write(item, self.read(stored, item))

    def read(self, stored: StoredTensor, wanted: TensorRange) -> torch.Tensor:
        """The elements of a range, in the tensor's dtype and the wanted order, valid until the next call.

        Raises:
            CheckpointError: they are damaged; the message names the file and the tensor.
        """
        if isinstance(stored, ComposedTensor):
            with _C.HostAllocations():
                return flattened(self._compose(stored), wanted.order)[wanted.begin : wanted.end].clone()
        if _is_flattened_alike(stored, wanted):
            return self._read_range(stored, wanted.begin, wanted.end)
        whole = row_major(self._read_range(stored, 0, stored.numel), stored.shape, stored.order)
        with _C.HostAllocations():
            return flattened(whole, wanted.order)[wanted.begin : wanted.end].clone()

    def _compose(self, stored: ComposedTensor) -> torch.Tensor:
        """Assembles the whole tensor; other tensors of the same blocks are cached for the next call."""
        if self._composed is None or self._composed[0] != stored.blocks:
            self._composed = None
            values = [
                row_major(self._read_range(block, 0, block.numel).clone(), block.shape, block.order)
                for block in stored.blocks
            ]
            self._composed = stored.blocks, stored.compose(values)
        return self._composed[1][stored.name]

    def _read_range(self, stored: StoredTensor, begin: int, end: int) -> torch.Tensor:
        result = None
        for shard in stored.shards:
            first, last = max(begin, shard.begin), min(end, shard.end)
            if first >= last:
                continue
            values = self._read_shard(stored, shard)
            if (shard.begin, shard.end) == (begin, end):
                return values
            if result is None:
                result = tensor_of(self._range_memory.take((end - begin) * stored.dtype.itemsize), stored.dtype)
            result[first - begin : last - begin] = values[first - shard.begin : last - shard.begin]
        return result if result is not None else torch.empty(0, dtype=stored.dtype, device="cpu")

    def _read_shard(self, stored: StoredTensor, shard: StoredShard) -> torch.Tensor:
        if self._last is not None and self._last[0] is shard:
            return self._last[1]
        self._last = None
        self._open(shard.file)  # checks the size before allocating
        data = self._shard_memory.take(shard.num_bytes)
        crc = 0
        for begin in range(0, len(data), _BLOCK_BYTES):  # the checksum is computed while a block is in the cache
            block = data[begin : begin + _BLOCK_BYTES]
            self._fill(shard.file, block, shard.offset + begin)
            crc = _C.crc32c(block, crc)
        if crc != shard.crc32c:
            raise self._damaged(stored, shard)
        if shard.encoding is None:
            values = tensor_of(data, stored.dtype)
        else:
            values = self._decoded(shard.encoding, data, shard.numel)
        self._last = (shard, values)
        return values

    def _decoded(self, encoding: Encoding, data: memoryview, numel: int) -> torch.Tensor:
        values = tensor_of(self._decoded_memory.take(numel * torch.float32.itemsize), torch.float32)
        encoding.decode(data, values)
        return values

    def _damaged(self, stored: StoredTensor, shard: StoredShard) -> CheckpointError:
        return CheckpointError(
            f"{self.path / shard.file}: {stored} [{shard.begin}:{shard.end}] is damaged: its checksum is not that of "
            "what was saved; load another checkpoint"
        )

    def _fill(self, file: str, data: memoryview, offset: int) -> None:
        """Reads bytes, which the file's size guarantees."""
        fd = self._open(file)
        done = 0
        while done < len(data):
            try:
                count = os.preadv(fd, [data[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path / file}: {error.strerror}; load another checkpoint") from error
            if count == 0:
                raise CheckpointError(f"{self.path / file} ends at {offset + done}; load another checkpoint")
            done += count

    def _open(self, file: str) -> int:
        """A descriptor of a file whose size and header are verified."""
        if file in self._files:
            return self._files[file]
        try:
            fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._folder)
        except OSError as error:
            raise CheckpointError(f"{self.path / file}: {error.strerror}; load another checkpoint") from error
        self._files[file] = fd
        try:
            self._check_file(file, fd, self.manifest.files[file])
        except BaseException:
            del self._files[file]  # otherwise it would count as checked
            _close(fd)
            raise
        return fd

    def _check_file(self, file: str, fd: int, expected: StoredFile) -> None:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != expected.num_bytes:
            raise CheckpointError(
                f"{self.path / file} has {status.st_size} bytes, {expected.num_bytes} were saved; load another "
                "checkpoint"
            )
        header = bytearray(expected.header_bytes)
        self._fill(file, memoryview(header), 0)
        if _C.crc32c(header) != expected.header_crc32c:
            raise CheckpointError(f"{self.path / file}: its header is damaged; load another checkpoint")

    def verify(self, num_threads: int = 1) -> float:
        """Reads and verifies every byte; returns the seconds taken.

        Raises:
            CheckpointError: something is damaged, missing, or does not belong; the message names all of it.
        """
        begun = time.perf_counter()
        jobs: dict[str, list[tuple[StoredTensor, StoredShard]]] = {name: [] for name in self._stored.files}
        for stored in self._stored.tensors.values():
            for shard in stored.shards:
                jobs[shard.file].append((stored, shard))
        with ThreadPoolExecutor(num_threads) as pool:
            errors = [
                error
                for found in pool.map(lambda name: list(self._verify_file(jobs[name], name)), jobs)
                for error in found
            ]
        try:
            errors += [f"{self.path / name} does not belong there" for name in self._strangers()]
        except OSError as error:
            errors.append(f"{self.path}: {error.strerror}")
        if errors:
            raise CheckpointError("\n".join(errors))
        return time.perf_counter() - begun

    def _verify_file(self, shards: list[tuple[StoredTensor, StoredShard]], name: str) -> Iterator[str]:
        block = memoryview(bytearray(_BLOCK_BYTES))
        try:
            self._open(name)
            for stored, shard in sorted(shards, key=lambda pair: pair[1].offset):
                crc = 0
                for begin in range(0, shard.num_bytes, _BLOCK_BYTES):
                    piece = block[: min(_BLOCK_BYTES, shard.num_bytes - begin)]
                    self._fill(name, piece, shard.offset + begin)
                    crc = _C.crc32c(piece, crc)
                if crc != shard.crc32c:
                    yield str(self._damaged(stored, shard))
        except CheckpointError as error:
            yield str(error)

    def _strangers(self) -> list[str]:
        return sorted(set(os.listdir(self._folder)) - set(self.manifest.files) - {MANIFEST_NAME})  # noqa: PTH208


def _close(fd: int) -> None:
    """Closes a descriptor that was read from; the system closes it also where it reports an error."""
    with contextlib.suppress(OSError):
        os.close(fd)


def _is_flattened_alike(stored: StoredTensor, wanted: TensorRange) -> bool:
    """True if both are flattened in the same order, so that a wanted range is a stored range."""
    row_major_each = [is_row_major(one.shape, one.order) for one in (stored, wanted)]
    return all(row_major_each) or (not any(row_major_each) and stored.order == wanted.order)


def check_match(manifest: Manifest, wanted: Iterable[TensorRange], path: Path) -> None:
    """Checks that a model's tensors are those of a checkpoint.

    Raises:
        CheckpointError: they are not; the message names missing and unexpected tensors, and those of another shape or
            dtype.
    """
    found: set[tuple[str, str]] = set()
    missing, other = [], []
    for item in wanted:
        found.add(item.key)
        stored = manifest.tensors.get(item.key)
        if stored is None:
            if item.key[1] == "value":
                missing.append(item.name)
        elif stored.shape != item.shape:
            other.append(f"{item.name} (shape {stored.shape} in the checkpoint, {item.shape} here)")
        elif stored.dtype != item.dtype and not (stored.dtype.is_floating_point and item.dtype.is_floating_point):
            other.append(f"{item.name} ({stored.dtype} in the checkpoint, {item.dtype} here)")
    unexpected = [name for name, kind in manifest.tensors if kind == "value" and (name, kind) not in found]
    if missing or unexpected or other:
        parts = {"not in the checkpoint": missing, "not in this model": unexpected, "different": other}
        said = "; ".join(f"{what}: {_some(names)}" for what, names in parts.items() if names)
        raise CheckpointError(
            f"{path} is of another model, nothing was loaded. {said}. Build the model it was saved from."
        )


def _some(names: list[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - _NUM_NAMED} more" if len(unique) > _NUM_NAMED else ""
    return ", ".join(unique[:_NUM_NAMED]) + more
