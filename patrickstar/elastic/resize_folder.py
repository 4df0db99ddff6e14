"""The folder of one resize in a folder of shared memory: mode 0700, with files of mode 0600."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from patrickstar.ranks.private_files import make_private_folder

_TOKEN = re.compile(r"[0-9a-f]{32}")


def is_token(text: object) -> bool:
    """True for a resize's token, which is part of a path: 32 hexadecimal digits."""
    return isinstance(text, str) and _TOKEN.fullmatch(text) is not None


class ResizeFolder:
    """One process's folder for one resize. Processes of a host with the same parent folder share it.

    Args:
        parent: the folder in which it is created.
        token: the resize's unique token.
    """

    def __init__(self, parent: str | os.PathLike[str], token: str):
        self._path = Path(parent, f"patrickstar-{token}")

    def make(self) -> None:
        """Creates the folder, unless another process of this user has.

        Raises:
            OSError: the parent is missing, or the folder is another user's.
        """
        make_private_folder(self._path)

    def file(self, name: str) -> Path:
        """The path of a file in the folder."""
        return self._path / name

    def remove(self, names: Iterable[str]) -> None:
        """Removes these files if they exist, and the folder if it is then empty."""
        for name in names:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self.file(name).unlink()
        with contextlib.suppress(OSError):
            self._path.rmdir()
