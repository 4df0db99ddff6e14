"""Communicators between processes of different worlds: temporary ones, or the first ones of a new world.

    with passing_communicator("a resize", place, device, make_room, timeout_seconds=60) as communicator:
        exchange(communicator, [(sends, receives), ...], device, timeout_seconds=60)

    connected = connect_ahead("a resize", place, device, make_room, timeout_seconds=60)
    exchange(connected.scatter, [(sends, receives), ...], device, timeout_seconds=60)
    ranks = open_ranks(..., connected=connected)

torch.distributed's world is neither used nor made, so processes may be in worlds of their own. They meet in the store
of a future world (``world_store.serve_world``). A process that does not arrive, or leaves, raises OSError here and no
RankFailure: no rank of a world has failed.
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
from patrickstar.ranks.chunk_communicators import ChunkCommunicators, wait_for
from patrickstar.ranks.failures import first_line
from patrickstar.ranks.world_store import reach_world

PeerBytes = tuple[int, int, int]
"""The other's rank, an address, and bytes."""
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassingPlace:
    """A process's rank among those that communicate, and their store, that of a future world."""

    rank: int
    """Rank among the processes."""
    size: int
    """Number of processes."""
    host: str
    """Host that serves their store."""
    port: int
    key: bytes = dataclasses.field(repr=False)
    """The store's key: 32 bytes."""


def prepare_to_pass(device: torch.device) -> None:
    """Initialises NCCL before others arrive. Its first communicator takes most of a second, to inspect the machine and
    load kernels.
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
    """A temporary communicator. All processes must enter with the same ``name``, new in this store. It is closed at the
    end without waiting: finish all transfers first (:func:`exchange`).

    Args:
        name: names the communicator.
        place: of this process.
        device: of this process.
        meanwhile: called while processes connect.
        timeout_seconds: for all to arrive.

    Raises:
        OSError: some did not arrive within ``timeout_seconds``, or cannot be reached.
    """
    with contextlib.ExitStack() as connections:
        (communicator,) = _connect(name, ["all"], place, device, meanwhile, connections, timeout_seconds)
        yield communicator


def connect_ahead(
    name: str, place: PassingPlace, device: torch.device, meanwhile: Callable[[], object], *, timeout_seconds: float
) -> ChunkCommunicators:
    """Opens the communicators for chunks of processes that will be the ranks of one world, each with its rank in
    ``place``. NCCL connects both concurrently, in half the time.

    Arguments and errors are those of :func:`passing_communicator`.
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
    """One communicator per use; ``connections`` closes them."""
    timeout = datetime.timedelta(seconds=timeout_seconds)
    with _connecting(name, place):
        whom = f"process {place.rank} of {place.size}"
        store = reach_world(place.host, place.port, place.key, timeout_seconds, whom)  # kept until it is forgotten
    stores = {use: dist.PrefixStore(f"patrickstar/passing/{name}/{use}", store) for use in uses}
    if device.type == "cuda":
        return _nccl(name, stores, place, device, meanwhile, connections, timeout_seconds)
    meanwhile()
    return [connections.enter_context(_gloo(name, use, one, place, timeout)) for use, one in stores.items()]


@contextlib.contextmanager
def _connecting(name: str, place: PassingPlace) -> Iterator[None]:
    """Converts errors of the store, gloo and NCCL to OSError."""
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
            store.wait(["id"], datetime.timedelta(seconds=timeout_seconds))
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
            communicator.abort()  # its threads end without waiting for other processes
            communicator.close()
    finally:
        registry._unregister_process_group(group_name)


def _begin(call: Callable[[], _T]) -> Callable[[float], _T]:
    """Runs ``call``, which may block forever, in a thread. The returned function waits so many seconds for its result
    or raises TimeoutError; the thread is then abandoned.
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
    """Exchanges batches of messages, one after another. Returns when all have arrived and sent memory is free.

    Args:
        communicator: its processes must all call this, with as many batches.
        messages: per batch, sends and receives in ``device``'s memory; messages between two processes are matched in
            list order.
        device: of this process.
        timeout_seconds: for all batches.

    Raises:
        RankFailure: another process is gone, or some did not arrive within ``timeout_seconds``; the communicator is
            aborted.
    """
    context = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with context:
        for sends, receives in messages:
            communicator.exchange(sends, receives)
        if device.type == "cuda":
            wait_for([communicator], device, timeout_seconds)
