"""Communication of the ranks along one mesh dimension: broadcast of panels, reduction of partial sums to their owner,
all-gather of small values.

[Note: sums by their owner] The rank that keeps a sum over ranks computes it. The others send their summands in the
operands' dtype. The owner adds them in float32, in rank order, with its own unrounded summand, and rounds once. A
library's reduction rounds at each rank, in an order that depends on the network. Both send the same bytes.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from patrickstar.ranks.exchanges import Exchanges, PendingExchange, TorchExchanges

_MOST_DIRECT_COPIES = 2


class Line:
    """A mesh dimension group: ranks that differ in one coordinate, in its order. All ranks must call the same methods
    in the same order.

    Broadcasts to more than three ranks run in ceil(log2 n) rounds: in each round every rank that has the panel sends it
    to one that does not. A group's exchanges run in order, so a panel received in one round can be sent in the next.

    Args:
        exchanges: communication of the ranks; None: a group of one.

    Attributes:
        rank: this process's rank in the group.
        size: ranks of the group.
        received_bytes: bytes received so far, by ``"panels"``, ``"partial sums"``, ``"turned blocks"`` and ``"small
            values"``.
        meet: called before the first message of each product, sum or exchange, forward and backward ([Note: ranks that
            meet]).
    """

    def __init__(self, exchanges: Exchanges | None = None):
        self._exchanges = exchanges
        self.rank = 0 if exchanges is None else exchanges.rank
        self.size = 1 if exchanges is None else exchanges.size
        self.received_bytes: collections.Counter[str] = collections.Counter()
        self.meet: Callable[[], object] = lambda: None

    def broadcast(self, tensor: torch.Tensor, owner: int) -> PendingExchange:
        """Starts a broadcast of rank ``owner``'s contiguous ``tensor``."""
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
        """Starts sending a contiguous ``tensor`` to rank ``owner``, which calls :meth:`collect`."""
        return self._begin(sends=[(owner, tensor)])

    def collect(self, incoming: Sequence[torch.Tensor]) -> PendingExchange:
        """Starts receiving the tensors that the other ranks :meth:`send` here, in rank order."""
        self.received_bytes["partial sums"] += sum(map(num_bytes, incoming))
        return self._begin(receives=list(zip(self._others(), incoming, strict=True)))

    def swap_apart(self, step: int, outgoing: torch.Tensor, incoming: torch.Tensor, kind: str) -> PendingExchange:
        """Starts sending a contiguous tensor to the rank ``step`` after this one, cyclically, and receiving one from
        the rank ``step`` before.

        Args:
            step: equal on all ranks; negative for ranks before this one.
            outgoing: must not be written until the end.
            incoming: of the same size; must not be read until the end.
            kind: key in :attr:`received_bytes`.
        """
        self.received_bytes[kind] += num_bytes(incoming)
        to, of = (self.rank + step) % self.size, (self.rank - step) % self.size
        return self._begin([(to, outgoing)], [(of, incoming)])

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """All-gathers tensors of one shape and dtype; the result is ordered by rank."""
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
        """Sum of all ranks' tensors, in rank order and ``tensor``'s dtype; the same bits on each rank."""
        parts = self.gather(tensor)
        total = parts[0].clone() if self.size > 1 else parts[0]
        for part in parts[1:]:
            total += part
        return total

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum of all ranks' tensors."""
        found, *others = self.gather(tensor)
        for part in others:
            found = torch.maximum(found, part)
        return found

    def swap(self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor]) -> None:
        """Sends and receives contiguous tensors by rank; some ranks may be absent."""
        self.received_bytes["turned blocks"] += sum(map(num_bytes, incoming.values()))
        if self.size > 1:  # all ranks take part in each exchange, even without tensors
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
    """Opens a torch.distributed group for a :class:`TorchLine`; all ranks of the world must call it at the same point.

    An NCCL group gets a high-priority stream. A message is a kernel of a few blocks; otherwise it would wait for a
    running product's last blocks.

    Args:
        ranks: ranks in the world; None: all.
    """
    options = None
    if dist.get_backend() == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    return dist.new_group(None if ranks is None else list(ranks), pg_options=options)


class _Rounds:
    """Exchanges that run one after another."""

    def __init__(self, rounds: Sequence[PendingExchange]):
        self._rounds = rounds

    def wait(self) -> None:
        for pending in self._rounds:
            pending.wait()


class TorchLine(Line):
    """A mesh dimension group of torch.distributed. With more than two ranks it uses the library's broadcast, which
    pipelines pieces instead of sending all copies from the owner.
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
        self._tensor: torch.Tensor | None = tensor  # kept alive until it is sent

    def wait(self) -> None:
        self._work.wait()
        self._tensor = None


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's elements."""
    return tensor.numel() * tensor.element_size()
