"""Values of shards on their way between processes, in files of a folder: shared memory. Who does not find another one's
file in its own folder fetches its pieces of it (``transfers.py``).

Each old rank writes one file with what others need of it: its moves in their order, of each move the arrays that the
parameter has, in float32. Who reads it finds its pieces by the same order, without any index in the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from patrickstar.elastic.movement import Move
from patrickstar.elastic.transfers import fetch

DEFAULT_FOLDER = "/dev/shm"  # noqa: S108 (memory is on purpose)
_ITEM_BYTES = torch.float32.itemsize


class PublishedShards:
    """The files of one resize.

    Args:
        folder: where they lie.
        token: of the resize: no other has its name.
        moves: all of them, sorted.
        arrays: how many arrays each parameter has.
    """

    def __init__(self, folder: str | os.PathLike[str], token: str, moves: Sequence[Move], arrays: Mapping[int, int]):
        self._folder, self._token = Path(folder), token
        self._arrays = arrays
        self._places: dict[Move, int] = {}
        self.num_bytes: dict[int, int] = {}
        """Size of the file of each old rank that has one."""
        for move in moves:
            at = self.num_bytes.get(move.source, 0)
            self._places[move] = at
            self.num_bytes[move.source] = at + move.numel * arrays[move.param] * _ITEM_BYTES

    def path(self, rank: int) -> Path:
        """The file of an old rank."""
        return self._folder / f"patrickstar-{self._token}-rank{rank}"

    def span(self, source: int, target: int) -> tuple[int, int]:
        """Where what the new rank ``target`` needs lies in the file of ``source``: its first byte, and its bytes."""
        pieces = [move for move in self._places if (move.source, move.target) == (source, target)]
        size = sum(move.numel * self._arrays[move.param] for move in pieces) * _ITEM_BYTES
        return (self._places[pieces[0]] if pieces else 0), size  # one piece: moves are sorted

    def write(self, rank: int, read: Callable[[int, int, int, int], torch.Tensor]) -> None:
        """Writes the file of an old rank, if it has one.

        Args:
            rank: the old rank.
            read: gives elements [begin, end) of an array of a parameter, float32: ``read(param, array, begin, end)``.

        Raises:
            OSError: there is no room, or no such folder.
        """
        if rank not in self.num_bytes:
            return
        with self.path(rank).open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, self.num_bytes[rank])  # no room is said now, and not by SIGBUS later
            for move in self._places:
                if move.source == rank:
                    for array in range(self._arrays[move.param]):
                        values = read(move.param, array, move.begin, move.end)
                        file.write(memoryview(values.contiguous().view(torch.uint8).numpy()))

    def has(self, rank: int) -> bool:
        """Whether the file of an old rank is there as it was written.

        Raises:
            OSError: it is there and was not written to its end.
        """
        if not self.path(rank).exists():
            return False
        found = self.path(rank).stat().st_size
        if found != self.num_bytes[rank]:
            raise OSError(f"{self.path(rank)} has {found} bytes instead of {self.num_bytes[rank]}")
        return True

    def read(self, move: Move, array: int) -> torch.Tensor:
        """The elements of a move of one of the parameter's arrays, float32, as a view of the file's memory."""
        at = self._places[move] + array * move.numel * _ITEM_BYTES
        size = self.num_bytes[move.source] // _ITEM_BYTES
        whole = torch.from_file(str(self.path(move.source)), shared=True, size=size, dtype=torch.float32)
        return whole[at // _ITEM_BYTES :][: move.numel]

    def remove(self) -> None:
        """Removes the files of all ranks; those who have them mapped keep what they have."""
        for rank in self.num_bytes:
            self.path(rank).unlink(missing_ok=True)


SHARDS_NAME = "shards"
"""What a :class:`FileServer` of an old rank calls its file."""


class ReachedShards:
    """What a new rank needs of others: in their files, where its folder has them, else in files of its own.

    Args:
        published: the files of all.
        folder: of this process.
        token: of the resize.
        target: the new rank.
        moves: all of them, sorted.
        arrays: how many arrays each parameter has.
    """

    def __init__(
        self,
        published: PublishedShards,
        folder: str | os.PathLike[str],
        token: str,
        target: int,
        moves: Sequence[Move],
        arrays: Mapping[int, int],
    ):
        own = [move for move in moves if move.target == target]
        self._published, self._target, self._token = published, target, token
        self._fetched = PublishedShards(folder, f"{token}-for{target}", own, arrays)
        self._sources = sorted({move.source for move in own})
        self._has_fetched: set[int] = set()

    def reach(self, addresses: Sequence[str], timeout_seconds: float) -> None:
        """All of it is there when this returns.

        Args:
            addresses: of the old ranks' file servers.
            timeout_seconds: without progress.

        Raises:
            OSError: something is neither in the folder nor to be fetched.
        """
        for source in self._sources:
            if self._published.has(source):
                continue
            begin, size = self._published.span(source, self._target)
            self._has_fetched.add(source)
            fetch(
                addresses[source],
                self._token,
                SHARDS_NAME,
                self._fetched.path(source),
                client=str(self._target),
                begin=begin,
                size=size,
                timeout_seconds=timeout_seconds,
            )

    def read(self, move: Move, array: int) -> torch.Tensor:
        """As :meth:`PublishedShards.read`."""
        return (self._fetched if move.source in self._has_fetched else self._published).read(move, array)

    def remove(self) -> None:
        """Removes what was fetched."""
        self._fetched.remove()
