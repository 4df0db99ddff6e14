"""The folder that checkpoints are in, and how a new one gets its name.

    directory/latest            the tag of the newest complete checkpoint
    directory/<tag>/            a complete checkpoint; files never change in it
    directory/.saving-<...>/    one that is being written, or was when its process ended

[Note: when a checkpoint is there] A checkpoint is written in a `.saving-` folder, all its files and the folder itself
are brought to the disk, and only then does it get its name, by one rename; where the name is taken, the two folders
exchange theirs, and the old one is removed afterwards. `latest` follows, a file replaced as a whole. So whenever the
process or the machine stops, every name leads to a complete checkpoint, and `latest` to one that was there before it.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from patrickstar.checkpoint.disk import Disk, make_folders, remove_tree, replace_file
from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.manifest import MANIFEST_NAME

logger = logging.getLogger("patrickstar")

LATEST = "latest"
_SAVING = ".saving-"
_MAX_TAG_BYTES = 200
_MAX_LATEST_BYTES = 4096


def check_tag(tag: str) -> str:
    """``tag``, if it can be a folder's name.

    Raises:
        CheckpointError: it cannot; the message says why.
    """
    bad = not isinstance(tag, str) or not tag or "/" in tag or "\0" in tag or tag.startswith(".") or tag == LATEST
    if bad or not tag.isprintable() or len(tag.encode(errors="replace")) > _MAX_TAG_BYTES:
        raise CheckpointError(
            f"the tag is {str(tag)[:100]!r}; it names a folder: at most {_MAX_TAG_BYTES} bytes that can be printed, no "
            f"/, no dot at its begin, and not {LATEST!r}"
        )
    return tag


def latest_tag(directory: str | os.PathLike[str]) -> str | None:
    """The tag of the newest checkpoint in ``directory``, or None where none was saved yet.

    Raises:
        CheckpointError: the file that says so is damaged.
    """
    path = Path(directory) / LATEST
    try:
        data = read_small_file(path, _MAX_LATEST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; it must be a file that names a checkpoint") from error
    try:
        return check_tag(data.decode().removesuffix("\n"))
    except (UnicodeDecodeError, CheckpointError) as error:
        raise CheckpointError(
            f"{path} names no checkpoint ({error}); give the tag of one: {_listed(directory)}"
        ) from error


def tags(directory: str | os.PathLike[str]) -> list[str]:
    """The tags of the checkpoints in ``directory``, sorted."""
    try:
        entries = sorted(Path(directory).iterdir())
    except FileNotFoundError:
        return []
    return [path.name for path in entries if not path.name.startswith(".") and (path / MANIFEST_NAME).is_file()]


def find_checkpoint(directory: str | os.PathLike[str], tag: str | None) -> Path:
    """The folder of a checkpoint: of a tag, of the latest for None, or ``directory`` itself if it is one.

    Raises:
        CheckpointError: there is none; the message lists those that are there.
    """
    if tag is None and (Path(directory) / MANIFEST_NAME).is_file():
        return Path(directory)
    if tag is None:
        tag = latest_tag(directory)
        if tag is None:
            raise CheckpointError(
                f"{directory} has no file {LATEST!r}: nothing was saved there yet, or not to the end; give the tag of "
                f"a checkpoint ({_listed(directory)}), or ask patrickstar.checkpoint.latest_tag before loading"
            )
    path = Path(directory) / check_tag(tag)
    if not (path / MANIFEST_NAME).is_file():
        raise CheckpointError(f"{path} is no checkpoint; there are {_listed(directory)}")
    return path


def _listed(directory: str | os.PathLike[str]) -> str:
    found = tags(directory)
    return ", ".join(found[-5:]) if found else "none"


def read_small_file(path: Path, max_bytes: int) -> bytes:
    """The bytes of a regular file, of at most ``max_bytes``. Raises OSError, also where it is longer."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it is no file of at most {max_bytes} bytes", str(path))
        return file.read(max_bytes)


class NewFolder:
    """A folder for files that are to appear under ``target``, all at once.

    One rank makes, publishes and discards it, others write into it meanwhile.
    """

    def __init__(self, disk: Disk, target: Path, token: str):
        self.path = target.parent / f"{_SAVING}{target.name}-{token}"
        """Where the files are written."""
        self._disk = disk
        self._target = target

    def make_parents(self) -> None:
        """Makes the folders above it where there are none."""
        make_folders(self._disk, self._target.parent)

    def make(self) -> None:
        """Makes the folder, and removes what earlier saves left behind unfinished."""
        for left in _unfinished(self._target.parent):
            logger.warning("%s is an unfinished checkpoint: removed", left)
            _remove(self._disk, left)
        self._disk.make_folder(self.path)

    def publish(self) -> None:
        """Gives the files, each of which is on the disk already, their name; see [Note: when a checkpoint is there]."""
        self._disk.sync_folder(self.path)
        if self._target.is_dir():
            try:
                self._disk.exchange(self.path, self._target)
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise CheckpointError(
                        f"{self._target} exists, and this file system cannot exchange two folders; save under "
                        "another tag"
                    ) from error
                raise
        else:
            self._disk.rename(self.path, self._target)

    def settle(self) -> None:
        """Brings the name to the disk; only then may what had it before be discarded."""
        self._disk.sync_folder(self._target.parent)

    def point_latest(self) -> None:
        """Makes ``latest`` lead to the files."""
        latest = self._target.parent / LATEST
        temporary = self.path.with_name(f"{self.path.name}-{LATEST}")
        replace_file(self._disk, latest, f"{self._target.name}\n".encode(), temporary)

    def discard(self) -> None:
        """Removes what is left under the temporary name: a failed save, or the checkpoint that was replaced."""
        for left in (self.path, self.path.with_name(f"{self.path.name}-{LATEST}")):
            try:
                if left.exists():
                    _remove(self._disk, left)
            except OSError as error:
                logger.warning("%s cannot be removed (%s); the next save tries again", left, error.strerror)


def _unfinished(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if path.name.startswith(_SAVING):
            yield path


def _remove(disk: Disk, path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_tree(disk, path)
    else:
        disk.remove_file(path)
