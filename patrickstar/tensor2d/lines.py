"""What ranks of a mesh that differ in one axis send each other: panels from one to all, partial sums to one, small
values from each to each.

[Note: sums by their owner] A sum over ranks is made by the rank that keeps it: the others' summands come as they are,
in the type of the operands, and are added in float32 in the order of ranks, together with its own, which is not rounded
before; the sum is rounded once. What libraries sum on the way is rounded at each rank, in an order that depends on the
network. The bytes are the same.

[Note: copies of copies] In a line of more than three ranks the owner of a panel does not send all copies: in each round
whoever has it sends it to one who does not, so that ceil(log2 n) rounds serve n ranks, and no rank sends more copies
than there are rounds. A line's exchanges follow each other, so what a round brings is there for the next.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from patrickstar.ranks.exchanges import Exchanges, PendingExchange, TorchExchanges

_MOST_DIRECT_COPIES = 2


class Line:
    """Ranks that differ in one axis, in its order. All of them call the same methods in the same order.

    Args:
        exchanges: of the ranks; None: this one is alone.

    Attributes:
        rank: of this process in the line.
        size: ranks of the line.
        received_bytes: what has come to this rank so far, by ``"panels"``, ``"partial sums"``, ``"turned blocks"`` and
            ``"small values"``.
        meet: called before the first message of each product, sum or exchange of the line, forward and backward, where
            this process may wait for other ranks beside it ([Note: ranks that meet]).
    """

    def __init__(self, exchanges: Exchanges | None = None):
        self._exchanges = exchanges
        self.rank = 0 if exchanges is None else exchanges.rank
        self.size = 1 if exchanges is None else exchanges.size
        self.received_bytes: collections.Counter[str] = collections.Counter()
        self.meet: Callable[[], object] = lambda: None

    def broadcast(self, tensor: torch.Tensor, owner: int) -> PendingExchange:
        """Begins to send the contiguous ``tensor`` of rank ``owner`` into that of all others."""
        if self.rank != owner:
            self.received_bytes["panels"] += num_bytes(tensor)
        return self._begin_broadcast(tensor, owner)

    def _begin_broadcast(self, tensor: torch.Tensor, owner: int) -> PendingExchange:
        if self.size <= _MOST_DIRECT_COPIES + 1:
            if self.rank != owner:
                return self._begin(receives=[(owner, tensor)])
            return self._begin(sends=[(rank, tensor) for rank in self._others()])
        place, have, rounds = (self.rank - owner) % self.size, 1, []
        while have < self.size:
            sends, receives = [], []
            if place < have and place + have < self.size:
                sends = [((self.rank + have) % self.size, tensor)]
            elif have <= place < 2 * have:
                receives = [((self.rank - have) % self.size, tensor)]
            rounds.append(self._begin(sends, receives))
            have *= 2
        return _Rounds(rounds)

    def send(self, tensor: torch.Tensor, owner: int) -> PendingExchange:
        """Begins to send a contiguous ``tensor`` to rank ``owner``, which calls :meth:`collect`."""
        return self._begin(sends=[(owner, tensor)])

    def collect(self, incoming: Sequence[torch.Tensor]) -> PendingExchange:
        """Begins to receive what the others :meth:`send` to this rank, in the order of their ranks."""
        self.received_bytes["partial sums"] += sum(map(num_bytes, incoming))
        return self._begin(receives=list(zip(self._others(), incoming, strict=True)))

    def swap_apart(self, step: int, outgoing: torch.Tensor, incoming: torch.Tensor, kind: str) -> PendingExchange:
        """Begins to send a contiguous tensor to the rank ``step`` ranks after this one, round the line, and to receive
        one of the rank as many before it.

        Args:
            step: below 0 for ranks before this one; all ranks have the same.
            outgoing: not written until it is over.
            incoming: of the same size, not read until then.
            kind: in :attr:`received_bytes`.
        """
        self.received_bytes[kind] += num_bytes(incoming)
        to, of = (self.rank + step) % self.size, (self.rank - step) % self.size
        return self._begin([(to, outgoing)], [(of, incoming)])

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor of each rank, by rank; all have this one's shape and dtype."""
        mine = tensor.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        parts[self.rank] = mine
        if self.size > 1:
            self.meet()
            others = self._others()
            self.received_bytes["small values"] += len(others) * num_bytes(mine)
            self._begin([(rank, mine) for rank in others], [(rank, parts[rank]) for rank in others]).wait()
        return parts

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of all ranks' tensors, in the order of ranks and the dtype of ``tensor``; the same bits on each."""
        parts = self.gather(tensor)
        total = parts[0].clone() if self.size > 1 else parts[0]
        for part in parts[1:]:
            total += part
        return total

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Element by element, of all ranks' tensors."""
        found, *others = self.gather(tensor)
        for part in others:
            found = torch.maximum(found, part)
        return found

    def swap(self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor]) -> None:
        """Sends and receives contiguous tensors by rank, of which some may be left out."""
        self.received_bytes["turned blocks"] += sum(map(num_bytes, incoming.values()))
        if self.size > 1:  # also where nothing goes or comes: all ranks take part in each exchange
            self.meet()
            self._begin(list(outgoing.items()), list(incoming.items())).wait()

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _begin(
        self, sends: Sequence[tuple[int, torch.Tensor]] = (), receives: Sequence[tuple[int, torch.Tensor]] = ()
    ) -> PendingExchange:
        if self._exchanges is None:
            raise RuntimeError("a line of one rank has nobody to exchange tensors with")
        return self._exchanges.begin(sends, receives)


def open_group(ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """A group of torch.distributed for a :class:`TorchLine`; all ranks of the world call this at the same point.

    [Note: messages first] Over NCCL its stream has priority: a message is a kernel of a few blocks, which otherwise
    waits until the last blocks of a product that began a moment before have found a multiprocessor.

    Args:
        ranks: of the world; None: all.
    """
    options = None
    if dist.get_backend() == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    return dist.new_group(None if ranks is None else list(ranks), pg_options=options)


class _Rounds:
    """Exchanges that follow each other."""

    def __init__(self, rounds: Sequence[PendingExchange]):
        self._rounds = rounds

    def wait(self) -> None:
        for pending in self._rounds:
            pending.wait()


class TorchLine(Line):
    """Of a group of torch.distributed, whose broadcast serves more than two ranks: it passes panels on piece by piece,
    where the owner alone would send all copies.
    """

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(TorchExchanges(group))
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)

    def _begin_broadcast(self, tensor: torch.Tensor, owner: int) -> PendingExchange:
        if self.size == 2:
            return super()._begin_broadcast(tensor, owner)
        work = dist.broadcast(tensor, self._ranks[owner], group=self._group, async_op=True)
        return _Broadcast(work, tensor)


class _Broadcast:
    def __init__(self, work: dist.Work, tensor: torch.Tensor):
        self._work = work
        self._tensor: torch.Tensor | None = tensor  # alive until it is sent

    def wait(self) -> None:
        self._work.wait()
        self._tensor = None


def num_bytes(tensor: torch.Tensor) -> int:
    """Of its elements."""
    return tensor.numel() * tensor.element_size()
