"""Heartbeats of processes, through the rendezvous' store.

    with beating(store, "a"):                     # one process
        ...
    heartbeat = Heartbeat(store, "a")             # another one
    if heartbeat.look() is Life.ENDED: ...

A process that is killed has ended at once, since the store notices the end of its connection. One whose machine is cut
off has ended when no heartbeat has come for five seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import threading
import time
import uuid
from collections.abc import Iterator

from patrickstar.ranks.authenticated_store import AuthenticatedStore

SILENCE_SECONDS = 5.0  # allows for a loaded machine
BEAT_SECONDS = 0.05
_CONNECT_SECONDS = 60.0
_PREFIX = "patrickstar/heartbeats"


class Life(enum.Enum):
    """State of a process, as its heartbeat shows it."""

    AWAITED = "no heartbeat since the watch began, less than five seconds ago"
    BEATING = "a heartbeat within the last five seconds"
    ENDED = "its heartbeat has ended"


class Heartbeat:
    """The heartbeat of another process, as it is seen here.

    Args:
        store: the rendezvous' store.
        name: of the heartbeat.
    """

    def __init__(self, store: AuthenticatedStore, name: int | str):
        self._store, self._key = store, f"{_PREFIX}/{name}"
        self._last, self._last_at = self._read(), time.monotonic()
        self._life = Life.AWAITED

    def look(self) -> Life:
        """The process's state now. A later heartbeat of the same name counts again.

        Raises:
            DistError: the store is gone.
        """
        beat, now = self._read(), time.monotonic()
        if beat != self._last:
            self._last, self._last_at, self._life = beat, now, Life.BEATING
        if now - self._last_at > SILENCE_SECONDS or (beat and self._store.check([_end_key(beat.split()[0].decode())])):
            return Life.ENDED
        return self._life

    def _read(self) -> bytes:
        return self._store.get(self._key) if self._store.check([self._key]) else b""


@contextlib.contextmanager
def beating(store: AuthenticatedStore, name: int | str, every_seconds: float = BEAT_SECONDS) -> Iterator[None]:
    """Context with a thread that sends a heartbeat, over a connection of its own.

    Raises:
        OSError: the store is gone.
    """
    connection = store.other_connection(_CONNECT_SECONDS)
    own = uuid.uuid4().hex  # of several processes with one name, one after another, each ends for itself
    connection.set_at_end(_end_key(own), "1")
    connection.set(f"{_PREFIX}/{name}", f"{own} 0")
    over = threading.Event()

    def run() -> None:
        count = 0
        with contextlib.suppress(RuntimeError):  # the store is gone: a waiter raises the error
            while not over.wait(every_seconds):
                count += 1
                connection.set(f"{_PREFIX}/{name}", f"{own} {count}")

    thread = threading.Thread(target=run, name="patrickstar-rendezvous", daemon=True)
    thread.start()

    def stop() -> None:
        over.set()
        thread.join(SILENCE_SECONDS)

    # A script may end within the context, and a thread must not run when the interpreter ends.
    atexit.register(stop)
    try:
        yield
    finally:
        atexit.unregister(stop)
        stop()
        connection.close()


def _end_key(process: str) -> str:
    return f"{_PREFIX}/ended/{process}"
