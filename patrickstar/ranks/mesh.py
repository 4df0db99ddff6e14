"""A device mesh with the dimensions data, sequence, rows and columns (the latter two of matrices).

    mesh = Mesh(data=2, sequence=4)
    mesh.coordinates(5)                  # {Axis.DATA: 1, Axis.SEQUENCE: 1, Axis.ROWS: 0, Axis.COLUMNS: 0}
    mesh.sharing(5, Axis.SEQUENCE)       # (4, 5, 6, 7)
    ranks = MeshRanks(open_ranks(...), mesh)
    communicator = ranks.along("sequence").open_communicator("keys and values")

Ranks are numbered along columns first, then rows, then sequence, then data. So ranks that communicate most are
neighbours, on one host.

[Note: groups of an axis] Groups opened along a mesh dimension belong to the groups of all ranks. These watch them,
abort them when any rank fails, and close them, on all ranks at one point. A mesh itself opens no group.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Iterator, Sequence

from patrickstar import _C
from patrickstar.ranks.context import DistributedContext
from patrickstar.ranks.distributed import RankGroups

_SHOWN_MESHES = 3


class Axis(enum.Enum):
    """Mesh dimensions, slowest first."""

    DATA = "data"
    """Ranks differ in their samples."""
    SEQUENCE = "sequence"
    """Ranks differ in their tokens of the same samples."""
    ROWS = "rows"
    """Ranks differ in their row of blocks of the same matrices."""
    COLUMNS = "columns"
    """Ranks differ in their column of blocks of the same matrices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """The size of each mesh dimension, 1 by default. Ranks are numbered from 0 to ``size`` - 1.

    Raises:
        ValueError: a number is below 1.
    """

    data: int = 1
    sequence: int = 1
    rows: int = 1
    columns: int = 1

    def __post_init__(self) -> None:
        for axis in Axis:
            if self.along(axis) < 1:
                raise ValueError(f"mesh: {axis.value} is {self.along(axis)}; give at least 1")

    def __str__(self) -> str:
        return " x ".join(f"{axis.value} {self.along(axis)}" for axis in Axis if _is_shown(self, axis))

    @property
    def size(self) -> int:
        """Ranks of the mesh."""
        return math.prod(self.along(axis) for axis in Axis)

    def along(self, axis: Axis) -> int:
        """Size of the mesh dimension ``axis``."""
        return getattr(self, axis.value)

    def check(self, num_ranks: int) -> None:
        """Raises ValueError, which names meshes that would fit, unless the mesh has ``num_ranks`` ranks."""
        if self.size == num_ranks:
            return
        others = ", or ".join(str(mesh) for mesh in nearest_meshes(self, num_ranks)[:_SHOWN_MESHES])
        raise ValueError(
            f"a mesh of {self} has {self.size} ranks, but the run has {num_ranks}; take {others}, or start {self.size} "
            "ranks"
        )

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """A rank's index along each dimension."""
        found = {}
        for axis in reversed(Axis):
            rank, found[axis] = divmod(rank, self.along(axis))
        return {axis: found[axis] for axis in Axis}

    def rank(self, coordinates: dict[Axis, int]) -> int:
        """The rank with these coordinates."""
        rank = 0
        for axis in Axis:
            rank = rank * self.along(axis) + coordinates[axis]
        return rank

    def sharing(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """Ranks that differ from ``rank`` only in ``axes``, itself included, ascending."""
        here = self.coordinates(rank)
        ranges = [range(self.along(axis)) if axis in axes else (here[axis],) for axis in Axis]
        return tuple(self.rank(dict(zip(Axis, found, strict=True))) for found in itertools.product(*ranges))

    def division(self, *axes: Axis) -> list[tuple[int, ...]]:
        """Partition of all ranks into the groups along ``axes``."""
        return sorted({self.sharing(rank, *axes) for rank in range(self.size)})


def nearest_meshes(mesh: Mesh, num_ranks: int) -> list[Mesh]:
    """Meshes of ``num_ranks`` ranks with the dimensions of ``mesh`` (and data), nearest first: fewest dimensions
    changed, then smallest factors, then changes of data.
    """
    axes = [axis for axis in Axis if _is_shown(mesh, axis)]

    def distance(other: Mesh) -> tuple[int, float, bool]:
        factors = [abs(math.log(other.along(axis) / mesh.along(axis))) for axis in axes]
        return sum(factor > 0 for factor in factors), round(sum(factors), 9), other.data == mesh.data

    meshes = [
        Mesh(**{axis.value: factor for axis, factor in zip(axes, factors, strict=True)})
        for factors in _factorisations(num_ranks, len(axes))
    ]
    return sorted(meshes, key=distance)


def _is_shown(mesh: Mesh, axis: Axis) -> bool:
    return axis is Axis.DATA or mesh.along(axis) > 1


def _factorisations(number: int, num_factors: int) -> Iterator[tuple[int, ...]]:
    if num_factors == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factorisations(number // first, num_factors - 1):
                yield first, *rest


@dataclasses.dataclass(frozen=True)
class SomeRanks:
    """Ranks that differ from this one only in certain mesh dimensions, itself included ([Note: groups of an axis])."""

    world_group: RankGroups
    members: tuple[int, ...]
    """Ascending; `rank` is the index in it."""

    @property
    def rank(self) -> int:
        """This process's index among the members."""
        return self.members.index(self.context.rank)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def context(self) -> DistributedContext:
        """This process's rank in the run."""
        return self.world_group.context

    def open_communicator(self, what: str) -> _C.collective.Communicator:
        """A communicator of the members, by :meth:`RankGroups.open_communicator`: all ranks of the mesh must call it at
        the same point.
        """
        return self.world_group.open_communicator(what, self.members)

    def divide(self, num_neighbours: int) -> tuple[SomeRanks, SomeRanks]:
        """Splits one mesh dimension into two: groups of ``num_neighbours`` consecutive members, and members with the
        same index in their group.

        Raises:
            ValueError: the number of members is not divisible.
        """
        if num_neighbours < 1 or self.size % num_neighbours:
            raise ValueError(
                f"{self.size} ranks cannot be divided into groups of {num_neighbours}; give a number that divides them"
            )
        first = self.rank // num_neighbours * num_neighbours
        return (
            SomeRanks(self.world_group, self.members[first : first + num_neighbours]),
            SomeRanks(self.world_group, self.members[self.rank % num_neighbours :: num_neighbours]),
        )


class MeshRanks:
    """The ranks of a run as a mesh ([Note: groups of an axis]).

    Attributes:
        world_group: the groups of all ranks; their owner closes them.
        mesh: the mesh of these ranks.

    Raises:
        ValueError: the mesh has another number of ranks.
    """

    def __init__(self, world_group: RankGroups, mesh: Mesh):
        mesh.check(len(world_group.members))
        self.world_group = world_group
        self.mesh = mesh
        self._rank = world_group.members.index(world_group.context.rank)

    @property
    def coordinates(self) -> dict[Axis, int]:
        """Coordinates of this rank."""
        return self.mesh.coordinates(self._rank)

    def along(self, *axes: Axis | str) -> SomeRanks:
        """The ranks that differ from this one only in ``axes``. Opens nothing.

        Raises:
            ValueError: there is no such axis.
        """
        found = self.mesh.sharing(self._rank, *_axes(axes))
        return SomeRanks(self.world_group, tuple(self.world_group.members[rank] for rank in found))


def _axes(names: Sequence[Axis | str]) -> list[Axis]:
    known = {axis.value for axis in Axis}
    for name in names:
        if not isinstance(name, Axis) and name not in known:
            raise ValueError(f"a mesh has no axis {name!r}; give {', '.join(axis.value for axis in Axis)}")
    return [Axis(name) for name in names]
