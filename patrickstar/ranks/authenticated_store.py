"""A ``torch.distributed`` store that serves only processes with the run's secret; a ``TCPStore`` serves any process
that reaches its port.

    served = ServedStore(listen("127.0.0.1", 0), key, timeout_seconds=60)     # one process, for the store's lifetime
    store = AuthenticatedStore("127.0.0.1", served.port, key, timeout_seconds=60)     # each process

[Note: references to stores] PyTorch's C++ objects (groups, ``PrefixStore``) call methods of these Python objects, but
hold no reference to them. Code that passes a store to them must keep it alive as long as they are used.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from patrickstar import _C
from patrickstar.ranks.addresses import join_address
from patrickstar.ranks.authenticated import AuthenticatedConnection, connect
from patrickstar.ranks.authenticated_server import AuthenticatedServer

MOST_BYTES = 64 * 2**20
"""Limit of a request or an answer."""
_ABSENT, _PRESENT = b"\x00", b"\x01"
_WAIT_SLICE_SECONDS = 1.0  # after which a server's thread notices that its client is gone
_SIZE = struct.Struct(">I")
_Base: Any = dist.Store if dist.is_available() else object


class _Request(enum.IntEnum):
    SET = 1
    GET = 2
    CHECK = 3
    ADD = 4
    COMPARE_SET = 5
    DELETE = 6
    WAIT = 7
    COUNT = 8
    SET_AT_END = 9


def _pack(parts: Sequence[bytes]) -> bytes:
    return b"".join(_SIZE.pack(len(part)) + part for part in parts)


def _unpack(data: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(data):
        (size,) = _SIZE.unpack_from(data, at)
        at += _SIZE.size
        if at + size > len(data):
            raise ValueError("a part is cut off")
        parts.append(data[at : at + size])
        at += size
    return parts


class _Table:
    """The store's keys and values. Thread-safe."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._changed = threading.Condition()

    def serve(self, client: AuthenticatedConnection) -> None:
        """Answers a client's requests until the connection ends."""
        at_end: dict[bytes, bytes] = {}
        try:
            while True:
                body = client.receive()
                try:
                    request, *parts = _unpack(body)
                    answer = self._answer(_Request(request[0]), parts, at_end)
                except (ValueError, TypeError, LookupError, struct.error) as error:
                    raise ConnectionError("a request of another version") from error
                client.send(_pack(answer))
        finally:
            with self._changed:
                for key, value in at_end.items():
                    if value:
                        self._values.setdefault(key, value)
                self._changed.notify_all()

    def _answer(self, request: _Request, parts: list[bytes], at_end: dict[bytes, bytes]) -> list[bytes]:
        with self._changed:
            match request:
                case _Request.SET:
                    key, value = parts
                    self._values[key] = value
                    self._changed.notify_all()
                    return []
                case _Request.GET:
                    (key,) = parts
                    return [_ABSENT] if key not in self._values else [_PRESENT, self._values[key]]
                case _Request.CHECK:
                    return [_PRESENT if all(key in self._values for key in parts) else _ABSENT]
                case _Request.ADD:
                    key, amount = parts
                    self._values[key] = b"%d" % (int(self._values.get(key, b"0")) + int(amount))
                    self._changed.notify_all()
                    return [self._values[key]]
                case _Request.COMPARE_SET:
                    key, expected, desired = parts
                    if self._values.get(key, b"") == expected:
                        self._values[key] = desired
                        self._changed.notify_all()
                    return [self._values.get(key, expected)]
                case _Request.DELETE:
                    (key,) = parts
                    return [_ABSENT if self._values.pop(key, None) is None else _PRESENT]
                case _Request.WAIT:
                    milliseconds, reason, *keys = parts
                    self._changed.wait_for(
                        lambda: reason in self._values or all(key in self._values for key in keys),
                        min(int(milliseconds), 1000) / 1000,
                    )
                    return [_PRESENT if all(key in self._values for key in keys) else _ABSENT]
                case _Request.COUNT:
                    return [b"%d" % len(self._values)]
                case _Request.SET_AT_END:
                    key, value = parts
                    at_end[key] = value
                    return []


class AuthenticatedStore(_Base):
    """A client of a :class:`ServedStore`. Thread-safe; one request at a time.

    Args:
        host: name or address of the server.
        port: its port.
        key: 32 bytes, the server's.
        timeout_seconds: for the connection, and for :meth:`get` and :meth:`wait`.
        waits: for a server that begins to listen later.

    Raises:
        OSError: no server is there, or it has another key.
    """

    def __init__(self, host: str, port: int, key: bytes, *, timeout_seconds: float, waits: bool = True):
        super().__init__()
        self.host, self.port = host, port
        self._key, self._timeout_seconds = key, timeout_seconds
        self._reason = ""
        self._lock = threading.RLock()
        self._is_asking = False
        self._process = os.getpid()
        self._is_lost = False
        self.set_timeout(datetime.timedelta(seconds=timeout_seconds))
        self._connection: AuthenticatedConnection | None = self._connect(timeout_seconds, waits)

    @property
    def address(self) -> str:
        """``host:port`` for clients."""
        return join_address(self.host, self.port)

    def other_connection(self, timeout_seconds: float) -> AuthenticatedStore:
        """Opens another connection to the same store.

        Raises:
            OSError: the server is gone.
        """
        return AuthenticatedStore(self.host, self.port, self._key, timeout_seconds=timeout_seconds, waits=False)

    def close(self) -> None:
        """Closes this process's connection; further calls fail."""
        with self._lock:
            self._is_lost = True
            self._drop()

    # The interface of torch.distributed.Store.

    def set(self, key: str, value: str | bytes) -> None:
        """Sets a key's value."""
        self._ask(_Request.SET, key, value)

    def get(self, key: str) -> bytes:
        """Waits for a key and returns its value."""
        is_there, *value = self._ask(_Request.GET, key)
        if is_there == _ABSENT:
            self.wait([key])
            is_there, *value = self._ask(_Request.GET, key)
        return value[0]

    def check(self, keys: Sequence[str]) -> bool:
        """True if all of these keys exist."""
        return self._ask(_Request.CHECK, *keys)[0] == _PRESENT

    def add(self, key: str, amount: int) -> int:
        """Adds to a key's number, initially 0, and returns the sum."""
        return int(self._ask(_Request.ADD, key, str(amount))[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Sets a key's value if it is the expected one, or if the key is absent and "" is expected. Returns the
        resulting value.
        """
        return self._ask(_Request.COMPARE_SET, key, expected, desired)[0]

    def delete_key(self, key: str) -> bool:
        """Removes a key; False if it was absent."""
        return self._ask(_Request.DELETE, key)[0] == _PRESENT

    def num_keys(self) -> int:
        """Number of keys."""
        return int(self._ask(_Request.COUNT)[0])

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Waits until all of these keys exist.

        Raises:
            DistStoreError: some are absent after the timeout, or :meth:`end_waits_at` ends the wait.
        """
        seconds = self._timeout_seconds if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        while True:
            left = max(min(deadline - time.monotonic(), _WAIT_SLICE_SECONDS), 0.0)
            if self._ask(_Request.WAIT, str(int(1000 * left)), self._reason, *keys)[0] == _PRESENT:
                return
            if self._reason and self.check([self._reason]):
                raise dist.DistStoreError(self.get(self._reason).decode())
            if time.monotonic() >= deadline:
                raise dist.DistStoreError(f"{', '.join(keys)} did not come within {seconds:g} s")

    # Beyond that interface.

    def set_at_end(self, key: str, value: str) -> None:
        """Lets the server set a key, if it is absent, once this connection ends, as it does when this process is
        killed. An empty value takes an earlier one back.
        """
        self._ask(_Request.SET_AT_END, key, value)

    def end_waits_at(self, key: str) -> None:
        """Ends waits of this object as soon as that key exists. Its value is the reason."""
        self._reason = key

    def _ask(self, request: _Request, *parts: str | bytes) -> list[bytes]:
        if os.getpid() != self._process:
            raise _C.StateError(
                f"this process is a fork of one that is connected to the store at {self.address}, and must not use its "
                "connection; start it as a process of its own"
            )
        body = _pack([bytes([request]), *(part.encode() if isinstance(part, str) else bytes(part) for part in parts)])
        with self._lock:
            if self._is_asking:  # a signal handler sends a request within a request
                with contextlib.closing(self.other_connection(self._timeout_seconds)) as other:
                    return other._ask(request, *parts)
            self._is_asking = True
            try:
                if self._is_lost:
                    raise ConnectionError("it was lost before")
                if self._connection is None:
                    self._connection = self._connect(self._timeout_seconds, False)
                self._connection.send(body, self._timeout_seconds)
                return _unpack(self._connection.receive(self._timeout_seconds))
            except OSError as error:
                self._is_lost = True
                self._drop()
                raise dist.DistNetworkError(f"the store at {self.address} cannot be reached: {error}") from error
            # raised by a signal handler: a later answer on this connection would belong to this request
            except BaseException:
                self._drop()
                raise
            finally:
                self._is_asking = False

    def _connect(self, timeout_seconds: float, waits: bool) -> AuthenticatedConnection:
        return connect(
            self.host, self.port, self._key, timeout_seconds=timeout_seconds, most_bytes=MOST_BYTES, waits=waits
        )

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class ServedStore(AuthenticatedStore):
    """The store itself, and this process's connection to it. It ends with :meth:`close`, or with this object.

    Args:
        listening: a listening socket (``addresses.listen``); this object takes ownership.
        key: 32 bytes, which clients must know.
        timeout_seconds: of :meth:`get` and :meth:`wait`.
    """

    def __init__(self, listening: socket.socket, key: bytes, *, timeout_seconds: float):
        server = AuthenticatedServer(listening, key, _Table().serve, most_bytes=MOST_BYTES, name="patrickstar-store")
        self._stop = weakref.finalize(self, server.close)
        super().__init__(server.host, server.port, key, timeout_seconds=timeout_seconds)

    def close(self) -> None:
        """Ends the store for all processes."""
        super().close()
        self._stop()
