"""Copies of shards in memory, so that their tensors may change while a thread writes them.

    snapshot = take_snapshot(source, memory, saving.offsets)
    saving.write(snapshot.left)      # shards for which there was no memory: before their tensors change
    saving.write(snapshot.copied)    # at any time, by any thread; gives each piece back
    snapshot.close()

A copy lies in pieces, so that it fits into fragmented memory. Large pieces are aligned in memory as in the file, and
written from where they lie (``file_stream.py``).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from patrickstar.checkpoint.file_stream import ALIGNMENT, LEAST_UNCOPIED_BYTES
from patrickstar.checkpoint.memory import bytes_at
from patrickstar.checkpoint.shards import ShardCopy, ShardSource, TensorShard

# At most, so that pieces fit into memory of any use before. A multiple of each dtype's size.
_PIECE_BYTES = 64 * 2**20 - ALIGNMENT
_BATCH_BYTES = 8 * 2**30  # of one call of the source, which pins 256 MiB for states on the device


class Memory(Protocol):
    """Memory for copies. Any thread may give it back."""

    def take(self, num_bytes: int) -> int:
        """The address of so many bytes; 0 if there is no room."""

    def give_back(self, address: int) -> None:
        """Ends the use of memory that :meth:`take` gave."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Bytes [begin, end) of a shard, and the address to which they are copied."""

    shard: TensorShard
    begin: int
    end: int
    memory: int
    """Address of :attr:`memory_bytes` bytes that were taken for it."""
    address: int

    @property
    def num_bytes(self) -> int:
        """Number of its bytes."""
        return self.end - self.begin

    @property
    def memory_bytes(self) -> int:
        """Size of its memory: room for any alignment of a large piece."""
        return self.num_bytes + (ALIGNMENT if self.num_bytes >= LEAST_UNCOPIED_BYTES else 0)

    def aligned_as(self, offset: int) -> Piece:
        """The piece at the alignment of an offset in a file, if there is room for that."""
        move = (offset - self.memory) % ALIGNMENT
        fits = move + self.num_bytes <= self.memory_bytes
        return dataclasses.replace(self, address=self.memory + move) if fits else self


class CopyableSource(ShardSource, Protocol):
    """A source that copies many shards at once."""

    def copy(self, pieces: Sequence[Piece]) -> list[int]:
        """Copies the bytes of pieces, which follow each other in each shard, to their addresses; returns the CRC-32C
        of each.
        """


class Snapshot:
    """Shards that were copied, and shards that were not. Owns the copies' memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._held: set[int] = set()
        self.copied: list[TensorShard] = []
        """Shards to be written once each, from the copies."""
        self.left: list[TensorShard] = []
        """Shards without memory."""

    def take(self, shard: TensorShard) -> list[Piece]:
        """Memory for a copy of the shard; empty: no room."""
        pieces: list[Piece] = []
        for begin in range(0, shard.num_bytes, _PIECE_BYTES):
            piece = Piece(shard, begin, min(begin + _PIECE_BYTES, shard.num_bytes), 0, 0)
            address = self._memory.take(piece.memory_bytes)
            if not address:
                for taken in pieces:
                    self._give_back(taken.memory)
                return []
            self._held.add(address)
            pieces.append(dataclasses.replace(piece, memory=address, address=address))
        return pieces

    def add(self, shard: TensorShard, pieces: Sequence[Piece], crcs: Iterable[int]) -> None:
        """Adds a shard whose bytes are in ``pieces``, of these checksums."""
        copies = [
            ShardCopy(bytes_at(piece.address, piece.num_bytes), crc, functools.partial(self._give_back, piece.memory))
            for piece, crc in zip(pieces, crcs, strict=True)
        ]
        self.copied.append(dataclasses.replace(shard, copies=copies))

    def close(self) -> None:
        """Gives all memory back."""
        while self._held:
            self._memory.give_back(self._held.pop())

    def _give_back(self, memory: int) -> None:
        self._held.discard(memory)
        self._memory.give_back(memory)


def take_snapshot(
    source: CopyableSource, memory: Memory, offsets: Callable[[Sequence[TensorShard]], Sequence[int]]
) -> Snapshot:
    """Copies as many shards as ``memory`` has room for.

    Args:
        source: the shards.
        memory: for the copies.
        offsets: returns the offsets of copied shards in their files.
    """
    snapshot = Snapshot(memory)
    try:
        taken: list[tuple[TensorShard, list[Piece]]] = []
        for shard in source.shards():
            pieces = snapshot.take(shard)
            if pieces or shard.numel == 0:
                taken.append((shard, pieces))
            else:
                snapshot.left.append(shard)
        batch: list[tuple[TensorShard, list[Piece]]] = []
        num_bytes = 0
        for (shard, pieces), offset in zip(taken, offsets([shard for shard, _ in taken]), strict=True):
            batch.append((shard, [piece.aligned_as(offset + piece.begin) for piece in pieces]))
            num_bytes += shard.num_bytes
            if num_bytes >= _BATCH_BYTES:
                _copy(source, snapshot, batch)
                batch, num_bytes = [], 0
        _copy(source, snapshot, batch)
    except BaseException:
        snapshot.close()
        raise
    return snapshot


def _copy(source: CopyableSource, snapshot: Snapshot, batch: Sequence[tuple[TensorShard, list[Piece]]]) -> None:
    crcs = iter(source.copy([piece for _, pieces in batch for piece in pieces]))
    for shard, pieces in batch:
        snapshot.add(shard, pieces, itertools.islice(crcs, len(pieces)))
