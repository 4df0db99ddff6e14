"""Tensors on their way between ranks while the device computes: a communicator's exchanges on a queue of their own.

    exchanges = open_exchanges(ranks, "the sequence")
    coming = exchanges.begin(sends=[(after, mine)], receives=[(before, theirs)])
    ...                                                     # computes with neither
    coming.wait()

[Note: tensors on their way] From `begin` to `wait` nobody writes what is sent or reads what is received. On a GPU both
are used by the stream of the exchanges, of which PyTorch's allocator knows nothing: a tensor that is freed may be given
out again at once, to work of the stream that it was made on. So they are kept until `wait`, behind which that stream
comes after the exchange. Where it does not (the exchange is waited for on another stream, or by nobody because of an
error), the allocator is told who else uses them. It is not told in any case, because it then gives memory back at times
that no step repeats.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
import torch.distributed as dist

from patrickstar import _C
from patrickstar.ranks.context import DistributedContext

Messages = Sequence[tuple[int, torch.Tensor]]
"""Contiguous tensors with the rank of the group that each goes to or comes from; what two ranks send each other is
matched in the order of their lists.
"""

Addresses = Sequence[tuple[int, int, int]]
"""Of such tensors: ranks, addresses and bytes."""


class PendingExchange(Protocol):
    """Begun by :meth:`Exchanges.begin`."""

    def wait(self) -> None:
        """What comes is there, what goes is free. On a GPU the current stream waits, not the host.

        Raises:
            RankFailure: a rank did not take part, or the group was aborted.
        """
        ...


class Exchanges(Protocol):
    """Of one group of ranks, all of which begin the same ones in the same order. One thread at a time."""

    @property
    def rank(self) -> int:
        """Of this process in the group."""
        ...

    @property
    def size(self) -> int:
        """Ranks of the group."""
        ...

    def begin(self, sends: Messages, receives: Messages) -> PendingExchange:
        """Sends and receives tensors ([Note: tensors on their way])."""
        ...


class SharingRanks(Protocol):
    """:class:`~patrickstar.ranks.distributed.RankGroups`, or some of them."""

    @property
    def context(self) -> DistributedContext:
        """Which rank of the run this process is."""
        ...

    def open_communicator(self, what: str) -> _C.collective.Communicator:
        """Of these ranks."""
        ...


def open_exchanges(ranks: SharingRanks, what: str) -> Exchanges:
    """Of ``ranks``, for tensors on the device of each. All ranks of the run call this at the same point."""
    communicator = ranks.open_communicator(what)
    if ranks.context.device.type == "cuda":
        return StreamExchanges(communicator, ranks.context.device)
    return ThreadExchanges(communicator)


class ThreadExchanges:
    """On the CPU: a thread sends and receives. It ends when nobody has this object any more."""

    def __init__(self, communicator: _C.collective.Communicator):
        self._communicator = communicator
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="patrickstar-exchanges")
        self.rank = communicator.rank
        self.size = communicator.size

    def begin(self, sends: Messages, receives: Messages) -> PendingExchange:
        """Of tensors on the CPU. [Note: parameters that are sent] Asking a parameter of an engine where it lies is a
        use of it, and the engine is told of uses by one thread, at points that all ranks have in common. Told by the
        exchanges' thread, which has gradients on where an autograd.Function has them off, it took the use for one that
        autograd had recorded, and nothing held the parameter in backward. So addresses are taken here.
        """
        tensors = (*sends, *receives)
        return _OnThread(self._thread.submit(self._exchange, _addresses(sends), _addresses(receives), tensors))

    def _exchange(self, sends: Addresses, receives: Addresses, tensors: Messages) -> None:
        """On the thread. ``tensors`` are alive until it is over, whether somebody waits for it or not."""
        self._communicator.exchange(sends, receives)


class _OnThread:
    def __init__(self, done: Future[None]):
        self._done = done

    def wait(self) -> None:
        self._done.result()


class StreamExchanges:
    """On a GPU: a stream sends and receives, behind what the current stream has when an exchange begins. It has
    priority, so that a message does not wait for all blocks of a kernel that computes beside it to begin.
    """

    def __init__(self, communicator: _C.collective.Communicator, device: torch.device):
        self._communicator = communicator
        self._stream = torch.cuda.Stream(device, priority=-1)
        self.rank = communicator.rank
        self.size = communicator.size

    def begin(self, sends: Messages, receives: Messages) -> PendingExchange:
        """Of tensors on the GPU of this rank."""
        tensors = [tensor for _, tensor in (*sends, *receives)]
        pending = _OnStream(self._communicator, self._stream, tensors)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._communicator.exchange(_addresses(sends), _addresses(receives))
        pending.done.record(self._stream)
        return pending


class _OnStream:
    """[Note: tensors on their way]."""

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
    """Of a group of torch.distributed (None: its world, or this process alone), which ends as that group does."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self._group = group
        is_there = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if is_there else 0
        self.size = dist.get_world_size(group) if is_there else 1
        self._ranks = dist.get_process_group_ranks(group or dist.group.WORLD) if is_there else [0]

    def begin(self, sends: Messages, receives: Messages) -> PendingExchange:
        """As torch.distributed's batch_isend_irecv."""
        tensors = [tensor for _, tensor in (*sends, *receives)]
        operations = [dist.P2POp(dist.isend, tensor, self._ranks[rank], self._group) for rank, tensor in sends]
        operations += [dist.P2POp(dist.irecv, tensor, self._ranks[rank], self._group) for rank, tensor in receives]
        return _TorchWorks(dist.batch_isend_irecv(operations) if operations else [], tensors)


class _TorchWorks:
    def __init__(self, works: Sequence[dist.Work], tensors: Sequence[torch.Tensor]):
        self._works = works
        self._tensors = list(tensors)  # alive until they are sent

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._tensors.clear()


def _addresses(messages: Messages) -> Addresses:
    return [(rank, tensor.data_ptr(), tensor.numel() * tensor.element_size()) for rank, tensor in messages]
