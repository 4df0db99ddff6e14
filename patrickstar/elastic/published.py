"""Values of shards on their way between processes, in files of a folder: shared memory. Who does not find another one's
file in its own folder fetches it (``transfers.py``).

Each old rank writes a few files for each new one that needs something of it, so that several threads write at a time:
whole moves, of each the arrays that the parameter has, in float32. Which move is in which file follows from the moves
alone, so that who reads a file finds its pieces without any index in it.
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

DEFAULT_FOLDER = "/dev/shm"  # noqa: S108 (memory is on purpose)
_ITEM_BYTES = 4  # of float32
_MOST_FILES = 16
_FILE_BYTES = 32 * 2**20
"""So many at least, before there is another file."""
_FETCHES = 4
"""Files that a process fetches at a time."""


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


@dataclasses.dataclass
class ShardFile:
    """Some of what the new rank ``target`` needs of the old rank ``source``."""

    source: int
    target: int
    name: str
    num_bytes: int = 0
    moves: list[tuple[Move, int]] = dataclasses.field(default_factory=list)
    """Each with the offset in bytes of its first array; the others follow it."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """An array of a move in one of several open files."""

    move: Move
    array: int
    file: int
    """Its index among them."""
    at: int
    """The first byte in it."""


OpenFile = tuple[int, int]
"""A descriptor, and the file's bytes."""


class PublishedShards:
    """The files of one resize.

    Args:
        folder: in which the resize has a folder of its own.
        token: of the resize.
        key: of the servers of files (32 bytes).
        moves: all of them, sorted.
        arrays: how many arrays each parameter has.
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
        for move in moves:  # neighbours in different ones, which are filled alike
            file = min(files, key=lambda one: one.num_bytes)
            file.moves.append((move, file.num_bytes))
            file.num_bytes += self._size(move)
        return [file for file in files if file.moves]

    def _size(self, move: Move) -> int:
        return move.numel * self._arrays[move.param] * _ITEM_BYTES

    def path(self, file: ShardFile) -> Path:
        """Where it is."""
        return self.folder.file(file.name)

    def of_source(self, rank: int) -> list[ShardFile]:
        """The files of an old rank."""
        return [file for file in self.files if file.source == rank]

    def write(self, rank: int, fill: Callable[[list[Piece], list[OpenFile]], None]) -> None:
        """Writes the files of an old rank.

        Args:
            rank: the old rank.
            fill: gives the files, which are empty, their size, and writes each piece where it says.

        Raises:
            OSError: there is no such folder, or it is open to other users.
            SystemError: of the core: there is no room.
        """
        self.folder.make()
        with self._opened(self.of_source(rank), lambda path: create_private(path, os.O_RDWR)) as (pieces, files):
            fill(pieces, files)

    @contextlib.contextmanager
    def opened(self, target: int) -> Iterator[tuple[list[Piece], list[OpenFile]]]:
        """All that a new rank needs of others, to be read; it is there."""
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
            pieces.sort(key=lambda piece: (piece.at, piece.file))  # so that all files are written at a time
            yield pieces, files

    def reach(self, target: int, addresses: Sequence[str], timeout_seconds: float) -> None:
        """All that the new rank ``target`` needs of others is in the folder when this returns.

        Args:
            target: the new rank.
            addresses: of the old ranks' file servers.
            timeout_seconds: without progress.

        Raises:
            OSError: something is neither in the folder nor to be fetched, or was not written to its end.
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
        """Removes the files of all ranks; those who have them open keep what they have. Their memory goes back to the
        system beside what comes next: gigabytes take seconds.
        """
        last = []
        for file in self.files:
            with contextlib.suppress(FileNotFoundError):
                last.append(os.open(self.path(file), os.O_RDONLY))
        self.folder.remove(file.name for file in self.files)
        threading.Thread(target=_close_all, args=(last,), name="patrickstar-remove").start()
