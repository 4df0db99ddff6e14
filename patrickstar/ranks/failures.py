"""What ranks tell each other when one of them fails, so that all stop and name the first at fault.

[Note: first at fault] A failure spreads: the ranks that miss one fail in turn, and others miss them. So whoever fails
posts a notice in torch's store before it leaves, the first notice stays, and errors of all ranks quote it. A rank that
cannot post (killed, or stuck) is named by the rank that misses it: at once where its connections break, else by the
rank before it, which watches its heartbeat, within the timeout.

[Note: the store's server] Without torchrun's agent the store ends with rank 0's process. So a rank that stops lingers
until the others' watches have had time to read why.

[Note: what each rank was doing] A heartbeat carries the call that its rank is in, and each new call sends one. Where
one rank waits for another that does something else (one has a batch more, or saves while the others train), nothing
breaks, and the wait ends with the timeout: the error then says what each of them was doing. So it does after a rank was
killed.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist

from patrickstar import _C
from patrickstar.ranks.authenticated_store import AuthenticatedStore


class DisagreementError(_C.StateError):
    """Ranks that must have the same value have different ones. Raised on all of them."""


_CLOSED = "closed"
_BEAT_SECONDS = 0.5
_LEAST_BEAT_SECONDS = 0.02  # between heartbeats, however fast calls follow each other
_GRACE_SECONDS = 2.0  # for the notice of a rank whose connections broke before it could post
_LINGER_SECONDS = 3 * _BEAT_SECONDS  # [Note: the store's server] for the other ranks' watches to read the notice
_STORE_ERRORS = (RuntimeError, OSError)


def own_connection(store: dist.Store, timeout_seconds: float) -> dist.Store:
    """What is below all prefixes of `store`, through a connection of its own where the store has connections.

    A client of a store serves one call at a time, and a wait of one thread would keep another's heartbeat back.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, (dist.TCPStore, AuthenticatedStore)):
        return store
    timeout, host, port = datetime.timedelta(seconds=timeout_seconds), store.host, store.port
    try:
        if isinstance(store, AuthenticatedStore):
            return store.other_connection(timeout_seconds)
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except (RuntimeError, OSError) as error:
        raise _C.RankFailure(
            f"torch's store at {host}:{port} did not answer within {timeout_seconds:g} s ({first_line(error)}): "
            "rank 0 or torchrun's agent is gone or busy"
        ) from error


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
        stop_all: Callable[[], None],
        timeout_seconds: float,
    ):
        self.notice = FailureNotice(store, f"{prefix}/failure")
        self.failure: str | None = None
        """The first failure as soon as this thread knows it."""
        self._store = store
        self._rank = members[index]
        self._next_rank = members[(index + 1) % len(members)]
        self._communicators: tuple[_C.collective.Communicator, ...] = ()
        self._stop_all = stop_all
        self._timeout_seconds = timeout_seconds
        self._members = tuple(members)
        self._prefix = prefix
        self._activity = "opening the groups"
        self._last_beat: bytes = b""
        self._last_beat_at = time.monotonic()
        self._process = os.getpid()
        self._finished = threading.Event()
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name="patrickstar-failure-watch", daemon=True)
        self._thread.start()

    @property
    def activity(self) -> str:
        """The call that this rank is in; the others are told when it changes."""
        return self._activity

    @activity.setter
    def activity(self, activity: str) -> None:
        self._activity = activity
        self._news.set()

    def watch_also(self, communicator: _C.collective.Communicator) -> None:
        """From now on for errors, and collectives that do not end. `stop_all` stops it as well by now."""
        self._communicators = (*self._communicators, communicator)
        if self.failure is not None:  # `stop_all` may have been called before
            communicator.abort()

    def announce(self, text: str) -> str:
        """Posts a failure of this rank, or of one it misses; returns the notice that stands when others know it."""
        with contextlib.suppress(*_STORE_ERRORS):  # the thread may not have come to it
            self._store.set(self._key(self._rank), f"0 {self.activity}")
        first = self.failure or self.notice.post(text)
        time.sleep(_LINGER_SECONDS)
        return first

    def activities(self) -> str:
        """What each rank was doing at its last heartbeat ([Note: what each rank was doing]); empty where the store is
        gone.
        """
        known = {self._rank: self.activity}
        with contextlib.suppress(*_STORE_ERRORS):
            for member in self._members:
                key = self._key(member)
                if member != self._rank and self._store.check([key]):
                    known[member] = self._store.get(key).decode().partition(" ")[2] or "closing"
        others = [f"rank {member} in {known[member]}" for member in sorted(known)]
        return f"; at that time: {', '.join(others)}" if len(known) > 1 else ""

    def stop(self) -> None:
        """Ends the thread and its connection; the rank before this one no longer expects a heartbeat. Nothing in a fork
        of the process, which has only copies of them.
        """
        if self._finished.is_set() or os.getpid() != self._process:
            return
        self._finished.set()
        self._news.set()
        self._thread.join(_GRACE_SECONDS)
        with contextlib.suppress(*_STORE_ERRORS):
            self._store.set(self._key(self._rank), _CLOSED)
        self._communicators, self._stop_all = (), lambda: None
        self._store = self.notice._store = _NoStore()

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/alive/{rank}"

    def _run(self) -> None:
        beat = 0
        while not self._finished.wait(_LEAST_BEAT_SECONDS):
            self._news.wait(min(_BEAT_SECONDS, self._timeout_seconds / 4))
            self._news.clear()
            beat += 1
            try:
                self._store.set(self._key(self._rank), f"{beat} {self.activity}")
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
        next_key = self._key(self._next_rank)
        beat = self._store.get(next_key) if self._store.check([next_key]) else b""
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
                return f"rank {self._rank} in {self.activity}: a collective has not ended for {seconds:.0f} s"
        return None


class _NoStore:
    """In the place of a store that was let go of."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError("the groups are closed")


class Abortable(Protocol):
    """A communicator, or a group for agreement."""

    def abort(self) -> None:
        """Ends what runs in it, on this rank; more than once is once."""
        ...


def abort_all(parts: Sequence[Abortable]) -> None:
    """[Note: aborted at once] Aborts all parts and returns when all are, each in a thread of its own: NCCL frees a
    communicator's memory when it is aborted, for which CUDA waits until kernels on the GPU have ended, those of another
    communicator too, which wait for the rank that is gone until theirs is aborted as well.
    """
    threads = [threading.Thread(target=part.abort, name="patrickstar-abort", daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def is_interrupt(error: BaseException) -> bool:
    """True for errors that keep their type where errors of all ranks are gathered: KeyboardInterrupt and others that
    are no ``Exception``, and exceptions of signal handlers (marked by ``engine/interrupts.py``).
    """
    return not isinstance(error, Exception) or getattr(error, "raised_by_signal", False)


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
    except (DisagreementError, _C.RankMismatch):
        raise  # all ranks have it, and it names them
    except Exception as error:
        if getattr(error, "on_all_ranks", False):  # a CheckpointError
            raise
        seen = watch.failure
        lost = isinstance(error, _C.RankFailure)
        doing = watch.activities() if lost else ""
        if lost and seen is None:
            watch.notice.wait(_GRACE_SECONDS)
        own = f"rank {rank}: {first_line(error) if lost else f'{type(error).__name__}: {first_line(error)}'} ({phase})"
        first = watch.announce(own)
        if is_interrupt(error) or (not lost and seen is None):
            raise
        reason = first_line(error) if first == own else first
        raise _C.RankFailure(f"rank {rank} stops in {phase}, because a rank has failed: {reason}{doing}") from error
    except BaseException as error:  # an interrupt, sys.exit
        if getattr(error, "on_all_ranks", False):
            raise
        watch.announce(f"rank {rank}: {type(error).__name__} ({phase})")
        raise
