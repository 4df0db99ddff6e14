"""A communicator of processes that have no world in common, for as long as something passes between them.

    with passing_communicator("a resize", place, device, timeout_seconds=60) as communicator:
        exchange(communicator, [(sends, receives), ...], device, timeout_seconds=60)

Nothing of torch.distributed's world is used or made, so that processes may be in worlds of their own meanwhile. They
meet in a store that one of them serves. A process that does not come, or goes, is an OSError here, and no RankFailure:
nobody's ranks have failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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


@contextlib.contextmanager
def passing_communicator(
    name: str, place: PassingPlace, device: torch.device, *, timeout_seconds: float
) -> Iterator[_C.collective.Communicator]:
    """All processes enter with the same ``name``, which they have not used before in this store. It is closed at the
    end, for which nobody waits: what has passed must have been waited for (:func:`exchange`).

    Raises:
        OSError: not all have come within ``timeout_seconds``, or are not reached.
    """
    timeout = datetime.timedelta(seconds=timeout_seconds)
    try:
        store = dist.TCPStore(place.host, place.port, is_master=False, wait_for_workers=False, timeout=timeout)
        store = dist.PrefixStore(f"patrickstar/passing/{name}", store)
        opened = _nccl if device.type == "cuda" else _gloo
        context = opened(name, store, place, device, timeout_seconds)
        communicator = context.__enter__()
    except RuntimeError as error:  # of the store, of gloo, of NCCL
        raise OSError(f"the {place.size} processes of {name} were not connected: {first_line(error)}") from error
    try:
        yield communicator
    finally:
        context.__exit__(None, None, None)


@contextlib.contextmanager
def _nccl(
    name: str, store: dist.Store, place: PassingPlace, device: torch.device, timeout_seconds: float
) -> Iterator[_C.collective.Communicator]:
    if place.rank == 0:
        store.set("id", _C.collective.make_nccl_id())
    made = bytes(store.get("id"))
    communicator = _within(
        timeout_seconds,
        f"NCCL's connections for {name}",
        lambda: _C.collective.make_nccl_communicator(made, rank=place.rank, size=place.size, device=device.index),
    )
    try:
        yield communicator
    finally:
        communicator.close()


@contextlib.contextmanager
def _gloo(
    name: str, store: dist.Store, place: PassingPlace, device: torch.device, timeout_seconds: float
) -> Iterator[_C.collective.Communicator]:
    timeout = datetime.timedelta(seconds=timeout_seconds)
    group = dist.ProcessGroup(store, place.rank, place.size)
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


def _within(timeout_seconds: float, what: str, call: Callable[[], _T]) -> _T:
    """What ``call`` gives, which nothing ends where another process does not come: it is left behind then."""
    found: list[_T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="patrickstar-passing", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    if failed:
        raise failed[0]
    if not found:
        raise OSError(f"{what} were not made within {timeout_seconds:g} s; see the other processes' output")
    return found[0]


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
