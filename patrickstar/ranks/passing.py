"""Communicators of processes that have no world in common: for as long as something passes between them, or to begin
a world with.

    with passing_communicator("a resize", place, device, make_room, timeout_seconds=60) as communicator:
        exchange(communicator, [(sends, receives), ...], device, timeout_seconds=60)

    connected = connect_ahead("a resize", place, device, make_room, timeout_seconds=60)
    exchange(connected.scatter, [(sends, receives), ...], device, timeout_seconds=60)
    ranks = open_ranks(..., connected=connected)

Nothing of torch.distributed's world is used or made, so that processes may be in worlds of their own meanwhile. They
meet in a store that one of them serves. A process that does not come, or goes, is an OSError here, and no RankFailure:
nobody's ranks have failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch
import torch.distributed as dist

from patrickstar import _C
from patrickstar.ranks.addresses import gloo_on_loopback
from patrickstar.ranks.authenticated_store import AuthenticatedStore
from patrickstar.ranks.chunk_communicators import ChunkCommunicators, wait_for
from patrickstar.ranks.failures import first_line

PeerBytes = tuple[int, int, int]
"""The other's rank, an address, and bytes."""
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassingPlace:
    """Of one of the processes."""

    rank: int
    """Among them."""
    size: int
    """How many they are."""
    host: str
    """Where their store is served."""
    port: int
    key: bytes = dataclasses.field(repr=False)
    """The store's: 32 bytes."""


def prepare_to_pass(device: torch.device) -> None:
    """What a process can do before others come: NCCL takes most of a second for its first communicator, in which it
    looks at the machine and loads its kernels.
    """
    if device.type == "cuda":
        alone = _C.collective.make_nccl_communicator(
            _C.collective.make_nccl_id(), rank=0, size=1, device=device.index or 0
        )
        alone.close()


@contextlib.contextmanager
def passing_communicator(
    name: str, place: PassingPlace, device: torch.device, meanwhile: Callable[[], object], *, timeout_seconds: float
) -> Iterator[_C.collective.Communicator]:
    """All processes enter with the same ``name``, which they have not used before in this store. It is closed at the
    end, for which nobody waits: what has passed must have been waited for (:func:`exchange`).

    Args:
        name: see above.
        place: of this process.
        device: of this process.
        meanwhile: is called while processes are connected.
        timeout_seconds: for all to come.

    Raises:
        OSError: not all have come within ``timeout_seconds``, or are not reached.
    """
    with contextlib.ExitStack() as connections:
        (communicator,) = _connect(name, ["all"], place, device, meanwhile, connections, timeout_seconds)
        yield communicator


def connect_ahead(
    name: str, place: PassingPlace, device: torch.device, meanwhile: Callable[[], object], *, timeout_seconds: float
) -> ChunkCommunicators:
    """What these processes need for chunks when they are the ranks of one world, each with its rank in ``place``. NCCL
    connects both at the same time, and takes half of what it takes one after the other.

    Args, raises: of :func:`passing_communicator`.
    """
    with contextlib.ExitStack() as connections:
        both = _connect(name, ["gather", "scatter"], place, device, meanwhile, connections, timeout_seconds)
        return ChunkCommunicators(*both, connections.pop_all())


def _connect(
    name: str,
    uses: Sequence[str],
    place: PassingPlace,
    device: torch.device,
    meanwhile: Callable[[], object],
    connections: contextlib.ExitStack,
    timeout_seconds: float,
) -> list[_C.collective.Communicator]:
    """A communicator for each use, which ``connections`` will end."""
    timeout = datetime.timedelta(seconds=timeout_seconds)
    with _connecting(name, place):
        store = AuthenticatedStore(place.host, place.port, place.key, timeout_seconds=timeout_seconds)
    connections.callback(store.close)  # [Note: references to stores]
    stores = {use: dist.PrefixStore(f"patrickstar/passing/{name}/{use}", store) for use in uses}
    if device.type == "cuda":
        return _nccl(name, stores, place, device, meanwhile, connections, timeout_seconds)
    meanwhile()
    return [connections.enter_context(_gloo(name, use, one, place, timeout)) for use, one in stores.items()]


@contextlib.contextmanager
def _connecting(name: str, place: PassingPlace) -> Iterator[None]:
    """What the store, gloo and NCCL raise is an OSError."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise OSError(f"the {place.size} processes of {name} were not connected: {first_line(error)}") from error


def _nccl(
    name: str,
    stores: Mapping[str, dist.Store],
    place: PassingPlace,
    device: torch.device,
    meanwhile: Callable[[], object],
    connections: contextlib.ExitStack,
    timeout_seconds: float,
) -> list[_C.collective.Communicator]:
    begun = []
    for store in stores.values():
        with _connecting(name, place):
            if place.rank == 0:
                store.set("id", _C.collective.make_nccl_id())
            made = bytes(store.get("id"))
        connect = functools.partial(
            _C.collective.make_nccl_communicator, made, rank=place.rank, size=place.size, device=device.index
        )
        begun.append(_begin(connect))
    meanwhile()
    communicators = []
    for connected in begun:
        with _connecting(name, place):
            communicators.append(connected(timeout_seconds))
        connections.callback(communicators[-1].close)
    return communicators


@contextlib.contextmanager
def _gloo(
    name: str, use: str, store: dist.Store, place: PassingPlace, timeout: datetime.timedelta
) -> Iterator[_C.collective.Communicator]:
    group = dist.ProcessGroup(store, place.rank, place.size)
    with _connecting(name, place), gloo_on_loopback(place.host):
        backend = dist.ProcessGroupGloo(store, place.rank, place.size, timeout=timeout)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_default_backend(kind)
    group_name = f"{name}/{use}"
    group._set_group_name(group_name)
    registry = torch._C._distributed_c10d
    registry._register_process_group(group_name, group)
    try:
        communicator = _C.collective.make_c10d_communicator(group_name)
        try:
            yield communicator
        finally:
            communicator.abort()  # its threads end, whatever the others do
            communicator.close()
    finally:
        registry._unregister_process_group(group_name)


def _begin(call: Callable[[], _T]) -> Callable[[float], _T]:
    """Runs ``call``, which nothing ends where another process does not come, in a thread. What is returned gives what
    it gives within so many seconds, or raises TimeoutError; the thread is left behind then.
    """
    found: Future[_T] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name="patrickstar-passing", daemon=True).start()
    return found.result


def exchange(
    communicator: _C.collective.Communicator,
    messages: Sequence[tuple[Sequence[PeerBytes], Sequence[PeerBytes]]],
    device: torch.device,
    *,
    timeout_seconds: float,
) -> None:
    """Sends and receives one batch after another; all has arrived, and nothing is read any more, when this returns.

    Args:
        communicator: of processes that all call this with as many batches.
        messages: of each batch, what goes and what comes, in device memory of ``device``; what two processes send each
            other is matched in the order of their lists.
        device: of this process.
        timeout_seconds: for all of it.

    Raises:
        RankFailure: another process is gone, or not all came within ``timeout_seconds``; the communicator is aborted.
    """
    context = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with context:
        for sends, receives in messages:
            communicator.exchange(sends, receives)
        if device.type == "cuda":
            wait_for([communicator], device, timeout_seconds)
