"""The folder of checkpoints, and the atomic publication of a new one.

    directory/latest            the tag of the newest complete checkpoint, and its checksum
    directory/<tag>/            a complete checkpoint; files never change in it
    directory/.saving-<...>/    a checkpoint being written, or left by a process that ended

A checkpoint is written in a `.saving-` folder. All its files and the folder itself are synced to the disk, and only
then renamed to the tag. If the tag exists, the two folders swap names, and the old one is removed afterwards. `latest`
is then replaced atomically. So whenever the process or the machine stops, every tag names a complete checkpoint, and
`latest` one that existed before it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from patrickstar import _C
from patrickstar.checkpoint.disk import Disk, make_folders, naming, remove_tree, replace_file
from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.manifest import MANIFEST_NAME

logger = logging.getLogger("patrickstar")

LATEST = "latest"
_SAVING = ".saving-"
_MAX_TAG_BYTES = 200
MAX_LATEST_BYTES = 4096


def check_tag(tag: str) -> str:
    """Returns ``tag`` if it can be a folder's name.

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
    """The tag of the newest checkpoint in ``directory``, or None if there is none.

    Raises:
        CheckpointError: the file ``latest`` is damaged. Without a checksum it also counts as damaged if it differs in
            one bit from another existing tag.
    """
    path = Path(directory) / LATEST
    try:
        data = read_small_file(path, MAX_LATEST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; it must be a file that names a checkpoint") from error
    try:
        return _tag_in(data, tags(directory))
    except (UnicodeDecodeError, CheckpointError) as error:
        raise CheckpointError(
            f"{path} is damaged or names no checkpoint ({error}); load one by its tag, there are {_listed(directory)}"
        ) from error


def latest_bytes(tag: str) -> bytes:
    """Content of the file ``latest``; its first line is the tag."""
    return f"{tag}\ncrc32c {_C.crc32c(tag.encode()):08x}\n".encode()


def _tag_in(data: bytes, present: Sequence[str]) -> str:
    """The tag in a file ``latest``; older versions wrote it without a checksum."""
    line, _, rest = data.partition(b"\n")
    tag = check_tag(line.decode())
    if rest:
        if data != latest_bytes(tag):
            raise CheckpointError("its checksum is not that of its content")
        return tag
    if tag not in present:
        raise CheckpointError(f"there is no {tag!r}")
    for other in present:
        if _differ_in_one_bit(tag.encode(), other.encode()):
            raise CheckpointError(f"it has no checksum, and one changed bit makes {tag!r} of {other!r}")
    return tag


def _differ_in_one_bit(one: bytes, other: bytes) -> bool:
    return len(one) == len(other) and sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True)) == 1


def tags(directory: str | os.PathLike[str]) -> list[str]:
    """The tags of the checkpoints in ``directory``, sorted.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        entries = sorted(Path(directory).iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: {error.strerror}; check the disk, or load another checkpoint") from error
    return [path.name for path in entries if not path.name.startswith(".") and (path / MANIFEST_NAME).is_file()]


def remove_checkpoint(path: Path, disk: Disk | None = None) -> None:
    """Removes a complete checkpoint. Its name goes first, so that no name ever leads to half of it.

    Raises:
        OSError: a file cannot be removed; the next save in this directory tries again.
    """
    disk = disk or Disk()
    removed = path.with_name(f"{_SAVING}{path.name}-{secrets.token_hex(4)}")
    disk.rename(path, removed)
    disk.sync_folder(path.parent)
    remove_tree(disk, removed)


def find_checkpoint(directory: str | os.PathLike[str], tag: str | None) -> Path:
    """The folder of a checkpoint: of a tag, of the latest for None, or ``directory`` itself if it is one.

    Raises:
        CheckpointError: there is none; the message lists existing ones.
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
    try:
        found = tags(directory)
    except CheckpointError:
        return "some that cannot be listed"
    return ", ".join(found[-5:]) if found else "none"


def read_small_file(path: Path, max_bytes: int) -> bytes:
    """The bytes of a regular file of at most ``max_bytes``. Raises OSError, also if it is longer."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
                raise OSError(errno.EFBIG, f"it is no file of at most {max_bytes} bytes", str(path))
            return file.read(max_bytes)
    except OSError as error:
        raise naming(error, path) from error


class NewFolder:
    """A folder whose files appear under ``target`` atomically. One rank makes, publishes and discards it; others write
    into it meanwhile.
    """

    def __init__(self, disk: Disk, target: Path, token: str):
        self.path = target.parent / f"{_SAVING}{target.name}-{token}"
        """The folder being written; after :meth:`publish`, the replaced checkpoint."""
        self.disk = disk
        """The file system calls; tests replace them."""
        self._target = target
        self._is_settled = True

    def make_parents(self) -> None:
        """Makes missing parent folders."""
        make_folders(self.disk, self._target.parent)

    def make(self) -> None:
        """Makes the folder, and removes unfinished checkpoints of earlier saves."""
        for left in _unfinished(self._target.parent):
            logger.warning("%s is an unfinished checkpoint: removed", left)
            _remove(self.disk, left)
        self.disk.make_folder(self.path)

    def publish(self) -> None:
        """Renames the folder to its tag; all its files must be on the disk already. See the module's docstring."""
        self.disk.sync_folder(self.path)
        if self._target.is_dir():
            self._is_settled = False
            try:
                self.disk.exchange(self.path, self._target)
            except OSError as error:
                self._is_settled = True
                if error.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise CheckpointError(
                        f"{self._target} exists, and this file system cannot exchange two folders; save under "
                        "another tag"
                    ) from error
                raise
        else:
            self.disk.rename(self.path, self._target)

    def make_name_durable(self) -> None:
        """Syncs the parent folder, so that the name survives a crash. Only then may the replaced checkpoint be
        discarded.
        """
        try:
            self.disk.sync_folder(self._target.parent)
        except OSError:
            if not self._is_settled:
                logger.warning("%s is what was replaced; it is kept until the next save", self.path)
            raise
        self._is_settled = True

    def point_latest(self) -> None:
        """Points ``latest`` to the new checkpoint."""
        latest, data = self._target.parent / LATEST, latest_bytes(self._target.name)
        with contextlib.suppress(OSError):
            if read_small_file(latest, MAX_LATEST_BYTES) == data:
                return  # unchanged: works on a full disk too
        try:
            replace_file(self.disk, latest, data, self._new_latest)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Removes temporary names: a failed save, or the replaced checkpoint. The latter is kept if its replacement may
        not be on the disk yet.
        """
        for left in (self.path, self._new_latest) if self._is_settled else ():
            error = _remove_if_there(self.disk, left)
            # the first attempt may have freed space
            if error is not None and _remove_if_there(self.disk, left) is not None:
                logger.warning("%s cannot be removed (%s); the next save tries again", left, error.strerror)

    @property
    def _new_latest(self) -> Path:
        return self.path.with_name(f"{self.path.name}-{LATEST}")


def _remove_if_there(disk: Disk, path: Path) -> OSError | None:
    """Removes ``path`` if it exists; returns the error, if any."""
    try:
        if path.exists():
            _remove(disk, path)
    except OSError as error:
        return error
    return None


def _unfinished(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if path.name.startswith(_SAVING):
            yield path


def _remove(disk: Disk, path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_tree(disk, path)
    else:
        disk.remove_file(path)
