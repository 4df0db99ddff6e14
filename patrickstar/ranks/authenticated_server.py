"""A server for clients that know its key. Strangers get no answer, and can neither block nor exhaust it.

Until a client has proved to know the key, only its first message is read (72 bytes), for at most
:data:`HANDSHAKE_SECONDS`. At most :data:`MOST_STRANGERS` such connections are open; a further one ends the oldest.
After each stranger the server pauses for 2 ms, which bounds the CPU time of a flood.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from patrickstar.ranks.addresses import join_address
from patrickstar.ranks.authenticated import AuthenticatedConnection, answer_hello, read_hello

HANDSHAKE_SECONDS = 5.0
MOST_STRANGERS = 64
_FLOOD_PAUSE_SECONDS = 0.002
_NO_DESCRIPTORS_SECONDS = 0.05
_MOST_NONCES = 2**16


class AuthenticatedServer:
    """Serves each client in a thread, until :meth:`close`.

    Args:
        listening: a listening socket (``addresses.listen``); this object takes ownership.
        key: 32 bytes, which clients must know.
        serve: called with each client's connection; returns or raises an OSError at its end.
        most_bytes: limit of a message.
        name: of the threads.
    """

    def __init__(
        self,
        listening: socket.socket,
        key: bytes,
        serve: Callable[[AuthenticatedConnection], None],
        *,
        most_bytes: int,
        name: str,
    ):
        self._key, self._serve, self._most_bytes, self._name = key, serve, most_bytes, name
        self._lock = threading.Lock()
        self._strangers: OrderedDict[socket.socket, None] = OrderedDict()
        self._nonces: OrderedDict[bytes, None] = OrderedDict()
        self._clients: dict[AuthenticatedConnection, threading.Thread] = {}
        self._num_refused = 0
        self._is_closed = False
        self._socket = listening
        self.host, self.port = listening.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """``host:port`` for clients."""
        return join_address(self.host, self.port)

    def close(self, wait_seconds: float = 0.0) -> None:
        """Stops listening and ends all connections. Clients get ``wait_seconds`` to end by themselves."""
        with self._lock:
            self._is_closed = True
            strangers, serving = list(self._strangers), list(self._clients.values())
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._socket.close()
        for stranger in strangers:
            _end(stranger)
        deadline = time.monotonic() + wait_seconds
        for thread in serving:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0.0))
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            client.interrupt()

    def _accept(self) -> None:
        num_refused = 0
        while not self._is_closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_NO_DESCRIPTORS_SECONDS)
                continue
            self._note_stranger(connection)
            try:
                threading.Thread(target=self._greet, args=(connection,), name=self._name, daemon=True).start()
            except RuntimeError:  # the system has no thread left
                self._forget_stranger(connection)
                self._num_refused += 1
            if self._num_refused != num_refused:
                num_refused = self._num_refused
                time.sleep(_FLOOD_PAUSE_SECONDS)

    def _note_stranger(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers[connection] = None
            if len(self._strangers) <= MOST_STRANGERS:
                return
            oldest, _ = self._strangers.popitem(last=False)
        _end(oldest)  # the connection's thread closes it

    def _forget_stranger(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)
        connection.close()

    def _greet(self, connection: socket.socket) -> None:
        client: AuthenticatedConnection | None = None
        try:
            with contextlib.suppress(OSError):
                nonce = read_hello(connection, self._key, time.monotonic() + HANDSHAKE_SECONDS)
                if self._admit(connection, nonce):
                    client = answer_hello(connection, self._key, nonce, self._most_bytes)
                    with self._lock:
                        self._clients[client] = threading.current_thread()
                    if not self._is_closed:
                        self._serve(client)
        finally:
            with self._lock:
                if client is None:
                    self._num_refused += 1
                else:
                    self._clients.pop(client, None)
            self._forget_stranger(connection)

    def _admit(self, connection: socket.socket, nonce: bytes) -> bool:
        """Moves a client from the strangers to the clients. Returns False if its first message was replayed, or if its
        connection was ended as the oldest.
        """
        with self._lock:
            if nonce in self._nonces or self._strangers.pop(connection, connection) is not None:
                return False
            self._nonces[nonce] = None
            if len(self._nonces) > _MOST_NONCES:
                self._nonces.popitem(last=False)
            return True


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
