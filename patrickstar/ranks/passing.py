"""A communicator of processes that have no world in common, for as long as something passes between them.

    with passing_communicator("a resize", place, device, make_room, timeout_seconds=60) as communicator:
        exchange(communicator, [(sends, receives), ...], device, timeout_seconds=60)

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
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch
import torch.distributed as dist

from patrickstar import _C
from patrickstar.ranks.failures import first_line

PeerBytes = tuple[int, int, int]
"""The other's rank, an address, and bytes."""
_POLL_SECONDS = 0.0005
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
    timeout = datetime.timedelta(seconds=timeout_seconds)
    with _connecting(name, place):
        store = dist.TCPStore(place.host, place.port, is_master=False, wait_for_workers=False, timeout=timeout)
        store = dist.PrefixStore(f"patrickstar/passing/{name}", store)
    if device.type == "cuda":
        with _nccl(name, store, place, device, meanwhile, timeout_seconds) as communicator:
            yield communicator
        return
    meanwhile()
    with _gloo(name, store, place, timeout) as communicator:
        yield communicator


@contextlib.contextmanager
def _connecting(name: str, place: PassingPlace) -> Iterator[None]:
    """What the store, gloo and NCCL raise is an OSError."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"the {place.size} processes of {name} were not connected: {first_line(error)}") from error


@contextlib.contextmanager
def _nccl(
    name: str,
    store: dist.Store,
    place: PassingPlace,
    device: torch.device,
    meanwhile: Callable[[], object],
    timeout_seconds: float,
) -> Iterator[_C.collective.Communicator]:
    with _connecting(name, place):
        if place.rank == 0:
            store.set("id", _C.collective.make_nccl_id())
        made = bytes(store.get("id"))
    connect = functools.partial(
        _C.collective.make_nccl_communicator, made, rank=place.rank, size=place.size, device=device.index
    )
    connected = _begin(connect)
    meanwhile()
    with _connecting(name, place):
        communicator = connected(timeout_seconds)
    try:
        yield communicator
    finally:
        communicator.close()


@contextlib.contextmanager
def _gloo(
    name: str, store: dist.Store, place: PassingPlace, timeout: datetime.timedelta
) -> Iterator[_C.collective.Communicator]:
    group = dist.ProcessGroup(store, place.rank, place.size)
    with _connecting(name, place):
        backend = dist.ProcessGroupGloo(store, place.rank, place.size, timeout=timeout)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_default_backend(kind)
    group._set_group_name(name)
    registry = torch._C._distributed_c10d
    registry._register_process_group(name, group)
    try:
        communicator = _C.collective.make_c10d_communicator(name)
        try:
            yield communicator
        finally:
            communicator.abort()  # its threads end, whatever the others do
            communicator.close()
    finally:
        registry._unregister_process_group(name)


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
    deadline = time.monotonic() + timeout_seconds
    context = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with context:
        for sends, receives in messages:
            communicator.exchange(sends, receives)
        if device.type != "cuda":
            return
        done = torch.cuda.Event()
        done.record()
        while not done.query():
            communicator.check()
            if time.monotonic() > deadline:
                communicator.abort()
                raise _C.RankFailure(f"values of other processes did not come within {timeout_seconds:g} s")
            time.sleep(_POLL_SECONDS)
        communicator.check()
