"""Ranks that share chunks: each of them has a shard of every chunk.

    chunks = ChunkRanks.all_of(ranks)
    chunks = ChunkRanks.along(MeshRanks(ranks, mesh), Axis.DATA, Axis.SEQUENCE)

What the whole run agrees on (calls, failures, configuration, budgets) goes through :class:`RankGroups`; what one copy
of the parameters needs (gathers, scatters, which chunk is next, a plan) through these. They are all ranks of the run,
but where ranks have other blocks of each matrix: there they are those that have the same.
"""

from __future__ import annotations

import dataclasses

from patrickstar import _C
from patrickstar.ranks.chunk_communicators import warm_up
from patrickstar.ranks.distributed import RankGroups
from patrickstar.ranks.mesh import Axis, MeshRanks


@dataclasses.dataclass(frozen=True)
class ChunkRanks:
    """See the module's docstring. They belong to the groups of all ranks ([Note: groups of an axis])."""

    members: tuple[int, ...]
    """Their numbers in the run, ascending; the index in it is the shard."""
    control: _C.collective.ControlGroup
    """Agreement on small values among the members."""
    gather: _C.collective.Communicator
    """For all-gathers of chunks."""
    scatter: _C.collective.Communicator
    """For reduce-scatters, independent of `gather`."""

    @classmethod
    def all_of(cls, ranks: RankGroups) -> ChunkRanks:
        """All ranks of the run, which call it at the same point, by the groups that these have, or open now."""
        ranks.open_collectives()
        return cls(ranks.members, ranks.control, ranks.gather, ranks.scatter)

    @classmethod
    def along(cls, mesh: MeshRanks, *axes: Axis) -> ChunkRanks:
        """The ranks that differ from this one in ``axes`` at most. All ranks of the mesh call it at the same point. On
        GPUs no communicator is opened that their chunks do not need.
        """
        ranks, some = mesh.everybody, mesh.along(*axes)
        if some.members == ranks.members:
            return cls.all_of(ranks)
        found = cls(
            some.members,
            ranks.open_control("agreement on chunks", some.members),
            some.open_communicator("gathers of chunks"),
            some.open_communicator("scatters of gradients"),
        )
        if ranks.context.device.type == "cuda" and found.size > 1:
            with ranks.guard("the first collectives"):
                warm_up(found.gather, found.scatter, ranks.context.device)
        return found

    @property
    def rank(self) -> int:
        """Of this process among the members: which shard it has."""
        return self.control.rank

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)
