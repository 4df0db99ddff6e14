"""The rendezvous of old ranks and joining processes: a ``torch.distributed`` store that outlives them, and answers only
processes with the run's secret (``ranks/authenticated_store.py``, docs/trust.md).

    store = serve_rendezvous("127.0.0.1", 29600)      # the process that starts the others, for the run's lifetime
    rendezvous = Rendezvous.at("127.0.0.1:29600")     # each process

Old rank 0 leads. A joining process announces itself and waits. The leader picks as many as it needs, sends each an
invitation, reads their answers, and decides. The decision is one key that is written once (:meth:`Rendezvous.decide`).
Until it is written old ranks keep all their data; once it says "resize", there is no way back.

A waiting process watches the heartbeat of the process it waits for (``heartbeats.py``).
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import socket
import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from patrickstar import _C
from patrickstar.elastic.heartbeats import BEAT_SECONDS, Heartbeat, Life, beating
from patrickstar.ranks.addresses import LOOPBACK, join_address, listen, listening_address, split_address
from patrickstar.ranks.authenticated_store import AuthenticatedStore, ServedStore
from patrickstar.ranks.failures import first_line
from patrickstar.ranks.messages import reading
from patrickstar.ranks.run_secret import (
    SECRET_VARIABLE,
    RunSecret,
    default_secret_file,
    find_secret_file,
    read_secret,
    write_secret,
)

ADDRESS_VARIABLE = "PATRICKSTAR_ELASTIC"
"""The environment variable that names the store, "host:port"."""
_PREFIX = "patrickstar/elastic"
REFUSAL = "refusal"
"""Key of a message that replaces an invitation and carries the reason for the refusal."""
_POLL_SECONDS = 0.005
CONNECT_SECONDS = 60.0
_PURPOSE = "rendezvous"
_READY = "ready"


class ResizeError(_C.StateError):
    """The ranks were not changed. All old ranks raise it and can go on unchanged; a joining process cannot join."""

    on_all_ranks = True


class Decision(enum.Enum):
    """Decisions about a resize."""

    RESIZE = "resize"
    STAY = "stay"


class ServedRendezvous(ServedStore):
    """The store of a rendezvous; it lives as long as this object, in the process that starts the others and is no rank.

    Args:
        listening: a listening socket; this object takes ownership.
        secret: the run's secret.
        secret_file: the file with the secret, which processes of the run read; None: the starting process writes it.
    """

    def __init__(self, listening: socket.socket, secret: RunSecret, secret_file: Path | None = None):
        super().__init__(listening, secret.key(_PURPOSE), timeout_seconds=CONNECT_SECONDS)
        self.secret_file = secret_file

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for a process of the run on this machine."""
        own = {} if self.secret_file is None else {SECRET_VARIABLE: str(self.secret_file)}
        return {ADDRESS_VARIABLE: self.address, **own}


def serve_rendezvous(
    host: str = LOOPBACK, port: int = 0, *, secret_file: str | os.PathLike[str] | None = None
) -> ServedRendezvous:
    """Serves the rendezvous of one run, as long as the returned store is kept.

    Args:
        host: address, name or network interface of this machine to listen at, by which the other processes reach it.
            Loopback serves processes of this machine alone.
        port: 0 for a free one (the store's ``port``).
        secret_file: file with the run's secret. If absent, a new one is written, and removed with the store. None: that
            of ``PATRICKSTAR_ELASTIC_SECRET``, else a new one in ``~/.patrickstar/elastic``, where processes of this
            user find it.

    Raises:
        ValueError: ``host`` is unknown, or stands for all interfaces.
        SecretError: the file is another user's or open to other users, or cannot be written.
        OSError: the port is taken.
    """
    listening = listen(listening_address(host), port)
    try:
        address, port = listening.getsockname()[:2]
        path = find_secret_file(address, port, secret_file)
        if path == default_secret_file(address, port):
            path.unlink(missing_ok=True)  # left by a process that was killed, since this process has the port now
        is_new = not path.exists()
        store = ServedRendezvous(listening, write_secret(path) if is_new else read_secret(path), path)
    except BaseException:
        listening.close()
        raise
    if is_new:
        weakref.finalize(store, path.unlink, missing_ok=True)
    return store


def run_secret_at(address: str | None) -> RunSecret:
    """The secret of the run whose rendezvous is at an address; None: the address in ``PATRICKSTAR_ELASTIC``.

    Raises:
        ValueError: the address is missing or malformed.
        SecretError: the file of the run's secret is missing or refused.
    """
    return _place_of(address, None)[2]


def _place_of(address: str | None, secret_file: str | os.PathLike[str] | None) -> tuple[str, int, RunSecret]:
    address = os.environ.get(ADDRESS_VARIABLE) if address is None else address
    try:
        host, port = split_address(address or "")
        path = find_secret_file(host, port, secret_file)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"the rendezvous is {address!r} ({error}); give host:port of patrickstar.elastic.serve_rendezvous, or set "
            f"{ADDRESS_VARIABLE} to it"
        ) from error
    return host, port, read_secret(path)


class Rendezvous:
    """One process's connection to the store. For one thread."""

    def __init__(self, store: AuthenticatedStore, secret: RunSecret):
        self._base = store
        self._store = dist.PrefixStore(_PREFIX, store)
        self.secret = secret
        """The run's secret."""

    @classmethod
    def at(
        cls,
        address: str | None = None,
        *,
        secret_file: str | os.PathLike[str] | None = None,
        timeout_seconds: float = CONNECT_SECONDS,
    ) -> Rendezvous:
        """Connects to the rendezvous at an address.

        Args:
            address: "host:port"; None: that of the environment's ``PATRICKSTAR_ELASTIC``.
            secret_file: as given to :func:`serve_rendezvous`.
            timeout_seconds: for the connection.

        Raises:
            ValueError: the address is missing or malformed.
            SecretError: the file of the run's secret is missing or refused.
            RankFailure: no server is there, or it has another secret.
        """
        host, port, secret = _place_of(address, secret_file)
        try:
            return cls(AuthenticatedStore(host, port, secret.key(_PURPOSE), timeout_seconds=timeout_seconds), secret)
        except OSError as error:
            raise _C.RankFailure(
                f"no rendezvous of this run is reached at {join_address(host, port)} ({first_line(error)})"
            ) from error

    @property
    def store(self) -> AuthenticatedStore:
        """This process's connection, for keys of other code."""
        return self._base

    @property
    def host(self) -> str:
        """The host by which this process reaches the store."""
        return self._base.host

    def await_key(
        self, key: str, *, beating: str, timeout_seconds: float = float("inf"), whom: str = "the rank that leads"
    ) -> str:
        """Waits for a key of :attr:`store` as long as the heartbeat ``beating`` continues (:meth:`beating`). Returns
        its value.

        Raises:
            ResizeError: the heartbeat has stopped, or the timeout has passed.
        """
        return self._wait(self._base, key, beating, timeout_seconds, whom)

    def await_any(self, keys: Mapping[str, str], timeout_seconds: float) -> set[str]:
        """Waits until each of some processes has set its key of :attr:`store`, or is gone.

        Args:
            keys: by the name of the process's heartbeat.
            timeout_seconds: in all.

        Returns:
            names of those that have set their keys.

        Raises:
            ResizeError: one lives and has not set its key within the timeout, or the store is gone.
        """
        deadline = time.monotonic() + timeout_seconds
        try:
            heartbeats = {name: Heartbeat(self._base, name) for name in keys}
            while True:
                there = {name for name, key in keys.items() if self._base.check([key])}
                living = [name for name in keys.keys() - there if heartbeats[name].look() is not Life.ENDED]
                if not living:
                    return there
                if time.monotonic() > deadline:
                    raise ResizeError(f"process {living[0]}: no word within {timeout_seconds:g} s, and it lives")
                time.sleep(10 * _POLL_SECONDS)
        except dist.DistError as error:
            raise ResizeError(f"the rendezvous' store is gone ({first_line(error)})") from error

    # The leader.

    def gather(self, num_joining: int, timeout_seconds: float) -> dict[int, dict[str, Any]]:
        """Waits for so many joining processes with heartbeats; returns their descriptions, by number. The store refuses
        them if this process ends before it has invited them.

        Raises:
            ResizeError: they did not arrive within the timeout, or one has ended before.
        """
        deadline = time.monotonic() + timeout_seconds
        heartbeats: dict[int, Heartbeat] = {}
        alive: list[int] = []
        while len(alive) < num_joining:
            if time.monotonic() > deadline:
                raise ResizeError(
                    f"{num_joining} processes were to join and {len(alive)} came within {timeout_seconds:g} s; start "
                    "them with patrickstar.elastic.join, or resize to fewer ranks"
                )
            alive, ended = [], []
            for number in range(1, self._store.add("announced", 0) + 1):
                if self._store.check([f"taken/{number}"]):
                    continue
                if number not in heartbeats:
                    heartbeats[number] = Heartbeat(self._base, number)
                if self._store.check([f"ended/{number}"]):
                    ended.append(number)
                elif heartbeats[number].look() is Life.BEATING and self._store.check([f"member/{number}"]):
                    alive.append(number)
            for number in ended:
                self.withdraw(number)
            if ended and len(alive) < num_joining:
                raise ResizeError(f"process {ended[0]} that was to join: its process has ended; see its output")
            time.sleep(_POLL_SECONDS)
        chosen = alive[:num_joining]
        for number in chosen:
            self._store.set(f"taken/{number}", "1")
            self._base.set_at_end(f"{_PREFIX}/invitation/{number}", _refusal("the rank that leads has ended"))
        with reading("a process that joins"):
            return {number: dict(json.loads(self._store.get(f"member/{number}"))) for number in chosen}

    def invite(self, number: int, invitation: Mapping[str, Any]) -> None:
        """Sends a joining process its invitation."""
        self._store.set(f"invitation/{number}", json.dumps(invitation))

    def send_away(self, numbers: Iterable[int], why: str) -> None:
        """Refuses those of some joining processes that were not invited. A store that is gone is no error."""
        with contextlib.suppress(dist.DistError):
            for number in numbers:
                self._store.compare_set(f"invitation/{number}", "", _refusal(why))

    def send_all_away(self, why: str) -> None:
        """Refuses all joining processes that wait now and that no leader has gathered."""
        with contextlib.suppress(dist.DistError):
            numbers = range(1, self._store.add("announced", 0) + 1)
            waiting = [number for number in numbers if not self._store.check([f"taken/{number}"])]
            for number in waiting:
                self._store.set(f"taken/{number}", "1")
            self.send_away(waiting, why)

    def await_at_work(self, numbers: Iterable[int], timeout_seconds: float) -> None:
        """Waits until all invited processes have begun (:meth:`begin`); limits and errors are those of
        :meth:`answers`.
        """
        self._await_all("begun", numbers, timeout_seconds)

    def answers(self, numbers: Iterable[int], timeout_seconds: float) -> None:
        """Waits until all invited processes are ready, for ``timeout_seconds`` in all.

        Raises:
            ResizeError: one refuses, with its reason, or is gone.
        """
        self._await_all("answer", numbers, timeout_seconds)

    def _await_all(self, key: str, numbers: Iterable[int], timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        for number in numbers:
            left = max(deadline - time.monotonic(), 0.0)
            said = self._wait(self._store, f"{key}/{number}", number, left, f"process {number} that joins")
            if said != _READY:
                raise ResizeError(f"process {number} cannot join: {said}")

    def decide(self, token: str, decision: Decision) -> Decision:
        """Writes the decision; the first writer decides. Returns the decision in effect."""
        return Decision(self._store.compare_set(f"decision/{token}", "", decision.value).decode())

    # A joining process.

    def announce(self) -> int:
        """Announces a joining process; returns its number. It must start a heartbeat (:meth:`beating`)."""
        number = self._store.add("announced", 1)
        self._base.set_at_end(f"{_PREFIX}/ended/{number}", "1")
        return number

    def arrive(self, number: int, description: Mapping[str, Any]) -> None:
        """An announced process is ready for an invitation."""
        self._store.set(f"member/{number}", json.dumps(description))

    def withdraw(self, number: int) -> None:
        """An announced process joins no resize any more. A store that is gone is no error."""
        with contextlib.suppress(dist.DistError):
            self._store.set(f"taken/{number}", "1")

    def invitation(self, number: int, timeout_seconds: float) -> dict[str, Any]:
        """Waits for the invitation.

        Raises:
            ResizeError: none came within the timeout.
        """
        text = self._wait(self._store, f"invitation/{number}", None, timeout_seconds, "the ranks that train")
        with reading("an invitation"):
            return dict(json.loads(text))

    def begin(self, number: int) -> None:
        """Tells the leader that this process has its invitation and notices if others end."""
        self._store.set(f"begun/{number}", _READY)

    def answer(self, number: int, problem: str | None) -> None:
        """Answers the invitation; ``problem`` None means ready."""
        for key in ("begun", "answer"):
            self._store.set(f"{key}/{number}", problem or _READY)

    def decision(self, token: str, timeout_seconds: float) -> Decision:
        """Waits for the decision.

        Raises:
            ResizeError: the leader is gone, or the timeout has passed.
        """
        return Decision(self._wait(self._store, f"decision/{token}", token, timeout_seconds, "the rank that leads"))

    # Both.

    def beating(self, name: int | str, every_seconds: float = BEAT_SECONDS) -> contextlib.AbstractContextManager[None]:
        """Context with a heartbeat thread, for a joining process's number, a leader's token, or a rank's process."""
        return beating(self._base, name, every_seconds)

    def _wait(self, store: dist.Store, key: str, heartbeat: int | str | None, timeout_seconds: float, whom: str) -> str:
        deadline = time.monotonic() + timeout_seconds
        try:
            watched = None if heartbeat is None else Heartbeat(self._base, heartbeat)
            while not store.check([key]):
                if watched is not None and watched.look() is Life.ENDED and not store.check([key]):
                    raise ResizeError(f"{whom}: its process has ended, or is cut off; see its output")
                if time.monotonic() > deadline:
                    raise ResizeError(f"{whom}: no word within {timeout_seconds:g} s")
                time.sleep(_POLL_SECONDS)
            return store.get(key).decode()
        except dist.DistError as error:
            raise ResizeError(f"the rendezvous' store is gone ({first_line(error)})") from error


def _refusal(why: str) -> str:
    return json.dumps({REFUSAL: why})
