"""Ranks as threads of this process, on the CPU, for trial runs of multi-rank computations.

    results = run_emulated(2, function)      # function(ranks) on each, where `ranks` is a RankGroups

Exchanges copy bytes between threads. An exception on one rank ends the others, and is raised.
"""

from __future__ import annotations

import collections
import ctypes
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

from patrickstar import _C
from patrickstar.ranks.context import DistributedContext
from patrickstar.ranks.distributed import RankGroups
from patrickstar.ranks.exchanges import Addresses

_T = TypeVar("_T")
_TIMEOUT_SECONDS = 120.0


class EmulatedRanks(RankGroups):
    """One of the ranks of :func:`run_emulated`: exchanges and agreement only, no collectives of chunks."""

    def __init__(self, rank: int, size: int, post: _Post):
        cpu = torch.device("cpu")
        context = DistributedContext(rank=rank, world_size=size, local_rank=rank, local_world_size=size, device=cpu)
        super().__init__(context, range(size), _TIMEOUT_SECONDS)
        self._post = post
        self._num_opened = 0
        self.control: Any = _Control(self._communicator("control", self.members))

    def open_communicator(self, what: str, members: Sequence[int] | None = None) -> Any:
        """A communicator between threads; see the base class."""
        return self._communicator(what, self._checked(what, self.members if members is None else members))

    def _communicator(self, what: str, members: tuple[int, ...]) -> _Communicator:
        self._num_opened += 1  # all ranks open the same communicators in the same order
        return _Communicator(self._post, (self._num_opened, members), members.index(self.context.rank), len(members))


class _Post:
    """Messages in transit between threads."""

    def __init__(self) -> None:
        self._boxes: dict[Hashable, collections.deque[bytes]] = collections.defaultdict(collections.deque)
        self._changed = threading.Condition()
        self._has_failed = False

    def put(self, box: Hashable, message: bytes) -> None:
        with self._changed:
            self._boxes[box].append(message)
            self._changed.notify_all()

    def take(self, box: Hashable) -> bytes:
        """Receives the next message. Raises RankFailure if another thread has failed, or on a timeout."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._boxes[box] or self._has_failed, _TIMEOUT_SECONDS)
            if self._has_failed or not came:
                raise _C.RankFailure("a rank that was tried out did not take part in an exchange")
            return self._boxes[box].popleft()

    def fail(self) -> None:
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()


class _Communicator:
    """The part of ``_C.collective.Communicator`` that exchanges use."""

    def __init__(self, post: _Post, name: Hashable, rank: int, size: int):
        self._post, self._name = post, name
        self.rank, self.size = rank, size

    def exchange(self, sends: Addresses, receives: Addresses) -> None:
        """Raises ValueError if a received message has another size."""
        for rank, address, num_bytes in sends:
            self._post.put((self._name, self.rank, rank), ctypes.string_at(address, num_bytes))
        for rank, address, num_bytes in receives:
            message = self._post.take((self._name, rank, self.rank))
            if len(message) != num_bytes:
                raise ValueError(
                    f"rank {rank} sent {len(message)} bytes to rank {self.rank}, which waited for {num_bytes}"
                )
            ctypes.memmove(address, message, num_bytes)

    def gather(self, message: bytes) -> list[bytes]:
        """All-gathers messages, by rank."""
        for rank in range(self.size):
            self._post.put((self._name, self.rank, rank), message)
        return [self._post.take((self._name, rank, self.rank)) for rank in range(self.size)]


class _Control:
    """The part of ``_C.collective.ControlGroup`` that agreement uses."""

    call = ""

    def __init__(self, communicator: _Communicator):
        self._communicator = communicator

    def exchange(self, message: bytes, what: str) -> list[bytes]:
        return self._communicator.gather(message)


def run_emulated(size: int, function: Callable[[RankGroups], _T]) -> list[_T]:
    """Calls ``function`` on ``size`` ranks concurrently and returns their results, by rank. The ranks share PyTorch's
    intra-op threads.

    Raises:
        Exception: the first exception on a rank.
    """
    post = _Post()
    num_threads = torch.get_num_threads()
    results: dict[int, _T] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            torch.set_num_threads(max(num_threads // size, 1))  # for this thread, except MKL's threads
            with _C.HostAllocations():
                results[rank] = function(EmulatedRanks(rank, size, post))
        except BaseException as error:
            failures.append(error)
            post.fail()

    threads = [threading.Thread(target=run, args=(rank,), name=f"patrickstar-rank-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(num_threads)
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(size)]
