"""Pieces of files between processes that share no folder: each serves its own from a thread, others fetch.

A request is one line of JSON: which resize (its token, which only its processes know), which file, and which bytes. The
answer is the number of bytes, 8 of them, and then these; -1 and a text where they cannot be had.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Mapping
from pathlib import Path

from patrickstar.ranks.failures import first_line

_SIZE = struct.Struct("<q")
_BUFFER_BYTES = 2**20
_LONGEST_REQUEST = 2**12
_WHOLE = -1


def own_address(towards: str) -> str:
    """The address by which a host that is reached under the name ``towards`` reaches this one in turn."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))  # nothing is sent
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostname()


class FileServer:
    """Serves files of this process until :meth:`close`. Any number of clients at once.

    Args:
        host: the address to listen at.
        token: that clients must name.
        files: by the names that clients give.
        timeout_seconds: for a client that says or takes nothing.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, host: str, token: str, files: Mapping[str, Path], timeout_seconds: float):
        self._token, self._files = token, dict(files)
        self._timeout_seconds = timeout_seconds
        self._taken: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._serving: list[threading.Thread] = []
        self._socket = socket.create_server((host, 0))
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        """ "host:port" for clients."""
        self._thread = threading.Thread(target=self._run, name="patrickstar-file-server", daemon=True)
        self._thread.start()

    def has_given(self, name: str, client: str) -> bool:
        """Whether that client has had all it asked for of the file."""
        with self._lock:
            return (name, client) in self._taken

    def close(self) -> None:
        """Listens no more; clients that are being served get what they asked for before this returns."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()
        self._thread.join(self._timeout_seconds)
        for serving in self._serving:
            serving.join(self._timeout_seconds)

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            serving = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._serving.append(serving)
            serving.start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            client.settimeout(self._timeout_seconds)
            try:
                asked = json.loads(_line(client))
                if asked["token"] != self._token:
                    raise ValueError("it is of another resize")
                path = self._files[asked["name"]]
                begin, size = int(asked["begin"]), int(asked["size"])
                there = path.stat().st_size
                size = there - begin if size == _WHOLE else size
                if begin < 0 or size < 0 or begin + size > there:
                    raise ValueError(f"{path} has {there} bytes")
            except (ValueError, KeyError, TypeError, OSError) as error:
                client.sendall(_SIZE.pack(-1) + f"{type(error).__name__}: {first_line(error)}".encode())
                return
            client.sendall(_SIZE.pack(size))
            with path.open("rb") as file:
                if size > 0:
                    client.sendfile(file, begin, size)
            with self._lock:
                self._taken.add((asked["name"], str(asked["client"])))


def fetch(
    address: str,
    token: str,
    name: str,
    target: Path,
    *,
    client: str,
    begin: int = 0,
    size: int = _WHOLE,
    timeout_seconds: float,
) -> None:
    """Writes bytes of a file that ``address`` serves into the new file ``target``.

    Args:
        address: "host:port" of a :class:`FileServer`.
        token: its.
        name: of the file there.
        target: made here.
        client: who asks.
        begin: of the bytes.
        size: their number; -1: up to the file's end.
        timeout_seconds: without any progress.

    Raises:
        OSError: the server is not there, has no such bytes, or ends before it has sent them.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout_seconds) as connection:
        asked = {"token": token, "name": name, "client": client, "begin": begin, "size": size}
        connection.sendall(json.dumps(asked).encode() + b"\n")
        (there,) = _SIZE.unpack(_exactly(connection, _SIZE.size, address))
        if there < 0:
            why = connection.recv(_LONGEST_REQUEST).decode(errors="replace")
            raise OSError(f"{address} does not give {name}: {why}")
        with target.open("xb") as file:
            if there > 0:
                os.posix_fallocate(file.fileno(), 0, there)
            buffer, left = memoryview(bytearray(min(max(there, 1), _BUFFER_BYTES))), there
            while left > 0:
                got = connection.recv_into(buffer[: min(left, len(buffer))])
                if got == 0:
                    raise OSError(f"{address} ended with {left} bytes of {name} left")
                file.write(buffer[:got])
                left -= got


def _line(connection: socket.socket) -> bytes:
    text = b""
    while not text.endswith(b"\n"):
        more = connection.recv(_LONGEST_REQUEST)
        if not more or len(text) > _LONGEST_REQUEST:
            raise ValueError("the request is no line")
        text += more
    return text


def _exactly(connection: socket.socket, size: int, address: str) -> bytes:
    text = b""
    while len(text) < size:
        more = connection.recv(size - len(text))
        if not more:
            raise OSError(f"{address} ended before it answered")
        text += more
    return text
