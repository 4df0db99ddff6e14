"""Part of prove-flips: messages that the other side of a connection did not send next.

They were made with another secret, come from another connection or another turn, or come back to their sender.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from patrickstar.ranks import authenticated
from patrickstar.ranks.addresses import listen
from patrickstar.ranks.authenticated import HELLO_BYTES, MAGIC, AuthenticatedConnection, AuthenticationError
from proofs.cases import Case, Planted, Points, Setting, replaced

MOST_BYTES = 4096
TAG_BYTES = 32
SECONDS = 5.0
_MAKE_TAG, _MAKE_MESSAGE_TAG, _MAKE_KEYS = authenticated._tag, authenticated._message_tag, authenticated._session_keys


@contextlib.contextmanager
def connected(key: bytes, nonces: bytes) -> Iterator[tuple[AuthenticatedConnection, AuthenticatedConnection]]:
    """Both sides of a connection after a handshake with these nonces (64 bytes)."""
    up, down = authenticated._session_keys(key, nonces)
    client, server = socket.socketpair()
    with client, server:
        yield (
            AuthenticatedConnection(client, up, down, MOST_BYTES),
            AuthenticatedConnection(server, down, up, MOST_BYTES),
        )


def sent(sender: AuthenticatedConnection, receiver: AuthenticatedConnection, content: bytes) -> bytes:
    """The bytes of a message, which the receiver does not get."""
    sender.send(content)
    return receiver._socket.recv(MOST_BYTES)


def exchange(sender: AuthenticatedConnection, receiver: AuthenticatedConnection, content: bytes) -> None:
    """Sends a message that must arrive."""
    sender.send(content)
    assert receiver.receive(SECONDS) == content


def taken(sender: AuthenticatedConnection, receiver: AuthenticatedConnection, data: bytes, what: str) -> str | None:
    """A complaint unless ``receiver`` refuses the bytes ``data``, which come from ``sender``'s end."""
    sender._socket.sendall(data)
    try:
        receiver.receive(SECONDS)
    except AuthenticationError:
        return None
    return f"{what}: the message is taken"


def content(chooser: random.Random) -> bytes:
    """A message's body."""
    return chooser.randbytes(chooser.randrange(1, 300))


def under_another_secret(setting: Setting) -> Points:
    """Points: clients, servers and messages with a secret that differs from the run's in a bit."""
    chooser = random.Random(setting.seed)
    with listen("127.0.0.1", 0) as listening, ThreadPoolExecutor(1) as pool:
        while True:
            key, bit = chooser.randbytes(32), chooser.randrange(256)
            other = (int.from_bytes(key, "big") ^ 1 << bit).to_bytes(32, "big")
            setting.note(f"bit {bit} of the secret")
            client = pool.submit(greeted, listening.getsockname(), other)
            yield None if not hears(listening, key) else f"bit {bit}: the server hears a client of another secret"
            client.result()
            client = pool.submit(greeted, listening.getsockname(), key)
            impersonate(listening, other)
            yield f"bit {bit}: the client trusts a server of another secret" if client.result() else None
            nonces = chooser.randbytes(64)
            with connected(other, nonces) as (stranger, away), connected(key, nonces) as (sender, receiver):
                yield taken(sender, receiver, sent(stranger, away, content(chooser)), f"bit {bit}")


def greeted(address: tuple[str, int], key: bytes) -> bool:
    """Returns True if a client with this secret accepts the listener's answer."""
    try:
        authenticated._connect_once(*address, key, SECONDS, MOST_BYTES).close()
    except AuthenticationError:
        return False
    return True


def hears(listening: socket.socket, key: bytes) -> bool:
    """Returns True if a server with this secret accepts the next client's hello."""
    connection, _ = listening.accept()
    with connection:
        try:
            authenticated.read_hello(connection, key, time.monotonic() + SECONDS)
        except AuthenticationError:
            return False
        return True


def impersonate(listening: socket.socket, key: bytes) -> None:
    """Answers any client, with the tag of another secret."""
    connection, _ = listening.accept()
    with connection:
        hello = connection.recv(HELLO_BYTES, socket.MSG_WAITALL)
        authenticated.answer_hello(connection, key, hello[len(MAGIC) : -TAG_BYTES], MOST_BYTES)


def replayed(setting: Setting) -> Points:
    """Points: messages at another one's turn, and at their own turn on a later connection."""
    chooser = random.Random(setting.seed)
    while True:
        key, earlier, later = chooser.randbytes(32), chooser.randbytes(64), chooser.randbytes(64)
        contents = [content(chooser) for _ in range(chooser.randrange(2, 6))]
        turn, other = chooser.sample(range(len(contents)), 2)
        swapped = chooser.choice((tuple, reversed))
        for nonces, number, where in ((earlier, other, "the same"), (later, turn, "another")):
            with connected(key, earlier) as recorded:
                messages = [sent(*swapped(recorded), each) for each in contents]
            what = f"message {number} of {len(contents)} at turn {turn}, {where} connection"
            setting.note(what)
            with connected(key, nonces) as ends:
                sender, receiver = swapped(ends)
                for each in contents[:turn]:
                    exchange(sender, receiver, each)
                yield taken(sender, receiver, messages[number], what)


def reflected(setting: Setting) -> Points:
    """Points: messages that come back to their sender, who expects one of the same number."""
    chooser = random.Random(setting.seed)
    while True:
        with connected(chooser.randbytes(32), chooser.randbytes(64)) as ends:
            sender, receiver = chooser.sample(ends, 2)
            turn = chooser.randrange(4)
            setting.note(f"message {turn} comes back")
            for _ in range(turn):
                exchange(sender, receiver, content(chooser))
                exchange(receiver, sender, content(chooser))
            yield taken(receiver, sender, sent(sender, receiver, content(chooser)), f"message {turn} comes back")


SECRET, REPLAYED, REFLECTED = "messages under another secret", "messages replayed", "messages reflected"
CASES = (Case(SECRET, under_another_secret), Case(REPLAYED, replayed), Case(REFLECTED, reflected))


def without_secret(key: bytes, label: bytes, nonces: bytes) -> bytes:
    """A handshake's tag that needs no secret."""
    return _MAKE_TAG(bytes(32), label, nonces)


def without_counter(key: bytes, number: int, body: bytes | memoryview) -> bytes:
    """The tag of the first message."""
    return _MAKE_MESSAGE_TAG(key, 0, body)


def without_nonces(key: bytes, nonces: bytes) -> tuple[bytes, bytes]:
    """Keys that all connections of a run share."""
    return _MAKE_KEYS(key, bytes(64))


def without_direction(key: bytes, nonces: bytes) -> tuple[bytes, bytes]:
    """One key for both directions."""
    up, _ = _MAKE_KEYS(key, nonces)
    return up, up


def planted() -> Iterator[Planted]:
    """Parts that are left out of a message's tag."""
    yield Planted("the secret is not part of the tag", SECRET, lambda: replaced(authenticated, "_tag", without_secret))
    yield Planted(
        "the counter is not part of the tag", REPLAYED, lambda: replaced(authenticated, "_message_tag", without_counter)
    )
    yield Planted(
        "nonces are not part of the tag", REPLAYED, lambda: replaced(authenticated, "_session_keys", without_nonces)
    )
    yield Planted(
        "the direction is not part of the tag",
        REFLECTED,
        lambda: replaced(authenticated, "_session_keys", without_direction),
    )
