"""Failures of ranks: all ranks stop, and name the first at fault.

A failure spreads: ranks that miss the failed one fail in turn. So a failing rank posts a notice in torch's store before
it leaves; the first notice stays, and errors of all ranks quote it. A store of a run with a secret posts it for a
killed rank. Otherwise a rank that cannot post is named by a rank that misses it: at once if connections break, else by
the rank before it, which watches its heartbeat, within the timeout.

A heartbeat carries the rank's current call, and each new call sends one. Nothing breaks if a rank waits for another
that does something else (one has a batch more, or saves while the others train). The wait ends with the timeout, and
the error lists each rank's call. It does so too after a rank was killed.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch.distributed as dist

from patrickstar import _C
from patrickstar.ranks.authenticated_store import AuthenticatedStore


class DisagreementError(_C.StateError):
    """Ranks that must have the same value have different ones. Raised on all of them."""


T = TypeVar("T")
_CLOSED = "closed"
_BEAT_SECONDS = 0.5
_LEAST_BEAT_SECONDS = 0.02  # minimum between heartbeats, however fast calls follow each other
_GRACE_SECONDS = 2.0  # for the notice of a rank whose connections broke before it could post
# Without torchrun's agent the store ends with rank 0's process: a stopping rank waits so that others can read the
# notice. A store that PatrickStar serves lasts as long as the process, so the wait is at the process's end.
_LINGER_SECONDS = 3 * _BEAT_SECONDS
_STORE_ERRORS = (RuntimeError, OSError)


def own_connection(store: dist.Store, timeout_seconds: float) -> dist.Store:
    """A separate connection to the store below all prefixes of `store`, if the store has connections. A connection
    serves one call at a time, so one thread's wait would delay another's heartbeat.
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
    """The text of the first failure of a group of ranks, in torch's store. Thread-safe."""

    def __init__(self, store: dist.Store, key: str):
        self._store = store
        self._key = key

    def post(self, text: str) -> str:
        """Posts `text` unless there is a notice already; returns the notice in effect."""
        try:
            return self._store.compare_set(self._key, "", text).decode()
        except _STORE_ERRORS:
            return text

    def post_at_end(self, text: str) -> None:
        """Lets the store post `text` once this connection ends; empty: no more. Stores of PyTorch cannot."""
        if isinstance(self._store, AuthenticatedStore):
            self._store.set_at_end(self._key, text)

    def linger(self) -> None:
        """Keeps the store for other ranks that have not read the notice yet."""
        if isinstance(self._store, AuthenticatedStore):
            atexit.register(_sleep_until, time.monotonic() + _LINGER_SECONDS)
        else:
            time.sleep(_LINGER_SECONDS)

    def read(self) -> str | None:
        """The notice, or None. Raises RuntimeError if the store cannot be reached."""
        return self._store.get(self._key).decode() if self._store.check([self._key]) else None

    def wait(self, seconds: float) -> str | None:
        """Waits up to `seconds` for a notice; None without one, or if the store is gone."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(*_STORE_ERRORS):
            while True:
                text = self.read()
                if text is not None or time.monotonic() > deadline:
                    return text
                time.sleep(0.05)
        return None


class FailureWatch:
    """A thread that sends this rank's heartbeat, and stops its collectives when a rank has failed.

    It notices four failures: a posted notice, a missing heartbeat of the next rank, an error of a communicator, and a
    collective that takes longer than `timeout_seconds`. It then calls `stop_all` once. This rank is `members[index]`.
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
        """The first failure, once this thread knows it."""
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
        self._is_silent = False  # True once the store has given no answer
        self._asked_at: float | None = None  # when the thread's present calls of the store began
        with contextlib.suppress(*_STORE_ERRORS):  # the thread finds the store gone, too
            self.notice.post_at_end(f"rank {self._rank}'s process has ended; see its output")
        self._thread = threading.Thread(target=self._run, name="patrickstar-failure-watch", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch_store, name="patrickstar-store-watch", daemon=True).start()

    @property
    def activity(self) -> str:
        """This rank's current call; a change sends a heartbeat."""
        return self._activity

    @activity.setter
    def activity(self, activity: str) -> None:
        self._activity = activity
        self._news.set()

    def watch_also(self, communicator: _C.collective.Communicator) -> None:
        """Also watches a communicator that `stop_all` already covers."""
        self._communicators = (*self._communicators, communicator)
        if self.failure is not None:  # `stop_all` may have been called before
            communicator.abort()

    def announce(self, text: str) -> str:
        """Posts a failure of this rank, or of a missing one, which the other ranks have time to read. Returns the
        notice in effect.
        """

        def post() -> str:
            with contextlib.suppress(*_STORE_ERRORS):  # the thread may not have sent the last activity
                self._store.set(self._key(self._rank), f"0 {self.activity}")
            return self.failure or self.notice.post(text)

        first = self._ask(post, self.failure or text)
        if not self._is_silent:
            self.notice.linger()
        return first

    def await_notice(self) -> None:
        """Gives the notice of a rank that failed first a while to come."""
        self._ask(lambda: self.notice.wait(_GRACE_SECONDS), None)

    def activities(self) -> str:
        """Text with each rank's call at its last heartbeat; empty if the store is gone."""
        return self._ask(self._told_activities, "")

    def _told_activities(self) -> str:
        known = {self._rank: self.activity}
        with contextlib.suppress(*_STORE_ERRORS):
            for member in self._members:
                key = self._key(member)
                if member != self._rank and self._store.check([key]):
                    known[member] = self._store.get(key).decode().partition(" ")[2] or "closing"
        others = [f"rank {member} in {known[member]}" for member in sorted(known)]
        return f"; at that time: {', '.join(others)}" if len(known) > 1 else ""

    def stop(self) -> None:
        """Ends the thread and its connection; the previous rank no longer expects a heartbeat. Does nothing in a fork
        of the process.
        """
        if self._finished.is_set() or os.getpid() != self._process:
            return
        self._finished.set()
        self._news.set()
        if not self._is_silent:
            self._thread.join(_GRACE_SECONDS)
        self._ask(self._say_closed, None)
        self._communicators, self._stop_all = (), lambda: None
        self._store = self.notice._store = _NoStore()

    def _say_closed(self) -> None:
        with contextlib.suppress(*_STORE_ERRORS):
            self._store.set(self._key(self._rank), _CLOSED)
            self.notice.post_at_end("")

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/alive/{rank}"

    def _run(self) -> None:
        beat = 0
        while not self._finished.wait(_LEAST_BEAT_SECONDS):
            self._news.wait(min(_BEAT_SECONDS, self._timeout_seconds / 4))
            self._news.clear()
            beat += 1
            self._asked_at = time.monotonic()
            try:
                self._store.set(self._key(self._rank), f"{beat} {self.activity}")
                failure = self.notice.read() or self._own_finding()
            except _STORE_ERRORS as error:
                failure = f"torch's store cannot be reached ({first_line(error)}): rank 0 or torchrun's agent is gone"
            self._asked_at = None
            if failure is not None and not self._finished.is_set():
                self.failure = failure
                self._stop_all()
                return

    def _watch_store(self) -> None:
        """Stops all collectives if the store is silent: its host may be stopped, and then no call of it ends."""
        limit = self._timeout_seconds + _GRACE_SECONDS  # the thread may wait for a notice
        while not self._finished.wait(self._timeout_seconds / 4):
            asked_at = self._asked_at
            if self.failure is None and asked_at is not None and time.monotonic() - asked_at > limit:
                self.failure = f"torch's store gives no answer for {limit:g} s: rank 0 or torchrun's agent is stopped"
                self._is_silent = True
                self._stop_all()
                return

    def _ask(self, call: Callable[[], T], otherwise: T) -> T:
        """The result of ``call``, in a thread of its own; ``otherwise`` if it does not end, as calls of torch's store
        while its host is stopped.
        """
        if self._is_silent:
            return otherwise
        found = [otherwise]

        def ask() -> None:
            found[0] = call()

        thread = threading.Thread(target=ask, name="patrickstar-asks-store", daemon=True)
        thread.start()
        thread.join(_GRACE_SECONDS + _BEAT_SECONDS)
        self._is_silent = thread.is_alive()
        return found[0]

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
                # The main thread sees the error too, and knows better who is missing; on CUDA no other code may check.
                return self.notice.wait(_GRACE_SECONDS) or f"rank {self._rank}: {first_line(error)}"
            seconds = communicator.oldest_pending_seconds()
            if seconds > self._timeout_seconds:
                return f"rank {self._rank} in {self.activity}: a collective has not ended for {seconds:.0f} s"
        return None


def _sleep_until(deadline: float) -> None:
    time.sleep(max(deadline - time.monotonic(), 0.0))


class _NoStore:
    """Replaces a store that was released."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError("the groups are closed")


class Abortable(Protocol):
    """A communicator or control group."""

    def abort(self) -> None:
        """Aborts running operations on this rank; repeated calls do nothing."""
        ...


def abort_all(parts: Sequence[Abortable]) -> None:
    """Aborts all parts, each in its own thread, and returns when all are done.

    Serial aborts could deadlock. NCCL frees a communicator's memory on abort, for which CUDA waits until running
    kernels end. Another communicator's kernels may wait for the failed rank until they are aborted too.
    """
    threads = [threading.Thread(target=part.abort, name="patrickstar-abort", daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def is_interrupt(error: BaseException) -> bool:
    """True for errors that keep their type when all ranks' errors are combined: KeyboardInterrupt and others that are
    no ``Exception``, and exceptions of signal handlers (marked by ``session/interrupts.py``).
    """
    return not isinstance(error, Exception) or getattr(error, "raised_by_signal", False)


def is_lost_rank(error: BaseException) -> bool:
    """True for errors of calls in which another rank is missing: RankFailure, and those of torch.distributed."""
    is_ours = isinstance(error, (_C.RankFailure, dist.DistError))
    return is_ours or (type(error) is RuntimeError and "gloo" in str(error))


@contextlib.contextmanager
def connecting(rank: int) -> Iterator[None]:
    """Context in which a rank connects to others over gloo; its errors become RankFailure."""
    try:
        yield
    except RuntimeError as error:
        raise _C.RankFailure(
            f"rank {rank} could not connect to the others ({first_line(error)}); where ranks are on several nodes, "
            "GLOO_SOCKET_IFNAME must name the network interface that reaches them"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return next(iter(str(error).splitlines()), "")


@contextlib.contextmanager
def failing_together(watch: FailureWatch, rank: int, phase: str):
    """Context that posts failures inside to the other ranks. If another rank failed first, it raises RankFailure from
    the error; this rank's own errors pass unchanged.
    """
    try:
        yield
    except (DisagreementError, _C.RankMismatch):
        raise  # every rank raises it, and it names the ranks
    except Exception as error:
        if getattr(error, "on_all_ranks", False):  # a CheckpointError
            raise
        seen = watch.failure
        lost = isinstance(error, _C.RankFailure)
        doing = watch.activities() if lost else ""
        if lost and seen is None:
            watch.await_notice()
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
