"""Files between processes that share no folder: each process serves its own from a thread, others fetch them.

Both sides prove that they have the key of the resize (``ranks/authenticated.py``). A request is one JSON message: the
file's name, the client, and a byte range. The answer is a message with the number of bytes (8 bytes, little-endian),
followed by the bytes in messages of at most 1 MiB. An error is -1 and a text. Names refer to the server's table, never
to paths.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Mapping
from pathlib import Path

from patrickstar.ranks.addresses import listen, split_address
from patrickstar.ranks.authenticated import AuthenticatedConnection, connect
from patrickstar.ranks.authenticated_server import AuthenticatedServer
from patrickstar.ranks.failures import first_line
from patrickstar.ranks.private_files import create_private

_SIZE = struct.Struct("<q")
_PIECE_BYTES = 2**20
_WHOLE = -1


def own_address(towards: str) -> str:
    """This host's address as seen by the host ``towards``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))  # nothing is sent
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostname()


class FileServer:
    """Serves files of this process, to any number of clients, until :meth:`close`.

    Args:
        host: the address to listen at.
        key: 32 bytes, which clients must know.
        files: paths by client-side names.
        timeout_seconds: for an idle client.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, host: str, key: bytes, files: Mapping[str, Path], timeout_seconds: float):
        self._files = dict(files)
        self._timeout_seconds = timeout_seconds
        self._taken: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._server = AuthenticatedServer(
            listen(host, 0), key, self._serve, most_bytes=_PIECE_BYTES, name="patrickstar-file-server"
        )
        self.address = self._server.address
        """ "host:port" for clients."""

    def has_given(self, name: str, client: str) -> bool:
        """True if that client has received all it requested of the file."""
        with self._lock:
            return (name, client) in self._taken

    def close(self) -> None:
        """Stops listening; returns after running transfers are complete."""
        self._server.close(self._timeout_seconds)

    def _serve(self, client: AuthenticatedConnection) -> None:
        limit = self._timeout_seconds
        try:
            asked = json.loads(client.receive(limit))
            path, name = self._files[asked["name"]], str(asked["name"])
            begin, size = int(asked["begin"]), int(asked["size"])
            there = path.stat().st_size
            size = there - begin if size == _WHOLE else size
            if begin < 0 or size < 0 or begin + size > there:
                raise ValueError(f"{path} has {there} bytes")
            file = path.open("rb")
        except (ValueError, KeyError, TypeError, OSError) as error:
            client.send(_SIZE.pack(-1) + f"{type(error).__name__}: {first_line(error)}".encode(), limit)
            return
        with file:
            client.send(_SIZE.pack(size), limit)
            file.seek(begin)
            buffer = memoryview(bytearray(min(max(size, 1), _PIECE_BYTES)))
            while size > 0:
                got = file.readinto(buffer[: min(size, len(buffer))])
                if not got:
                    raise ConnectionError(f"{path} was cut")
                client.send(buffer[:got], limit)
                size -= got
        with self._lock:
            self._taken.add((name, str(asked["client"])))


def fetch(
    address: str,
    key: bytes,
    name: str,
    target: Path,
    *,
    client: str,
    begin: int = 0,
    size: int = _WHOLE,
    timeout_seconds: float,
) -> None:
    """Writes bytes of a file that ``address`` serves into the new file ``target``, of mode 0600.

    Args:
        address: "host:port" of a :class:`FileServer`.
        key: its key.
        name: the file's name there.
        target: the new file.
        client: this client's name.
        begin: first byte.
        size: number of bytes; -1: to the end of the file.
        timeout_seconds: without any progress.

    Raises:
        OSError: the server is unreachable, lacks the bytes, or ends before it has sent them.
    """
    host, port = split_address(address)
    connection = connect(host, port, key, timeout_seconds=timeout_seconds, most_bytes=_PIECE_BYTES, waits=False)
    try:
        asked = {"name": name, "client": client, "begin": begin, "size": size}
        connection.send(json.dumps(asked).encode(), timeout_seconds)
        answer = connection.receive(timeout_seconds)
        if len(answer) < _SIZE.size:
            raise OSError(f"{address} does not say how many bytes {name} has")
        (there,) = _SIZE.unpack_from(answer)
        if there < 0:
            raise OSError(f"{address} does not give {name}: {answer[_SIZE.size :].decode(errors='replace')}")
        with os.fdopen(create_private(target), "wb") as file:
            if there > 0:
                os.posix_fallocate(file.fileno(), 0, there)
            while there > 0:
                piece = connection.receive(timeout_seconds)
                if not 0 < len(piece) <= there:
                    raise OSError(f"{address} sends other bytes of {name} than it said")
                file.write(piece)
                there -= len(piece)
    except ConnectionError as error:
        raise OSError(f"{address} ended before it had sent {name}: {error}") from error
    finally:
        connection.close()
