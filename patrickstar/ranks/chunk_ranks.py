"""Ranks that share chunks: each of them has a shard of every chunk.

    chunks = ChunkRanks.all_of(ranks)
    chunks = ChunkRanks.along(MeshRanks(ranks, mesh), Axis.DATA, Axis.SEQUENCE)

Agreement of the whole run (calls, failures, configuration, budgets) goes through :class:`RankGroups`. Work on one copy
of the parameters (all-gathers, reduce-scatters, the next chunk, a plan) goes through these. Without tensor parallelism
they are all ranks of the run; with it, those with the same blocks of each matrix.
"""

from __future__ import annotations

import dataclasses

from patrickstar import _C
from patrickstar.ranks.chunk_communicators import warm_up
from patrickstar.ranks.distributed import RankGroups
from patrickstar.ranks.mesh import Axis, MeshRanks, SomeRanks


@dataclasses.dataclass(frozen=True)
class ChunkRanks:
    """The ranks that share chunks, and their groups. They belong to the groups of all ranks ([Note: groups of an
    axis]).
    """

    members: tuple[int, ...]
    """Their ranks in the run, ascending; the index in it is the shard."""
    control: _C.collective.ControlGroup
    """Agreement on small values among the members."""
    gather: _C.collective.Communicator
    """For all-gathers of chunks."""
    scatter: _C.collective.Communicator
    """For reduce-scatters, independent of `gather`."""
    part_gather: _C.collective.Communicator | None = None
    """Communicator for all-gathers among the members with the same parts; None: one rank has each part."""
    part_scatter: _C.collective.Communicator | None = None
    """Communicator of the same members, independent of `part_gather`."""

    @classmethod
    def all_of(cls, ranks: RankGroups) -> ChunkRanks:
        """All ranks of the run, using their groups; opens the collectives if necessary. All ranks must call it at the
        same point.
        """
        ranks.open_collectives()
        return cls(ranks.members, ranks.control, ranks.gather, ranks.scatter)

    @classmethod
    def along(cls, mesh: MeshRanks, *axes: Axis, num_parts: int = 1) -> ChunkRanks:
        """The ranks that differ from this one only in ``axes``. All ranks of the mesh must call it at the same point.
        On GPUs only the communicators that chunks need are opened.

        Args:
            num_parts: of parameters of which neighbours have different parts.
        """
        ranks, some = mesh.world_group, mesh.along(*axes)
        if some.members == ranks.members:
            return cls.all_of(ranks)._with_parts(some, num_parts)
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

    def _with_parts(self, members: SomeRanks, num_parts: int) -> ChunkRanks:
        _, same_part = members.divide(num_parts)
        if num_parts == 1 or same_part.size == 1:
            return self
        gather = same_part.open_communicator("gathers of parts of parameters")
        scatter = same_part.open_communicator("scatters of their gradients")
        if members.context.device.type == "cuda":
            with members.world_group.guard("the first collectives"):
                warm_up(gather, scatter, members.context.device)
        return dataclasses.replace(self, part_gather=gather, part_scatter=scatter)

    @property
    def rank(self) -> int:
        """This process's index among the members: its shard."""
        return self.control.rank

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)
