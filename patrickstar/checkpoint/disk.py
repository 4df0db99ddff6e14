"""Everything that writing a checkpoint asks of the file system: one method per system call, so that a test can make any
of them fail, or end the process there.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

logger = logging.getLogger("patrickstar")

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class Disk:
    """The local file system. Every method raises OSError, names the path in it, and changes nothing then."""

    def make_folder(self, path: Path) -> None:
        """A new folder; there must be none."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """A descriptor of a new file, to write; there must be none, nor a link."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def open(self, path: Path) -> int:
        """A descriptor of a file that is there, to write."""
        return os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def write(self, fd: int, data: memoryview) -> int:
        """Appends bytes; how many of them."""
        return os.write(fd, data)

    def write_at(self, fd: int, data: memoryview, offset: int) -> int:
        """Writes bytes at an offset; how many of them."""
        return os.pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        """Returns when the file's bytes are on the disk."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Closes a descriptor of :meth:`create` or :meth:`open`."""
        os.close(fd)

    def sync_folder(self, path: Path) -> None:
        """Returns when the folder's entries are on the disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            raise naming(error, path) from error
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Replaces a file, or an empty folder, or nothing."""
        source.rename(target)

    def exchange(self, one: Path, other: Path) -> None:
        """Two folders take each other's names, at once."""
        libc = ctypes.CDLL(None, use_errno=True)
        call = getattr(libc, "renameat2", None)
        if call is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(one))
        if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(one), None, str(other))

    def remove_file(self, path: Path) -> None:
        """Removes a file or a link."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Removes a folder, which must be empty."""
        path.rmdir()


def created(disk: Disk, path: Path) -> AbstractContextManager[int]:
    """A new file's descriptor; its bytes are on the disk when the block ends."""
    return _writing(disk, path, disk.create)


def opened(disk: Disk, path: Path) -> AbstractContextManager[int]:
    """A descriptor of a file that is there; its bytes are on the disk when the block ends."""
    return _writing(disk, path, disk.open)


@contextmanager
def _writing(disk: Disk, path: Path, open_file: Callable[[Path], int]) -> Iterator[int]:
    fd = open_file(path)
    try:
        try:
            yield fd
            disk.sync(fd)
        finally:
            disk.close(fd)
    except OSError as error:
        raise naming(error, path) from error


def write_all(disk: Disk, fd: int, data: memoryview, offset: int | None = None) -> None:
    """Writes all bytes, at the end or at an offset."""
    done = 0
    while done < len(data):
        rest = data[done:]
        count = disk.write(fd, rest) if offset is None else disk.write_at(fd, rest, offset + done)
        if count == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += count


def replace_file(disk: Disk, path: Path, data: bytes, temporary: Path) -> None:
    """Puts a file with ``data`` at ``path``, all or nothing, and returns when it is on the disk."""
    with created(disk, temporary) as fd:
        write_all(disk, fd, memoryview(data))
    disk.rename(temporary, path)
    disk.sync_folder(path.parent)


def make_folders(disk: Disk, path: Path) -> None:
    """Makes a folder and those above it where there are none."""
    if path.is_dir():
        return
    make_folders(disk, path.parent)
    disk.make_folder(path)
    disk.sync_folder(path.parent)


def remove_tree(disk: Disk, path: Path) -> None:
    """Removes a folder and what is in it; follows no link. What cannot be removed keeps nothing else from it.

    Raises:
        OSError: the first of the errors, when all was tried.
    """
    with os.scandir(path) as entries:
        children = [(Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in entries]
    errors = []
    for child, is_folder in children:
        try:
            if is_folder:
                remove_tree(disk, child)
            else:
                disk.remove_file(child)
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    disk.remove_folder(path)


@contextmanager
def locked(path: Path, disk: Disk | None = None) -> Iterator[None]:
    """Holds a folder against other processes that lock it; the system lets go of it when this process ends.

    Raises:
        BlockingIOError: another process holds it.
    """
    disk = disk or Disk()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise naming(error, path) from error
        except OSError as error:  # a file system without locks: its users see to it that one saves at a time
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
        yield
    finally:
        try:
            disk.close(fd)
        except OSError as error:  # what was done under the lock is done, or has an error of its own
            logger.warning("%s was locked, and its descriptor cannot be closed: %s", path, error.strerror)


def naming(error: OSError, path: Path) -> OSError:
    """The same error with a path, which calls on descriptors leave out."""
    return error if error.filename is not None else type(error)(error.errno, error.strerror, str(path))
