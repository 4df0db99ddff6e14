"""The file system calls that write checkpoints: one method per system call, so that tests can make any of them fail or
end the process there.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

logger = logging.getLogger("patrickstar")

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class Disk:
    """The local file system. Every method raises an OSError that names the path, and then has changed nothing."""

    def make_folder(self, path: Path) -> None:
        """Makes a folder, which must not exist."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """Creates a file, which must not exist even as a link, and returns a descriptor for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def open(self, path: Path) -> int:
        """Opens an existing file for writing and returns its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def write(self, fd: int, data: memoryview) -> int:
        """Appends bytes; returns how many."""
        return os.write(fd, data)

    def write_at(self, fd: int, data: memoryview, offset: int) -> int:
        """Writes bytes at an offset; returns how many."""
        return os.pwrite(fd, data, offset)

    def set_direct(self, fd: int, on: bool) -> bool:
        """Makes writes bypass the page cache, or not; returns False if the file system cannot. Bytes, offsets and
        memory of direct writes are aligned to 4096.
        """
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True

    def sync(self, fd: int) -> None:
        """Waits until the file's bytes are on the disk."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Closes a descriptor of :meth:`create` or :meth:`open`."""
        os.close(fd)

    def sync_folder(self, path: Path) -> None:
        """Waits until the folder's entries are on the disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise naming(error, path) from error

    def rename(self, source: Path, target: Path) -> None:
        """Renames; ``target`` is a file, an empty folder or absent."""
        source.rename(target)

    def exchange(self, one: Path, other: Path) -> None:
        """Swaps the names of two folders atomically."""
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
        """Removes an empty folder."""
        path.rmdir()


def created(disk: Disk, path: Path) -> AbstractContextManager[int]:
    """Creates a file; its bytes are on the disk when the block ends."""
    return _writing(disk, path, disk.create)


def opened(disk: Disk, path: Path) -> AbstractContextManager[int]:
    """Opens an existing file; its bytes are on the disk when the block ends."""
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
    """Replaces the file at ``path`` atomically; returns when it is on the disk."""
    with created(disk, temporary) as fd:
        write_all(disk, fd, memoryview(data))
    disk.rename(temporary, path)
    disk.sync_folder(path.parent)


def make_folders(disk: Disk, path: Path) -> None:
    """Makes a folder and its missing parents."""
    if path.is_dir():
        return
    make_folders(disk, path.parent)
    disk.make_folder(path)
    disk.sync_folder(path.parent)


def remove_tree(disk: Disk, path: Path) -> None:
    """Removes a folder with its content; follows no link. An entry that cannot be removed does not stop the others.

    Raises:
        OSError: the first error, after all entries were tried.
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
    """Locks a folder against other processes; the system releases it when this process ends.

    Raises:
        BlockingIOError: another process has locked it.
    """
    disk = disk or Disk()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise naming(error, path) from error
        except OSError as error:  # a file system without locks: its users must save one at a time
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise naming(error, path) from error
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a process forked meanwhile has the descriptor too
        try:
            disk.close(fd)
        except OSError as error:  # the work under the lock is done, or raises its own error
            logger.warning("%s was locked, and its descriptor cannot be closed: %s", path, error.strerror)


def naming(error: OSError, path: Path) -> OSError:
    """The error with a path, which calls on descriptors leave out."""
    return error if error.filename is not None else type(error)(error.errno, error.strerror, str(path))
