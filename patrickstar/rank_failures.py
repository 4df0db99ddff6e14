"""What ranks tell each other when one of them fails, so that all stop and name the first at fault.

[Note: first at fault] A failure spreads: the ranks that miss one fail in turn, and others miss them. So whoever fails
posts a notice in torch's store before it leaves, the first notice stays, and errors of all ranks quote it. A rank that
cannot post (killed, or stuck) is named by the rank that misses it: at once where its connections break, else by the
rank before it, which watches its heartbeat, within the timeout.

[Note: the store's server] Without torchrun's agent the store ends with rank 0's process. So a rank that stops lingers
until the others' watches have had time to read why.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from patrickstar import _C


class DisagreementError(_C.StateError):
    """Ranks that must have the same value have different ones. Raised on all of them."""


_CLOSED = "closed"
_BEAT_SECONDS = 0.5
_GRACE_SECONDS = 2.0  # for the notice of a rank whose connections broke before it could post
_LINGER_SECONDS = 3 * _BEAT_SECONDS  # [Note: the store's server] for the other ranks' watches to read the notice
_STORE_ERRORS = (RuntimeError, OSError)


def own_connection(store: dist.Store, timeout_seconds: float) -> dist.Store:
    """What is below all prefixes of `store`, through a connection of its own where the store has connections.

    A client of a TCPStore serves one call at a time, and a wait of one thread would keep another's heartbeat back.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        timeout = datetime.timedelta(seconds=timeout_seconds)
        store = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout)
    return store


class FailureNotice:
    """The text of the first failure of a group of ranks, in torch's store. Any thread."""

    def __init__(self, store: dist.Store, key: str):
        self._store = store
        self._key = key

    def post(self, text: str) -> str:
        """Leaves `text` unless there is a notice already; returns the notice that stands."""
        try:
            return self._store.compare_set(self._key, "", text).decode()
        except _STORE_ERRORS:
            return text

    def read(self) -> str | None:
        """The notice, or None. Raises RuntimeError when the store cannot be reached."""
        return self._store.get(self._key).decode() if self._store.check([self._key]) else None

    def wait(self, seconds: float) -> str | None:
        """The notice as soon as there is one; None when there is none after `seconds` or the store is gone."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(*_STORE_ERRORS):
            while True:
                text = self.read()
                if text is not None or time.monotonic() > deadline:
                    return text
                time.sleep(0.05)
        return None


class FailureWatch:
    """A thread that shows this rank alive and stops its collectives when a rank has failed.

    It notices a posted failure, a rank after this one whose heartbeat stops, an error of a communicator, and a
    collective that takes longer than `timeout_seconds`; then `stop_all` is called once, from the thread. This rank is
    `members[index]`.
    """

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        index: int,
        members: Sequence[int],
        communicators: Sequence[_C.collective.Communicator],
        stop_all: Callable[[], None],
        timeout_seconds: float,
    ):
        self.notice = FailureNotice(store, f"{prefix}/failure")
        self.failure: str | None = None
        """The first failure as soon as this thread knows it."""
        self._store = store
        self._rank = members[index]
        self._next_rank = members[(index + 1) % len(members)]
        self._own_key = f"{prefix}/alive/{self._rank}"
        self._next_key = f"{prefix}/alive/{self._next_rank}"
        self._communicators = communicators
        self._stop_all = stop_all
        self._timeout_seconds = timeout_seconds
        self._last_beat: bytes = b""
        self._last_beat_at = time.monotonic()
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._run, name="patrickstar-failure-watch", daemon=True)
        self._thread.start()

    def announce(self, text: str) -> str:
        """Posts a failure of this rank, or of one it misses; returns the notice that stands when others know it."""
        first = self.failure or self.notice.post(text)
        time.sleep(_LINGER_SECONDS)
        return first

    def stop(self) -> None:
        """Ends the thread; the rank before this one no longer expects a heartbeat."""
        if self._finished.is_set():
            return
        self._finished.set()
        self._thread.join(_GRACE_SECONDS)
        with contextlib.suppress(*_STORE_ERRORS):
            self._store.set(self._own_key, _CLOSED)
        self._communicators, self._stop_all = (), lambda: None  # NCCL's must not last until the interpreter ends

    def _run(self) -> None:
        beat = 0
        while not self._finished.wait(min(_BEAT_SECONDS, self._timeout_seconds / 4)):
            beat += 1
            try:
                self._store.set(self._own_key, str(beat))
                failure = self.notice.read() or self._own_finding()
            except _STORE_ERRORS as error:
                failure = f"torch's store cannot be reached ({first_line(error)}): rank 0 or torchrun's agent is gone"
            if failure is not None and not self._finished.is_set():
                self.failure = failure
                self._stop_all()
                return

    def _own_finding(self) -> str | None:
        finding = self._missing_heartbeat() or self._failed_collective()
        return None if finding is None else self.notice.post(f"{finding} (seen by rank {self._rank})")

    def _missing_heartbeat(self) -> str | None:
        now = time.monotonic()
        beat = self._store.get(self._next_key) if self._store.check([self._next_key]) else b""
        if beat != self._last_beat or beat == _CLOSED.encode():
            self._last_beat, self._last_beat_at = beat, now
        if now - self._last_beat_at <= self._timeout_seconds:
            return None
        return f"rank {self._next_rank} has given no sign of life for {self._timeout_seconds:g} s"

    def _failed_collective(self) -> str | None:
        for communicator in self._communicators:
            try:
                communicator.check()
            except RuntimeError as error:
                # The main thread has it too, and knows better who is missing; on CUDA nobody else may ever look.
                return self.notice.wait(_GRACE_SECONDS) or f"rank {self._rank}: {first_line(error)}"
            seconds = communicator.oldest_pending_seconds()
            if seconds > self._timeout_seconds:
                return f"a collective of rank {self._rank} has not ended for {seconds:.0f} s"
        return None


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return next(iter(str(error).splitlines()), "")


@contextlib.contextmanager
def failing_together(watch: FailureWatch, rank: int, phase: str):
    """Posts what goes wrong inside, and makes an error that another rank has caused name that rank.

    Raises RankFailure, caused by the error, when another rank was first; an error of this rank's own goes on as it is.
    """
    try:
        yield
    except DisagreementError:
        raise  # all ranks have it, and it names them
    except Exception as error:
        seen = watch.failure
        lost = isinstance(error, _C.RankFailure)
        if lost and seen is None:
            watch.notice.wait(_GRACE_SECONDS)
        own = f"rank {rank}: {first_line(error) if lost else f'{type(error).__name__}: {first_line(error)}'} ({phase})"
        first = watch.announce(own)
        if not lost and seen is None:
            raise
        reason = first_line(error) if first == own else first
        raise _C.RankFailure(f"rank {rank} stops in {phase}, because a rank has failed: {reason}") from error
    except BaseException as error:  # an interrupt, sys.exit
        watch.announce(f"rank {rank}: {type(error).__name__} ({phase})")
        raise
