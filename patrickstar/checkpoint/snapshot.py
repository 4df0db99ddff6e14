"""Copies of shards in memory, so that their tensors may change while a thread writes them.

    snapshot = take_snapshot(source, memory)
    saving.write(snapshot.left)      # shards for which there was no memory: before their tensors change
    saving.write(snapshot.copied)    # at any time, by any thread; gives each piece back
    snapshot.close()

A copy lies in pieces, so that it fits into fragmented memory.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from patrickstar.checkpoint.shards import ShardSource, TensorShard

_PIECE_BYTES = 64 * 2**20  # at most, so that pieces fit into memory of any use before
_BATCH_BYTES = 2**30  # copied by one call of the source


class Memory(Protocol):
    """Memory for copies. Any thread may give it back."""

    def take(self, num_bytes: int) -> int:
        """The address of so many bytes; 0 if there is no room."""

    def give_back(self, address: int) -> None:
        """Ends the use of memory that :meth:`take` gave."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements of a shard, and the address to which they are copied."""

    shard: TensorShard
    begin: int
    """First element, counted within the shard."""
    end: int
    address: int


class CopyableSource(ShardSource, Protocol):
    """A source that copies many shards at once."""

    def copy(self, pieces: Sequence[Piece]) -> None:
        """Copies the elements of pieces, which follow each other in each shard, to their addresses."""


class Snapshot:
    """Shards that were copied, and shards that were not. Owns the copies' memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._held: set[int] = set()
        self.copied: list[TensorShard] = []
        """Shards to be read once each, from the copies."""
        self.left: list[TensorShard] = []
        """Shards without memory."""

    def take(self, shard: TensorShard) -> list[Piece]:
        """Memory for a copy of the shard; empty: no room."""
        most = _PIECE_BYTES // shard.dtype.itemsize
        pieces: list[Piece] = []
        for begin in range(0, shard.numel, most):
            end = min(begin + most, shard.numel)
            address = self._memory.take((end - begin) * shard.dtype.itemsize)
            if not address:
                self._give_back(pieces)
                return []
            self._held.add(address)
            pieces.append(Piece(shard, begin, end, address))
        return pieces

    def add(self, shard: TensorShard, pieces: list[Piece]) -> None:
        """Adds a shard whose elements are in ``pieces``."""
        self.copied.append(dataclasses.replace(shard, read_pieces=lambda: self._read(pieces)))

    def close(self) -> None:
        """Gives all memory back."""
        while self._held:
            self._memory.give_back(self._held.pop())

    def _read(self, pieces: list[Piece]) -> Iterator[torch.Tensor]:
        for piece in pieces:
            num_bytes = (piece.end - piece.begin) * piece.shard.dtype.itemsize
            data = (ctypes.c_char * num_bytes).from_address(piece.address)
            yield torch.frombuffer(data, dtype=piece.shard.dtype)
            self._give_back([piece])

    def _give_back(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._held.discard(piece.address)
            self._memory.give_back(piece.address)


def take_snapshot(source: CopyableSource, memory: Memory) -> Snapshot:
    """Copies as many shards as ``memory`` has room for."""
    snapshot = Snapshot(memory)
    try:
        batch: list[tuple[TensorShard, list[Piece]]] = []
        num_bytes = 0
        for shard in source.shards():
            pieces = snapshot.take(shard)
            if not pieces and shard.numel > 0:
                snapshot.left.append(shard)
                continue
            batch.append((shard, pieces))
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
    source.copy([piece for _, pieces in batch for piece in pieces])
    for shard, pieces in batch:
        snapshot.add(shard, pieces)
