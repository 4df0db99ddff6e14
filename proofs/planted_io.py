"""Bugs in what handles errors of file system calls, for proofs/io.py."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from patrickstar import CheckpointError, DiskError
from patrickstar.checkpoint import Checkpoint, disk, folder, peers, reader, writer
from patrickstar.checkpoint.disk import Disk
from patrickstar.checkpoint.folder import NewFolder
from patrickstar.session.background_save import BackgroundSave
from proofs.cases import Planted, in_ranks, replaced


def planted() -> Iterator[Planted]:
    """Bugs in what handles errors of calls."""
    new, old = "saves under a new tag", "saves under the tag that exists"

    def forgiving(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            with contextlib.suppress(OSError):
                return call(*arguments)
            return len(arguments[-1]) if isinstance(arguments[-1], memoryview) else None

        return wrapped

    for name in ("sync", "sync_folder", "write", "rename"):
        bug = lambda name=name: replaced(Disk, name, forgiving(vars(Disk)[name]))  # noqa: E731
        yield Planted(f"an error of {name} is ignored", new, bug)

    def write_once(disk: Disk, fd: int, data: memoryview, offset: int | None = None) -> None:
        disk.write(fd, data) if offset is None else disk.write_at(fd, data, offset)

    yield Planted(
        "a short write counts as whole", "saves with short calls", lambda: replaced(writer, "write_all", write_once)
    )

    @contextlib.contextmanager
    def leaky(disk_: Disk, path: Path, open_file: Callable[[Path], int]) -> Iterator[int]:
        fd = open_file(path)
        try:
            yield fd
            disk_.sync(fd)
            disk_.close(fd)
        except OSError as error:
            raise disk.naming(error, path) from error

    yield Planted("a descriptor stays open after an error", new, lambda: replaced(disk, "_writing", leaky))
    yield Planted("what a failed save wrote stays", new, lambda: replaced(NewFolder, "discard", lambda self: None))

    def in_place(disk_: Disk, path: Path, data: bytes, temporary: Path) -> None:
        path.unlink(missing_ok=True)
        with disk.created(disk_, path) as fd:
            disk.write_all(disk_, fd, memoryview(data))

    yield Planted("latest is written in place", new, lambda: replaced(folder, "replace_file", in_place))

    def by_removal(self: Disk, one: Path, other: Path) -> None:
        disk.remove_tree(self, other)
        self.rename(one, other)

    yield Planted("the former checkpoint is removed first", old, lambda: replaced(Disk, "exchange", by_removal))
    yield Planted(
        "errors of descriptors name no file", new, lambda: replaced(disk, "naming", lambda error, path: error)
    )

    def filled(self: Checkpoint, file: str, data: memoryview, offset: int) -> None:
        with contextlib.suppress(OSError):
            os.preadv(self._open(file), [data], offset)

    def unchecked(self: Checkpoint, file: str, fd: int, expected: Any) -> None:
        pass

    @contextlib.contextmanager
    def careless_reader() -> Iterator[None]:
        """Checksums are off too: otherwise they would find it."""
        with (
            replaced(Checkpoint, "_fill", filled),
            replaced(Checkpoint, "_check_file", unchecked),
            replaced(reader, "_C", AlwaysRight()),
        ):
            yield

    yield Planted("an error of a read is ignored", "loads", careless_reader)
    yield Planted("a short read counts as whole", "loads with short calls", careless_reader)
    yield Planted("a save in the background fails silently", "saves in the background",
                  lambda: replaced(BackgroundSave, "finish", BackgroundSave.wait))  # fmt: skip

    yield Planted("the other rank is not told of an error", "saves of two ranks", lambda: in_ranks("alone"))
    yield Planted("an error of the disk of states is another one", "states on a disk",
                  lambda: replaced(DiskError, "__str__", lambda self: "something failed"))  # fmt: skip


@contextlib.contextmanager
def alone(peers_: Any, what: str) -> Iterator[peers.Turn]:
    """``phase`` of a rank that tells the others nothing of its error."""
    turn = peers.Turn()
    try:
        yield turn
    except OSError as error:
        raise CheckpointError(f"{what}: rank {peers_.rank}: {peers._describe(error)}") from error
    finally:
        peers_.exchange(b"")
    turn.heard = [turn.say] * peers_.size


IN_RANKS = {"alone": lambda: replaced(writer, "phase", alone)}


class AlwaysRight:
    """A core that finds all checksums right."""

    def __getattr__(self, name: str) -> Any:
        from patrickstar import _C

        return SameChecksum if name == "crc32c" else getattr(_C, name)


class SameChecksum(int):
    """Equals all numbers."""

    def __new__(cls, *_: object) -> SameChecksum:
        """A number of no data."""
        return int.__new__(cls, 0)

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__
