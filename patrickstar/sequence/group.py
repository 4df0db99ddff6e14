"""What ranks that share a sequence send each other: a ring, and all to all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from patrickstar.ranks.exchanges import Exchanges, PendingExchange, SharingRanks, TorchExchanges, open_exchanges
from patrickstar.ranks.mesh import SomeRanks


class Exchange:
    """Tensors on their way round the ring. :meth:`wait` gives those that come."""

    def __init__(self, pending: PendingExchange | None, incoming: Sequence[torch.Tensor]):
        self._pending = pending
        self._incoming = list(incoming)

    def wait(self) -> list[torch.Tensor]:
        """What the rank before this one has sent. On a GPU the current stream waits, not the host.

        Raises:
            RankFailure: a rank of the group is gone, or another one of the run has failed.
        """
        if self._pending is not None:
            self._pending.wait()
        return self._incoming


class SequenceGroup:
    """Ranks that have a slice each of the same sequences, in the order of the slices.

    All of them call the same methods in the same order.

    Args:
        exchanges: how tensors travel: a group of torch.distributed (None: its world, or this process alone), or
            :class:`~patrickstar.ranks.exchanges.Exchanges`. An engine's ranks: :meth:`of_ranks`.

    Attributes:
        rank: of this process in the group.
        size: ranks of the group.
        sent_bytes: what this rank has sent to others so far.
        meet: called before the first exchange of each attention, forward and backward. [Note: ranks that meet] Where
            this process may wait for other ranks beside the group (an engine that gathers chunks on demand), it returns
            when all of them have come as far, so that nobody waits in the one for who waits in the other.
    """

    def __init__(
        self, exchanges: dist.ProcessGroup | Exchanges | None = None, meet: Callable[[], object] = lambda: None
    ):
        if exchanges is None or isinstance(exchanges, dist.ProcessGroup):
            exchanges = TorchExchanges(exchanges)
        self._exchanges = exchanges
        self.rank = exchanges.rank
        self.size = exchanges.size
        self.sent_bytes = 0
        self.meet = meet

    @classmethod
    def of_ranks(cls, ranks: SharingRanks, meet: Callable[[], object] = lambda: None) -> SequenceGroup:
        """Of groups that :func:`~patrickstar.ranks.distributed.open_ranks` has opened, or of those along an axis of
        their mesh. All ranks of the run call it at the same point. What fails in the group fails as in these.
        """
        return cls(open_exchanges(ranks, "the sequence"), meet)

    def pass_on(self, tensors: Sequence[torch.Tensor]) -> Exchange:
        """Begins to send ``tensors`` to the next rank, and to receive such of the same shapes from the one before. They
        must not be written before :meth:`Exchange.wait`.
        """
        if self.size == 1:
            return Exchange(None, tensors)
        outgoing = [tensor.contiguous() for tensor in tensors]
        incoming = [torch.empty_like(tensor) for tensor in outgoing]
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self.sent_bytes += sum(map(_num_bytes, outgoing))
        sends = [(after, tensor) for tensor in outgoing]
        return Exchange(self._exchanges.begin(sends, [(before, tensor) for tensor in incoming]), incoming)

    def all_to_all(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Part i goes to rank i; what comes from each, by rank, has the shape of the part that goes there."""
        if self.size == 1:
            return list(parts)
        outgoing = [part.contiguous() for part in parts]
        incoming = [torch.empty_like(part) for part in outgoing]
        incoming[self.rank] = outgoing[self.rank]
        sends, receives = [], []
        for step in range(1, self.size):  # each step a permutation, so that no rank gets two at once
            to, of = (self.rank + step) % self.size, (self.rank - step) % self.size
            sends.append((to, outgoing[to]))
            receives.append((of, incoming[of]))
            self.sent_bytes += _num_bytes(outgoing[to])
        self._exchanges.begin(sends, receives).wait()
        return incoming


@dataclasses.dataclass(frozen=True)
class HybridGroup:
    """Ranks in two axes: Ulysses within ``heads``, a ring across ``ring``. Rank (i, j), the i-th of its ring and the
    j-th of its heads' group, has slice i * heads.size + j of the sequence.
    """

    ring: SequenceGroup
    heads: SequenceGroup

    @classmethod
    def of_ranks(cls, ranks: SomeRanks, num_heads_ranks: int, meet: Callable[[], object] = lambda: None) -> HybridGroup:
        """Of ranks along an axis, each with ``num_heads_ranks`` neighbours for Ulysses. All ranks of the run call it at
        the same point.

        Raises:
            ValueError: the ranks cannot be divided so.
        """
        neighbours, across = ranks.divide(num_heads_ranks)
        return cls(ring=SequenceGroup.of_ranks(across, meet), heads=SequenceGroup.of_ranks(neighbours, meet))

    @property
    def meet(self) -> Callable[[], object]:
        """As that of :class:`SequenceGroup`."""
        return self.ring.meet

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent to others so far."""
        return self.ring.sent_bytes + self.heads.sent_bytes

    @property
    def rank(self) -> int:
        """Of this process, as the slices are counted."""
        return self.ring.rank * self.heads.size + self.heads.rank

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""
        return self.ring.size * self.heads.size


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
