"""TCP connections with mutual authentication by a shared key, and a tag on each message.

All tags are HMAC-SHA256. The client speaks first, and a server answers only to clients that know the key:

    client   MAGIC, its nonce (32 random bytes), tag(key, "client" + its nonce)
    server   its nonce, tag(key, "server" + both nonces)

Each direction then has its own session key, ``tag(key, direction + both nonces)``, and each message is

    length of the body (4 bytes, big endian), tag(session key, number of the message + length + body), body

So a message cannot be forged without the key, replayed (numbers and nonces differ), or reflected (directions have
different keys). Bodies are not encrypted. A length over the limit is refused before memory is allocated.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import time

from patrickstar.ranks.addresses import join_address

MAGIC = b"PSTAR\x00\x00\x01"
_NONCE_BYTES = _TAG_BYTES = 32
HELLO_BYTES = len(MAGIC) + _NONCE_BYTES + _TAG_BYTES
_LENGTH = struct.Struct(">I")
_NUMBERED = struct.Struct(">QI")  # message number and body length
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.01, 0.5
_MOST_REFUSALS = 5
# seconds, seconds, tries
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))


class AuthenticationError(ConnectionError):
    """The other side does not know the key, or a message was not sent by it."""


class _ClosedError(AuthenticationError):
    """The server closed the connection without an answer."""


class AuthenticatedConnection:
    """One side of a connection after its handshake. For one thread at a time.

    Args:
        connection: a socket; this object takes ownership.
        sends, receives: session keys of both directions.
        most_bytes: limit of a message's body, in both directions.
    """

    def __init__(self, connection: socket.socket, sends: bytes, receives: bytes, most_bytes: int):
        self._socket = connection
        self._sends, self._receives = sends, receives
        self._num_sent = self._num_received = 0
        self._most_bytes = most_bytes

    def send(self, body: bytes | memoryview, timeout_seconds: float | None = None) -> None:
        """Sends a message. Without a timeout it waits until the other side takes it.

        Raises:
            ValueError: the body is over the limit.
            OSError: the other side is gone, or the timeout has passed.
        """
        if len(body) > self._most_bytes:
            raise ValueError(f"a message of {len(body)} bytes; the limit is {self._most_bytes}")
        tag = _message_tag(self._sends, self._num_sent, body)
        self._num_sent += 1
        self._socket.settimeout(timeout_seconds)
        self._socket.sendall(_LENGTH.pack(len(body)) + tag)
        self._socket.sendall(body)

    def receive(self, timeout_seconds: float | None = None) -> bytes:
        """Receives the next message, without a timeout if it is None.

        Raises:
            AuthenticationError: the message is not the other side's next one, or is over the limit.
            OSError: the other side is gone, or the timeout has passed.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        head = _read(self._socket, _LENGTH.size + _TAG_BYTES, deadline)
        (length,) = _LENGTH.unpack_from(head)
        if length > self._most_bytes:
            raise AuthenticationError(f"a message of {length} bytes came; the limit is {self._most_bytes}")
        body = _read(self._socket, length, deadline)
        if not hmac.compare_digest(head[_LENGTH.size :], _message_tag(self._receives, self._num_received, body)):
            raise AuthenticationError("a message came that the other side of this connection has not sent")
        self._num_received += 1
        return body

    def interrupt(self) -> None:
        """Makes another thread's call here raise an OSError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()


def connect(
    host: str, port: int, key: bytes, *, timeout_seconds: float, most_bytes: int, waits: bool = True
) -> AuthenticatedConnection:
    """Connects to a server that knows ``key``.

    Args:
        host: name or address.
        port: of the server.
        key: 32 bytes.
        timeout_seconds: for all attempts.
        most_bytes: limit of a message.
        waits: retry until a server listens. A connection closed by the server is retried a few times in any case: a
            server ends the oldest ones if strangers open many.

    Raises:
        AuthenticationError: the server does not know the key, or does not accept this client.
        OSError: no server listens.
    """
    deadline, pause, refusals = time.monotonic() + timeout_seconds, _FIRST_RETRY_SECONDS, 0
    while True:
        try:
            return _connect_once(host, port, key, max(deadline - time.monotonic(), 0.001), most_bytes)
        except _ClosedError:
            refusals += 1
            if refusals >= _MOST_REFUSALS or time.monotonic() + pause > deadline:
                raise
        except (AuthenticationError, socket.gaierror):
            raise
        except OSError:
            if not waits or time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _LAST_RETRY_SECONDS)


def _connect_once(host: str, port: int, key: bytes, timeout_seconds: float, most_bytes: int) -> AuthenticatedConnection:
    deadline = time.monotonic() + timeout_seconds
    connection = socket.create_connection((host, port), timeout_seconds)
    try:
        _set_options(connection)
        ours = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(MAGIC + ours + _tag(key, b"client", ours))
        try:
            answer = _read(connection, _NONCE_BYTES + _TAG_BYTES, deadline)
        except TimeoutError:
            raise
        except OSError as error:
            raise _ClosedError(
                f"{join_address(host, port)} closed the connection: this process has another secret than the run"
            ) from error
        theirs, tag = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(tag, _tag(key, b"server", ours + theirs)):
            raise AuthenticationError(f"whoever listens at {join_address(host, port)} does not know the run's secret")
        connection.settimeout(None)
        up, down = _session_keys(key, ours + theirs)
        return AuthenticatedConnection(connection, up, down, most_bytes)
    except BaseException:
        connection.close()
        raise


def read_hello(connection: socket.socket, key: bytes, deadline: float) -> bytes:
    """The nonce of a client that has proved to know ``key``; for a connection just accepted.

    Raises:
        OSError: the client does not know the key, or has not proved it before the deadline.
    """
    hello = _read(connection, HELLO_BYTES, deadline)
    theirs, tag = hello[len(MAGIC) : -_TAG_BYTES], hello[-_TAG_BYTES:]
    if not hello.startswith(MAGIC) or not hmac.compare_digest(tag, _tag(key, b"client", theirs)):
        raise AuthenticationError("a stranger")
    return theirs


def answer_hello(connection: socket.socket, key: bytes, theirs: bytes, most_bytes: int) -> AuthenticatedConnection:
    """The server's part of the handshake, after :func:`read_hello`."""
    _set_options(connection)
    ours = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(ours + _tag(key, b"server", theirs + ours))
    connection.settimeout(None)
    up, down = _session_keys(key, theirs + ours)
    return AuthenticatedConnection(connection, down, up, most_bytes)


def _session_keys(key: bytes, nonces: bytes) -> tuple[bytes, bytes]:
    return _tag(key, b"client to server", nonces), _tag(key, b"server to client", nonces)


def _tag(key: bytes, label: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, label + b"\x00" + nonces, hashlib.sha256)


def _message_tag(key: bytes, number: int, body: bytes | memoryview) -> bytes:
    tag = hmac.new(key, _NUMBERED.pack(number, len(body)), hashlib.sha256)
    tag.update(body)
    return tag.digest()


def _read(connection: socket.socket, num_bytes: int, deadline: float | None) -> bytes:
    """Reads exactly so many bytes; the deadline covers all of them."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        if deadline is None:
            connection.settimeout(None)
        elif (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
        else:
            raise TimeoutError("the other side was too slow")
        got = connection.recv_into(view)
        if got == 0:
            raise ConnectionError("the other side has closed the connection")
        view = view[got:]
    return bytes(data)


def _set_options(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
