"""What ranks that share a sequence send each other: a ring, and all to all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist


class Exchange:
    """Tensors on their way round the ring. :meth:`wait` gives those that come."""

    def __init__(self, works: Sequence[dist.Work], incoming: Sequence[torch.Tensor], outgoing: Sequence[torch.Tensor]):
        self._works = works
        self._incoming = list(incoming)
        self._outgoing = list(outgoing)  # alive until they are sent

    def wait(self) -> list[torch.Tensor]:
        """What the rank before this one has sent. On a GPU the current stream waits, not the host."""
        for work in self._works:
            work.wait()
        self._outgoing.clear()
        return self._incoming


class SequenceGroup:
    """Ranks that have a slice each of the same sequences, in the order of the slices.

    All of them call the same methods in the same order.

    Attributes:
        rank: of this process in the group.
        size: ranks of the group.
        sent_bytes: what this rank has sent to others so far.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self._group = group
        is_there = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if is_there else 0
        self.size = dist.get_world_size(group) if is_there else 1
        self.sent_bytes = 0
        self._ranks = dist.get_process_group_ranks(group or dist.group.WORLD) if is_there else [0]

    def pass_on(self, tensors: Sequence[torch.Tensor]) -> Exchange:
        """Begins to send ``tensors`` to the next rank, and to receive such of the same shapes from the one before."""
        if self.size == 1:
            return Exchange([], tensors, [])
        outgoing = [tensor.contiguous() for tensor in tensors]
        incoming = [torch.empty_like(tensor) for tensor in outgoing]
        after, before = self._ranks[(self.rank + 1) % self.size], self._ranks[(self.rank - 1) % self.size]
        operations = [dist.P2POp(dist.isend, tensor, after, self._group) for tensor in outgoing]
        operations += [dist.P2POp(dist.irecv, tensor, before, self._group) for tensor in incoming]
        self.sent_bytes += sum(map(_num_bytes, outgoing))
        return Exchange(dist.batch_isend_irecv(operations), incoming, outgoing)

    def all_to_all(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Part i goes to rank i; what comes from each, by rank, has the shape of the part that goes there."""
        if self.size == 1:
            return list(parts)
        outgoing = [part.contiguous() for part in parts]
        incoming = [torch.empty_like(part) for part in outgoing]
        incoming[self.rank] = outgoing[self.rank]
        operations = []
        for step in range(1, self.size):  # each step a permutation, so that no rank gets two at once
            to, of = (self.rank + step) % self.size, (self.rank - step) % self.size
            operations.append(dist.P2POp(dist.isend, outgoing[to], self._ranks[to], self._group))
            operations.append(dist.P2POp(dist.irecv, incoming[of], self._ranks[of], self._group))
        self.sent_bytes += sum(_num_bytes(part) for rank, part in enumerate(outgoing) if rank != self.rank)
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return incoming


@dataclasses.dataclass(frozen=True)
class HybridGroup:
    """Ranks in two axes: Ulysses within ``heads``, a ring across ``ring``. Rank (i, j), the i-th of its ring and the
    j-th of its heads' group, has slice i * heads.size + j of the sequence.
    """

    ring: SequenceGroup
    heads: SequenceGroup

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
