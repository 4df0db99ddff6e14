"""Point-to-point exchanges of tensors that overlap with computation: each group of exchanges has its own stream or
thread.

    exchanges = open_exchanges(ranks, "the sequence")
    coming = exchanges.begin(sends=[(after, mine)], receives=[(before, theirs)])
    ...                                                     # computes with neither
    coming.wait()

From `begin` to `wait`, sent tensors must not be written and received ones not read. On a GPU both are used by the
exchanges' stream, unknown to PyTorch's allocator. The allocator could reuse a freed tensor at once on the stream that
made it. So tensors are kept until `wait`, after which that stream is ordered behind the exchange. If it is not (`wait`
on another stream, or no `wait` because of an error), ``record_stream`` registers the other users. That is not done
always: the allocator would then free memory at times that differ between steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
import torch.distributed as dist

from patrickstar import _C
from patrickstar.ranks.context import DistributedContext

Messages = Sequence[tuple[int, torch.Tensor]]
"""Contiguous tensors with the destination or source rank in the group. Messages between two ranks are matched in list
order.
"""

Addresses = Sequence[tuple[int, int, int]]
"""Ranks, addresses and bytes of such tensors."""


class PendingExchange(Protocol):
    """An exchange that :meth:`Exchanges.begin` has started."""

    def wait(self) -> None:
        """Waits until received tensors are complete and sent ones are free. On a GPU the current stream waits, not the
        host.

        Raises:
            RankFailure: a rank did not take part, or the group was aborted.
        """
        ...


class Exchanges(Protocol):
    """Exchanges of one group of ranks; all ranks must begin the same ones in the same order. For one thread
    at a time.
    """

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        ...

    @property
    def size(self) -> int:
        """Ranks of the group."""
        ...

    def begin(self, sends: Messages, receives: Messages) -> PendingExchange:
        """Starts sending and receiving tensors; see the module's docstring for their lifetime."""
        ...


class SharingRanks(Protocol):
    """Interface of :class:`~patrickstar.ranks.distributed.RankGroups` and of some of its ranks."""

    @property
    def context(self) -> DistributedContext:
        """This process's rank in the run."""
        ...

    def open_communicator(self, what: str) -> _C.collective.Communicator:
        """Opens a communicator of these ranks."""
        ...


def all_to_all_pairs(rank: int, size: int) -> Iterator[tuple[int, int]]:
    """Destination and source of each message of an all-to-all, without that to itself. Each step is a permutation:
    every rank sends one message and receives one.
    """
    for step in range(1, size):
        yield (rank + step) % size, (rank - step) % size


def open_exchanges(ranks: SharingRanks, what: str) -> Exchanges:
    """Opens exchanges of ``ranks``, for tensors on each rank's device. All ranks of the run must call it at the same
    point.
    """
    communicator = ranks.open_communicator(what)
    if ranks.context.device.type == "cuda":
        return StreamExchanges(communicator, ranks.context.device)
    return ThreadExchanges(communicator)


class ThreadExchanges:
    """CPU exchanges on a thread, which ends with this object."""

    def __init__(self, communicator: _C.collective.Communicator):
        self._communicator = communicator
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="patrickstar-exchanges")
        self.rank = communicator.rank
        self.size = communicator.size

    def begin(self, sends: Messages, receives: Messages) -> PendingExchange:
        """Starts an exchange of CPU tensors.

        Addresses are taken on the calling thread. Reading a chunked parameter's address is a use of it, and uses are
        reported by one thread, at points common to all ranks. The exchange thread has gradients enabled where an
        autograd.Function has them off. A use reported there would count as recorded by autograd, and nothing would hold
        the parameter in backward.
        """
        tensors = (*sends, *receives)
        return _OnThread(self._thread.submit(self._exchange, addresses(sends), addresses(receives), tensors))

    def _exchange(self, sends: Addresses, receives: Addresses, tensors: Messages) -> None:
        """Runs on the thread. ``tensors`` keeps them alive until the end, with or without a waiter."""
        self._communicator.exchange(sends, receives)


class _OnThread:
    def __init__(self, done: Future[None]):
        self._done = done

    def wait(self) -> None:
        self._done.result()


class StreamExchanges:
    """GPU exchanges on a stream, ordered behind the current stream's work at the start of each exchange. The stream has
    priority: a message need not wait until a running kernel's blocks have all started.
    """

    def __init__(self, communicator: _C.collective.Communicator, device: torch.device):
        self._communicator = communicator
        self._stream = torch.cuda.Stream(device, priority=-1)
        self.rank = communicator.rank
        self.size = communicator.size

    def begin(self, sends: Messages, receives: Messages) -> PendingExchange:
        """Starts an exchange of tensors on this rank's GPU."""
        tensors = [tensor for _, tensor in (*sends, *receives)]
        pending = _OnStream(self._communicator, self._stream, tensors)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._communicator.exchange(addresses(sends), addresses(receives))
        pending.done.record(self._stream)
        return pending


class _OnStream:
    """A started exchange; keeps its tensors until `wait`."""

    def __init__(
        self, communicator: _C.collective.Communicator, stream: torch.cuda.Stream, tensors: Sequence[torch.Tensor]
    ):
        self._tensors = list(tensors)
        self._communicator = communicator
        self._stream = stream
        self._begun_on = torch.cuda.current_stream(stream.device)
        self.done = torch.cuda.Event()

    def wait(self) -> None:
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(self.done)
        if current != self._begun_on:
            self._leave_to_allocator(self._stream, current)
        self._tensors.clear()
        self._communicator.check()

    def __del__(self) -> None:
        self._leave_to_allocator(self._stream)

    def _leave_to_allocator(self, *users: torch.cuda.Stream) -> None:
        for tensor, stream in itertools.product(self._tensors, users):
            tensor.record_stream(stream)


class TorchExchanges:
    """Exchanges of a torch.distributed group (None: the world, or this process alone), which end with that group."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self._group = group
        is_there = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if is_there else 0
        self.size = dist.get_world_size(group) if is_there else 1
        self._ranks = dist.get_process_group_ranks(group or dist.group.WORLD) if is_there else [0]

    def begin(self, sends: Messages, receives: Messages) -> PendingExchange:
        """Calls torch.distributed's batch_isend_irecv."""
        tensors = [tensor for _, tensor in (*sends, *receives)]
        operations = [dist.P2POp(dist.isend, tensor, self._ranks[rank], self._group) for rank, tensor in sends]
        operations += [dist.P2POp(dist.irecv, tensor, self._ranks[rank], self._group) for rank, tensor in receives]
        return _TorchWorks(dist.batch_isend_irecv(operations) if operations else [], tensors)


class _TorchWorks:
    def __init__(self, works: Sequence[dist.Work], tensors: Sequence[torch.Tensor]):
        self._works = works
        self._tensors = list(tensors)  # kept alive until they are sent

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._tensors.clear()


def addresses(messages: Messages) -> Addresses:
    """Ranks, addresses and bytes of tensors, which the caller keeps alive."""
    return [(rank, tensor.data_ptr(), tensor.numel() * tensor.element_size()) for rank, tensor in messages]
