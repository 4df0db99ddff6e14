"""Values of shards on their way between processes, in files of a folder that all of them reach: shared memory on one
host.

Each old rank writes one file with what others need of it: its moves in their order, of each move the arrays that the
parameter has, in float32. Who reads it finds its pieces by the same order, without any index in the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from patrickstar.elastic.movement import Move

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

    def check(self, ranks: Sequence[int]) -> None:
        """Raises OSError unless the files of these old ranks are there as they were written."""
        for rank in ranks:
            found = self.path(rank).stat().st_size
            if found != self.num_bytes[rank]:
                raise OSError(f"{self.path(rank)} has {found} bytes instead of {self.num_bytes[rank]}")

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
