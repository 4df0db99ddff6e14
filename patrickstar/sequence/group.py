"""Communication of ranks that share a sequence: ring and all-to-all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from patrickstar.ranks.exchanges import (
    Exchanges,
    PendingExchange,
    SharingRanks,
    TorchExchanges,
    all_to_all_pairs,
    open_exchanges,
)
from patrickstar.ranks.mesh import SomeRanks


class Exchange:
    """Tensors in transit round the ring."""

    def __init__(self, pending: PendingExchange | None, incoming: Sequence[torch.Tensor]):
        self._pending = pending
        self._incoming = list(incoming)

    def wait(self) -> list[torch.Tensor]:
        """Returns the tensors from the previous rank. On a GPU the current stream waits, not the host.

        Raises:
            RankFailure: a rank of the group is gone, or another rank of the run has failed.
        """
        if self._pending is not None:
            self._pending.wait()
        return self._incoming


class SequenceGroup:
    """A context-parallel group: ranks that each hold a slice of the same sequences, in slice order.

    All ranks must call the same methods in the same order.

    Args:
        exchanges: a group of torch.distributed (None: the world, or this process alone), or
            :class:`~patrickstar.ranks.exchanges.Exchanges`. For an engine's ranks see :meth:`of_ranks`.

    Attributes:
        rank: this process's rank in the group.
        size: ranks of the group.
        sent_bytes: bytes that this rank has sent so far.
        meet: called before the first exchange of each attention, forward and backward.

    [Note: ranks that meet] This process may also wait for ranks outside the group, as an engine does that all-gathers
    chunks on demand. ``meet`` then returns once all ranks have called it. Otherwise one rank could wait in the group
    for a rank that waits for it in an all-gather.
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
        """A group of ranks that :func:`~patrickstar.ranks.distributed.open_ranks` has opened, or of those along a mesh
        dimension. All ranks of the run must call it at the same point. Failures propagate as in these groups.
        """
        return cls(open_exchanges(ranks, "the sequence"), meet)

    def pass_on(self, tensors: Sequence[torch.Tensor]) -> Exchange:
        """Starts sending ``tensors`` to the next rank and receiving tensors of the same shapes from the previous one.
        ``tensors`` must not be written before :meth:`Exchange.wait`.
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
        """All-to-all: part i goes to rank i. The tensor from each rank has the shape of the part sent to it."""
        if self.size == 1:
            return list(parts)
        outgoing = [part.contiguous() for part in parts]
        incoming = [torch.empty_like(part) for part in outgoing]
        incoming[self.rank] = outgoing[self.rank]
        sends, receives = [], []
        for to, of in all_to_all_pairs(self.rank, self.size):
            sends.append((to, outgoing[to]))
            receives.append((of, incoming[of]))
            self.sent_bytes += _num_bytes(outgoing[to])
        self._exchanges.begin(sends, receives).wait()
        return incoming


@dataclasses.dataclass(frozen=True)
class HybridGroup:
    """Ranks in two dimensions: Ulysses within ``heads``, a ring across ``ring``.

    Rank (i, j), the i-th of its ring and the j-th of its heads' group, has slice i * heads.size + j of the sequence.
    """

    ring: SequenceGroup
    heads: SequenceGroup

    @classmethod
    def of_ranks(cls, ranks: SomeRanks, num_heads_ranks: int, meet: Callable[[], object] = lambda: None) -> HybridGroup:
        """Splits the ranks along a mesh dimension, with ``num_heads_ranks`` neighbours for Ulysses. All ranks of the
        run must call it at the same point.

        Raises:
            ValueError: the number of ranks is not divisible.
        """
        neighbours, across = ranks.divide(num_heads_ranks)
        return cls(ring=SequenceGroup.of_ranks(across, meet), heads=SequenceGroup.of_ranks(neighbours, meet))

    @property
    def meet(self) -> Callable[[], object]:
        """See :class:`SequenceGroup`."""
        return self.ring.meet

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent so far."""
        return self.ring.sent_bytes + self.heads.sent_bytes

    @property
    def rank(self) -> int:
        """This process's rank, in slice order."""
        return self.ring.rank * self.heads.size + self.heads.rank

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""
        return self.ring.size * self.heads.size


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
