"""Files and folders that other users can neither read nor replace: mode 0600 and 0700, own user."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_MODES = {stat.S_IFREG: 0o600, stat.S_IFDIR: 0o700}
_NAMES = {stat.S_IFREG: "file", stat.S_IFDIR: "folder"}


class NotPrivateError(PermissionError):
    """Another user owns a file or folder, or may read or write it."""


def create_private(path: str | os.PathLike[str], flags: int = os.O_WRONLY) -> int:
    """Creates a file with mode 0600 and returns its descriptor.

    Raises:
        FileExistsError: the name exists, even as a link.
        OSError: the file cannot be created.
    """
    return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def open_private(path: str | os.PathLike[str]) -> int:
    """Opens a file for reading and returns its descriptor.

    Raises:
        NotPrivateError: the file is another user's, open to other users, or no regular file.
        OSError: the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would block
    try:
        _check(path, os.fstat(descriptor), stat.S_IFREG)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def append_private(path: str | os.PathLike[str]) -> int:
    """Opens a file for appending, with mode 0600 if it is new, and returns its descriptor.

    Raises:
        OSError: the file cannot be opened.
    """
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def make_private_folder(path: str | os.PathLike[str]) -> None:
    """Creates a folder with mode 0700, or checks the one that is there. Its parent must exist.

    Raises:
        NotPrivateError: the folder is another user's, open to other users, or no folder.
        OSError: the folder cannot be created.
    """
    with contextlib.suppress(FileExistsError):
        Path(path).mkdir(0o700)
    _check(path, os.lstat(path), stat.S_IFDIR)


def make_private_folders(path: str | os.PathLike[str]) -> None:
    """Like :func:`make_private_folder`, with the parents that are missing."""
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    make_private_folder(path)


def _check(path: str | os.PathLike[str], found: os.stat_result, kind: int) -> None:
    name, mode = _NAMES[kind], stat.S_IMODE(found.st_mode)
    if stat.S_IFMT(found.st_mode) != kind:
        raise NotPrivateError(f"{os.fspath(path)} is no {name}; remove it, or give another path")
    if found.st_uid != os.geteuid():
        raise NotPrivateError(
            f"the {name} {os.fspath(path)} belongs to user {found.st_uid}, and this process runs as user "
            f"{os.geteuid()}; give one of your own"
        )
    if mode & _OTHERS:
        raise NotPrivateError(
            f"the {name} {os.fspath(path)} is open to other users (mode {mode:04o}); make it private (chmod "
            f"{_MODES[kind]:o}) and renew what is secret in it"
        )
