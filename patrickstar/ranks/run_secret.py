"""The secret that the processes of one elastic run share, and its file.

The file has one line of at least 64 hexadecimal digits. A file with another owner, or with a mode other than 0600 or
0400, is refused. The secret itself is never sent; each service derives its own key (:meth:`RunSecret.key`).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
from pathlib import Path

from patrickstar import _C
from patrickstar.ranks.addresses import is_loopback, resolved
from patrickstar.ranks.private_files import NotPrivateError, create_private, make_private_folders, open_private

SECRET_VARIABLE = "PATRICKSTAR_ELASTIC_SECRET"
"""The environment variable that names the file with the run's secret."""
_FOLDER = Path("~/.patrickstar/elastic")
_NUM_BYTES = 32
_MOST_BYTES = 4096


class SecretError(_C.StateError):
    """The file of a run's secret is missing, open to other users, or holds no secret."""


class RunSecret:
    """At least 32 random bytes; ``repr`` shows none of them."""

    def __init__(self, value: bytes):
        self._value = value

    @classmethod
    def random(cls) -> RunSecret:
        """Makes a new secret."""
        return cls(secrets.token_bytes(_NUM_BYTES))

    @classmethod
    def from_hex(cls, text: str) -> RunSecret:
        """The secret that :meth:`hex` wrote.

        Raises:
            ValueError: the text has fewer than 64 hexadecimal digits, or other characters.
        """
        value = bytes.fromhex(text)
        if len(value) < _NUM_BYTES:
            raise ValueError(f"it has {2 * len(value)} hexadecimal digits instead of at least {2 * _NUM_BYTES}")
        return cls(value)

    def hex(self) -> str:
        """The secret as hexadecimal digits, for a private file."""
        return self._value.hex()

    def key(self, purpose: str) -> bytes:
        """The key for one purpose: 32 bytes, HMAC-SHA256 of the purpose."""
        return hmac.digest(self._value, purpose.encode(), hashlib.sha256)

    def derived(self, purpose: str) -> RunSecret:
        """A secret for one purpose, from which further keys are derived."""
        return RunSecret(self.key(purpose))


def default_secret_file(host: str, port: int) -> Path:
    """The file in the user's home for a rendezvous address. For loopback addresses each machine that shares the home
    has its own file.

    Raises:
        OSError: the host cannot be resolved.
    """
    place = f"{socket.gethostname()}-loopback" if is_loopback(host) else resolved(host)
    return (_FOLDER / f"{place}:{port}").expanduser()


def find_secret_file(host: str, port: int, given: str | os.PathLike[str] | None) -> Path:
    """The secret file of a rendezvous address: ``given``, else the environment's, else the default."""
    named = os.environ.get(SECRET_VARIABLE) if given is None else given
    return Path(named).expanduser() if named else default_secret_file(host, port)


def read_secret(path: Path) -> RunSecret:
    """Reads a secret's file.

    Raises:
        SecretError: the file is missing, open to other users, another user's, or holds no secret.
    """
    try:
        with os.fdopen(open_private(path), "rb") as file:
            content = file.read(_MOST_BYTES)
        return RunSecret.from_hex(content.decode("ascii").strip())
    except FileNotFoundError as error:
        raise SecretError(
            f"there is no file {path} with the run's secret; copy the one that serve_rendezvous wrote (mode 0600), and "
            f"set {SECRET_VARIABLE} to its path"
        ) from error
    except NotPrivateError as error:
        raise SecretError(f"the run's secret is refused: {error}") from error
    except OSError as error:
        raise SecretError(f"the run's secret cannot be read: {error}") from error
    except ValueError as error:
        raise SecretError(f"{path} holds no secret: {error}; let serve_rendezvous write it") from error


def write_secret(path: Path) -> RunSecret:
    """Writes a new secret into a new file of mode 0600. A missing folder is created with mode 0700.

    Raises:
        SecretError: the file exists or cannot be written, or its default folder is open to other users.
    """
    secret = RunSecret.random()
    try:
        if path.parent == _FOLDER.expanduser():
            make_private_folders(path.parent)
        with os.fdopen(create_private(path), "w", encoding="ascii") as file:
            file.write(secret.hex() + "\n")
    except OSError as error:
        raise SecretError(f"the run's secret cannot be written: {error}") from error
    return secret
