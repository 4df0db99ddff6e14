"""The store in which the ranks of one world meet: torchrun's, rank 0's, or one made by a resize.

There is one store per process and address, which lasts as long as the process. With a store per engine, a faster rank
could reach one that is about to end. Each world made of a store has its own prefix.

A store of a future world tells who has ended or given up: all waits in it fail at once.

A store that PatrickStar serves for a run with a secret answers that run's processes alone (authenticated_store.py). A
``TCPStore`` answers any process that reaches its port. Rank 0 serves one if there is no secret, on loopback alone if
``MASTER_ADDR`` is there; torchrun serves one on all interfaces.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from patrickstar import _C
from patrickstar.ranks.addresses import is_loopback, listen, listening_address, resolved
from patrickstar.ranks.authenticated_store import AuthenticatedStore, ServedStore
from patrickstar.ranks.failures import first_line
from patrickstar.ranks.run_secret import SECRET_VARIABLE, read_secret

MOVED = "patrickstar/moved"
"""Prefix of the keys with which the ranks of a future world arrive in it."""
_GIVEN_UP = f"{MOVED}/missing"
"""Key for the process of a future world that has ended or given up, and why."""

_stores: dict[tuple[str, int], dist.Store] = {}
_num_worlds: dict[tuple[str, int], int] = {}
"""Worlds that this process has made of each store."""


def attempt() -> str:
    """Number of times that torchrun has restarted the run."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def world_store(rank: int, timeout: datetime.timedelta) -> dist.Store:
    """An unused prefix for one world in the store at the environment's ``MASTER_ADDR`` and ``MASTER_PORT``.

    Raises:
        RankFailure: the store is not reached within the timeout, or cannot be served.
        SecretError: the file of the run's secret is refused.
    """
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if address not in _stores:
        _stores[address] = _first_store(*address, rank, timeout)
    _num_worlds[address] = _num_worlds.get(address, 0) + 1
    return dist.PrefixStore(f"attempt_{attempt()}/world_{_num_worlds[address]}", _stores[address])


def _first_store(host: str, port: int, rank: int, timeout: datetime.timedelta) -> dist.Store:
    """The store that env:// would make, without its wait for all ranks."""
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not agent_hosts
    secret_file = "" if agent_hosts else os.environ.get(SECRET_VARIABLE, "")
    try:
        if secret_file:
            key = read_secret(Path(secret_file)).key(f"first world, attempt {attempt()}")
            seconds = timeout.total_seconds()
            if serves:
                return ServedStore(listen(listening_address(host), port), key, timeout_seconds=seconds)
            return AuthenticatedStore(host, port, key, timeout_seconds=seconds)
        options = {"master_listen_fd": listen(resolved(host), port).detach()} if serves and is_loopback(host) else {}
        return dist.TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=timeout, **options)
    except (RuntimeError, OSError, ValueError) as error:
        if isinstance(error, _C.StateError):
            raise
        owner = "torchrun's agent" if agent_hosts else "rank 0"
        raise _C.RankFailure(
            f"rank {rank} could not reach torch's store, which {owner} serves at {host}:{port}, within "
            f"{timeout.total_seconds():g} s ({first_line(error)}); did rank 0 start, and is MASTER_ADDR right?"
        ) from error


def serve_world(host: str, key: bytes, timeout_seconds: float) -> int:
    """Serves the store of a future world, of which this process will be rank 0, and returns the port. Ranks that arrive
    early find it. If the world is not made, call :func:`forget_world`.

    Args:
        host: the IP address to listen at.
        key: 32 bytes, which all ranks of that world have.
        timeout_seconds: for values of other ranks.

    Raises:
        RankFailure: no store can be served there.
    """
    try:
        store = ServedStore(listen(host, 0), key, timeout_seconds=timeout_seconds)
    except OSError as error:
        raise _C.RankFailure(f"no store can be served at {host} ({first_line(error)})") from error
    store.end_waits_at(_GIVEN_UP)
    _stores[host, store.port] = store
    return store.port


def reach_world(host: str, port: int, key: bytes, timeout_seconds: float, whom: str) -> dist.Store:
    """The store of a future world. Unless this process serves it, the first call connects to the process that does so
    by :func:`serve_world`. Its waits fail at once if one of the processes that have called this ends.

    Args:
        host: of the serving process.
        port: of the store.
        key: 32 bytes, which all ranks of that world have.
        timeout_seconds: for values of other ranks.
        whom: names this process in errors of others.

    Raises:
        RankFailure: the store is not there any more.
    """
    if (host, port) in _stores:
        return _stores[host, port]
    try:
        store = AuthenticatedStore(host, port, key, timeout_seconds=timeout_seconds, waits=False)
        store.end_waits_at(_GIVEN_UP)
        store.set_at_end(_GIVEN_UP, f"{whom} has ended; see its output")
    except (OSError, dist.DistError) as error:
        raise _C.RankFailure(f"the store of the new ranks at {host}:{port} is not reached ({error})") from error
    _stores[host, port] = store
    return store


@contextlib.contextmanager
def giving_up(host: str, port: int, whom: str) -> Iterator[None]:
    """Context that ends the waits of all others in the store of a future world if it raises."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(dist.DistError, KeyError):
            why = f"{whom} has given up: {type(error).__name__}: {first_line(error)}"
            _stores[host, port].compare_set(_GIVEN_UP, "", why)
        raise


def forget_world(host: str, port: int) -> None:
    """Leaves the store of a future world that this process does not enter; ends it if this process serves it."""
    store = _stores.pop((host, port), None)
    if isinstance(store, AuthenticatedStore):
        with contextlib.suppress(OSError, dist.DistError):
            store.set_at_end(_GIVEN_UP, "")
            store.close()
