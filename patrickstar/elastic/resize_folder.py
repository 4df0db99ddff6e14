"""The folder of one resize in a folder of shared memory: mode 0700, and files of mode 0600 in it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from patrickstar.ranks.private_files import make_private_folder

_TOKEN = re.compile(r"[0-9a-f]{32}")


def is_token(text: object) -> bool:
    """True for a token of a resize, which is part of a path: 32 hexadecimal digits."""
    return isinstance(text, str) and _TOKEN.fullmatch(text) is not None


class ResizeFolder:
    """The folder of one process for one resize. Processes of a host with the same parent folder share it.

    Args:
        parent: in which it is created.
        token: of the resize: no other has its name.
    """

    def __init__(self, parent: str | os.PathLike[str], token: str):
        self._path = Path(parent, f"patrickstar-{token}")

    def make(self) -> None:
        """Creates it, unless another process of this user has.

        Raises:
            OSError: there is no such parent, or the folder is another user's.
        """
        make_private_folder(self._path)

    def file(self, name: str) -> Path:
        """The path of a file in it."""
        return self._path / name

    def remove(self, names: Iterable[str]) -> None:
        """Removes these files, where they are there, and the folder, where nothing else is left in it."""
        for name in names:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self.file(name).unlink()
        with contextlib.suppress(OSError):
            self._path.rmdir()
