"""The process's world: the ``torch.distributed`` in which its groups are opened.

An initialised one is used as it is. Otherwise one is made from torchrun's environment, and the last groups that close
take it down.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import os
import time
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from patrickstar import _C
from patrickstar.ranks.addresses import gloo_on_loopback
from patrickstar.ranks.context import host_name
from patrickstar.ranks.failures import connecting, first_line, own_connection
from patrickstar.ranks.wording import format_ranks
from patrickstar.ranks.world_store import MOVED, attempt, reach_world, world_store

_POLL_SECONDS = 0.05
_FIRST_POLL_SECONDS = 0.002  # doubles each time; ranks that arrive for a resize are there at once
_VERDICT_SECONDS = 1.0  # for the other ranks to read who is missing

_process: int | None = None
"""Id of the first process that entered torch.distributed."""
_made_world = False
"""True if the present torch.distributed was made here, not by the user."""
_num_world_users = 0
"""Open groups of ranks in this process; the last to leave takes down a world made here."""


def enter_world(timeout_seconds: float) -> bool:
    """Enters the world; returns False for a single process. Each entry must be paired with :func:`leave_world`.

    Raises:
        RankFailure: a rank does not arrive within the timeout.
        StateError: the environment is incomplete, or this process is a fork of a rank.
    """
    is_there = dist.is_available() and dist.is_initialized()
    world_size = int(os.environ.get("WORLD_SIZE") or 1)
    if not is_there and world_size <= 1:
        return False
    global _process, _made_world, _num_world_users
    if _process not in (None, os.getpid()):
        raise _C.StateError(
            "this process is a fork of a rank (a DataLoader worker, a subprocess?), and must not use its connections; "
            "start ranks as processes of their own"
        )
    _process = os.getpid()
    if not is_there:
        _make_world(world_size, timeout_seconds)
        _made_world, _num_world_users = True, 0
    elif _num_world_users == 0:
        _made_world = False
    _num_world_users += 1
    return True


def leave_world() -> None:
    """Leaves the world; the last groups to leave take down a world made here."""
    global _num_world_users
    _num_world_users -= 1
    if _num_world_users == 0 and _made_world and dist.is_initialized():
        dist.destroy_process_group()


def _make_world(world_size: int, timeout_seconds: float) -> None:
    if not dist.is_available():
        raise _C.StateError(
            f"WORLD_SIZE is {world_size}, but this PyTorch has no torch.distributed; install one that has"
        )
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise _C.StateError(
            f"WORLD_SIZE is {world_size}, but {', '.join(missing)} not set; start the script with torchrun, or set them"
        )
    rank = int(os.environ["RANK"])
    timeout = datetime.timedelta(seconds=timeout_seconds)
    store = world_store(rank, timeout)
    with _waiting(rank):  # before torch.distributed waits, whose error would not name the missing rank
        _call_the_roll(store, f"patrickstar/{attempt()}/world", range(world_size), rank, timeout_seconds)
    with connecting(rank), gloo_on_loopback(os.environ["MASTER_ADDR"]):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Ranks that have all arrived to open groups, and their keys in the store."""

    rank: int
    members: tuple[int, ...]
    """The ranks that meet, ascending."""
    store: dist.Store
    """The world's store, through a separate connection."""
    prefix: str
    """Prefix of their keys; differs each time that the same ranks open groups."""

    def hosts(self) -> dict[int, str]:
        """The node of each member, by rank (:func:`~patrickstar.ranks.context.host_name`). All members must call it."""
        with _waiting(self.rank):
            self.store.set(f"{self.prefix}/host/{self.rank}", host_name())
            return {member: self.store.get(f"{self.prefix}/host/{member}").decode() for member in self.members}


def meet(rank: int, members: tuple[int, ...], timeout_seconds: float) -> Meeting:
    """Waits for all ``members``, each of which must call it, in the entered world.

    Raises:
        RankFailure: a rank does not arrive within the timeout, or the store is lost.
    """
    store = own_connection(dist.distributed_c10d._get_default_store(), timeout_seconds)
    with _waiting(rank):
        name = f"patrickstar/{attempt()}/{hashlib.sha256(repr(members).encode()).hexdigest()[:16]}"
        prefix = f"{name}/{store.add(f'{name}/opened/{rank}', 1)}"
        _call_the_roll(store, prefix, members, rank, timeout_seconds)
    return Meeting(rank, members, store, prefix)


@contextlib.contextmanager
def _waiting(rank: int) -> Iterator[None]:
    """Raises RankFailure if a rank ends or the store is lost while ranks wait for each other."""
    try:
        yield
    except dist.DistStoreError as error:
        raise _C.RankFailure(f"rank {rank} waited for the others to come: {first_line(error)}") from error
    except dist.DistError as error:
        raise _C.RankFailure(
            f"rank {rank} waited for the others to come and lost torch's store ({first_line(error)}): rank 0 or "
            "torchrun's agent ended; see its output"
        ) from error


def _call_the_roll(store: dist.Store, prefix: str, members: Sequence[int], rank: int, timeout_seconds: float) -> None:
    """Waits for all members; raises RankFailure that names those missing after the timeout."""
    keys = {member: f"{prefix}/arrived/{member}" for member in members}
    verdict = f"{prefix}/missing"
    deadline = time.monotonic() + timeout_seconds
    poll = _FIRST_POLL_SECONDS
    store.set(f"{prefix}/arrived/{rank}", "1")
    while not store.check(list(keys.values())):
        if store.check([verdict]):
            raise _C.RankFailure(store.get(verdict).decode())
        if time.monotonic() > deadline:
            missing = format_ranks([member for member, key in keys.items() if not store.check([key])])
            text = f"{missing} of {len(keys)} did not come within {timeout_seconds:g} s; see their output"
            store.set(verdict, text)
            time.sleep(_VERDICT_SECONDS)  # this process may serve the store
            raise _C.RankFailure(text)
        time.sleep(poll)
        poll = min(2 * poll, _POLL_SECONDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankPlace:
    """A process's rank in a new world, and the store of that world."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    """The host of rank 0, which serves the store."""
    port: int
    """The store's port; 0: a single rank, without a store."""
    key: bytes = dataclasses.field(repr=False)
    """The store's key: 32 bytes."""


def move_to_world(place: RankPlace, timeout_seconds: float, arrival_seconds: float) -> None:
    """Leaves the current world, whose groups must be closed, so that the next `open_ranks` uses ``place``. Sets the
    environment as torchrun would, since libraries read it. An existing ``torch.distributed`` ends with all its groups.

    Args:
        place: of this process.
        timeout_seconds: for values in the new ranks' store.
        arrival_seconds: for all new ranks to come.

    Raises:
        RankFailure: the new ranks' store is not reached, or a rank does not come within ``arrival_seconds``.
    """
    end_world()
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_world_size),
        MASTER_ADDR=place.host,
        MASTER_PORT=str(place.port),
    )
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    if place.world_size > 1:
        store = reach_world(place.host, place.port, place.key, timeout_seconds, f"rank {place.rank}'s process")
        with _waiting(place.rank):
            _call_the_roll(store, MOVED, range(place.world_size), place.rank, arrival_seconds)


def end_world() -> None:
    """Ends an existing ``torch.distributed`` with all its groups. Other ranks' running calls in them fail."""
    global _num_world_users
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        _num_world_users = 0


def num_ranks_to_come() -> int:
    """The number of ranks that `open_ranks` will find."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return max(int(os.environ.get("WORLD_SIZE") or 1), 1)
