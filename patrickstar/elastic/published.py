"""Shard values in transit between processes, as files in a folder of shared memory. Files that are not in a process's
own folder are fetched (``transfers.py``).

Each old rank writes a few files for each new rank that needs its data, so that several threads write at a time. A file
has whole moves, each with all arrays of the parameter, in float32. The moves alone determine the files' contents, so
files have no index.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from patrickstar.elastic.movement import Move
from patrickstar.elastic.resize_folder import ResizeFolder
from patrickstar.elastic.transfers import fetch
from patrickstar.ranks.private_files import create_private, open_private

DEFAULT_FOLDER = "/dev/shm"  # noqa: S108 (shared memory on purpose)
_ITEM_BYTES = 4  # float32
_MOST_FILES = 16
_FILE_BYTES = 32 * 2**20
"""Minimum size of a file before another one is used."""
_FETCHES = 4
"""Files that a process fetches at a time."""


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


@dataclasses.dataclass
class ShardFile:
    """A part of the data that the new rank ``target`` needs from the old rank ``source``."""

    source: int
    target: int
    name: str
    num_bytes: int = 0
    moves: list[tuple[Move, int]] = dataclasses.field(default_factory=list)
    """Moves with the byte offset of their first array; the others follow it."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """One array of a move in one of several open files."""

    move: Move
    array: int
    file: int
    """Index of the file."""
    at: int
    """Offset of its first byte in the file."""


OpenFile = tuple[int, int]
"""A descriptor, and the file's size in bytes."""


class PublishedShards:
    """The files of one resize.

    Args:
        folder: the parent of the resize's own folder.
        token: of the resize.
        key: of the file servers (32 bytes).
        moves: all moves, sorted.
        arrays: number of arrays of each parameter.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        token: str,
        key: bytes,
        moves: Sequence[Move],
        arrays: Mapping[int, int],
    ):
        self.folder = ResizeFolder(folder, token)
        self._key = key
        self._arrays = arrays
        of_pairs: dict[tuple[int, int], list[Move]] = {}
        for move in moves:
            of_pairs.setdefault((move.source, move.target), []).append(move)
        self.files = [file for pair, some in of_pairs.items() for file in self._divided(*pair, some)]

    def _divided(self, source: int, target: int, moves: Sequence[Move]) -> list[ShardFile]:
        total = sum(map(self._size, moves))
        number = max(min(total // _FILE_BYTES, _MOST_FILES), 1)
        names = (f"rank{source}-for{target}-{index}" for index in range(number))
        files = [ShardFile(source, target, name) for name in names]
        for move in moves:  # spreads neighbours over files, which are filled evenly
            file = min(files, key=lambda one: one.num_bytes)
            file.moves.append((move, file.num_bytes))
            file.num_bytes += self._size(move)
        return [file for file in files if file.moves]

    def _size(self, move: Move) -> int:
        return move.numel * self._arrays[move.param] * _ITEM_BYTES

    def path(self, file: ShardFile) -> Path:
        """The file's path."""
        return self.folder.file(file.name)

    def of_source(self, rank: int) -> list[ShardFile]:
        """The files of an old rank."""
        return [file for file in self.files if file.source == rank]

    def write(self, rank: int, fill: Callable[[list[Piece], list[OpenFile]], None]) -> None:
        """Writes the files of an old rank.

        Args:
            rank: the old rank.
            fill: sizes the files, which are empty, and writes each piece to its place.

        Raises:
            OSError: the folder is missing, or open to other users.
            SystemError: from the core: there is no space.
        """
        self.folder.make()
        with self._opened(self.of_source(rank), lambda path: create_private(path, os.O_RDWR)) as (pieces, files):
            fill(pieces, files)

    @contextlib.contextmanager
    def opened(self, target: int) -> Iterator[tuple[list[Piece], list[OpenFile]]]:
        """Opens all files that a new rank needs, for reading; they must be present."""
        with self._opened([file for file in self.files if file.target == target], open_private) as found:
            yield found

    @contextlib.contextmanager
    def _opened(
        self, some: Sequence[ShardFile], open_file: Callable[[Path], int]
    ) -> Iterator[tuple[list[Piece], list[OpenFile]]]:
        with contextlib.ExitStack() as closing:
            files, pieces = [], []
            for index, file in enumerate(some):
                descriptor = open_file(self.path(file))
                closing.callback(os.close, descriptor)
                files.append((descriptor, file.num_bytes))
                for move, at in file.moves:
                    size = move.numel * _ITEM_BYTES
                    arrays = range(self._arrays[move.param])
                    pieces += [Piece(move, array, index, at + array * size) for array in arrays]
            pieces.sort(key=lambda piece: (piece.at, piece.file))  # so that all files are written concurrently
            yield pieces, files

    def reach(self, target: int, addresses: Sequence[str], timeout_seconds: float) -> None:
        """Fetches all missing files that the new rank ``target`` needs.

        Args:
            target: the new rank.
            addresses: of the old ranks' file servers.
            timeout_seconds: without progress.

        Raises:
            OSError: a file can neither be found nor fetched, or is incomplete.
        """
        self.folder.make()
        missing = [file for file in self.files if file.target == target and not self._has(file)]

        def get(file: ShardFile) -> None:
            fetch(
                addresses[file.source],
                self._key,
                file.name,
                self.path(file),
                client=str(target),
                timeout_seconds=timeout_seconds,
            )

        if missing:
            with concurrent.futures.ThreadPoolExecutor(_FETCHES) as threads:
                for _ in threads.map(get, missing):
                    pass

    def _has(self, file: ShardFile) -> bool:
        if not self.path(file).exists():
            return False
        found = self.path(file).stat().st_size
        if found != file.num_bytes:
            raise OSError(f"{self.path(file)} has {found} bytes instead of {file.num_bytes}")
        return True

    def remove(self) -> None:
        """Removes the files of all ranks; open descriptors stay valid. A thread closes the last ones: the system takes
        seconds to free gigabytes.
        """
        last = []
        for file in self.files:
            with contextlib.suppress(FileNotFoundError):
                last.append(os.open(self.path(file), os.O_RDONLY))
        self.folder.remove(file.name for file in self.files)
        threading.Thread(target=_close_all, args=(last,), name="patrickstar-remove").start()
