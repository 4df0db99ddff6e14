"""The mesh of tensor parallelism: this rank's coordinate, and its mesh dimension groups."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable

import torch.distributed as dist

from patrickstar.ranks.exchanges import open_exchanges
from patrickstar.ranks.mesh import Axis, Mesh, MeshRanks
from patrickstar.tensor2d.lines import Line, TorchLine, open_group

_LINES = ((Axis.ROWS,), (Axis.COLUMNS,), (Axis.ROWS, Axis.COLUMNS))


@dataclasses.dataclass(frozen=True)
class MeshPlace:
    """A rank's coordinate in a mesh of ``rows`` x ``columns``, and of its blocks in sharded matrices."""

    rows: int
    columns: int
    row: int = 0
    column: int = 0

    @property
    def num_panels(self) -> int:
        """Panels of a product: the least common multiple of rows and columns."""
        return math.lcm(self.rows, self.columns)

    @property
    def size(self) -> int:
        """Ranks of the mesh."""
        return self.rows * self.columns

    def world_group(self) -> list[MeshPlace]:
        """All coordinates in rank order: along columns first."""
        return [
            dataclasses.replace(self, row=row, column=column)
            for row in range(self.rows)
            for column in range(self.columns)
        ]


class MeshGroup:
    """The ranks that share matrices: rank (i, j) has block (i, j) of each.

    Args:
        along_rows: mesh dimension group of this rank's column; its ranks differ in their row.
        along_columns: mesh dimension group of this rank's row; its ranks differ in their column.
        world_group: all ranks of the mesh, by row, then by column.

    Attributes:
        place: this rank's coordinate.
    """

    def __init__(self, along_rows: Line, along_columns: Line, world_group: Line):
        self.world_group = world_group
        self.along_rows = along_rows
        self.along_columns = along_columns
        self.place = MeshPlace(along_rows.size, along_columns.size, along_rows.rank, along_columns.rank)

    @classmethod
    def alone(cls) -> MeshGroup:
        """A mesh of one rank, which has all of each matrix."""
        return cls(Line(), Line(), Line())

    @classmethod
    def of_torch(cls, mesh: Mesh) -> MeshGroup:
        """The mesh of torch.distributed's world; :class:`~patrickstar.ranks.mesh.Mesh` defines rank order.

        All ranks must call it at the same point. It opens groups, which end with the world.

        Raises:
            ValueError: the mesh has another number of ranks than the world.
        """
        size = dist.get_world_size() if dist.is_initialized() else 1
        mesh.check(size)
        if size == 1:
            return cls.alone()
        lines = []
        for axes in _LINES:
            line = Line()
            for ranks in mesh.division(*axes):
                group = open_group(ranks) if len(ranks) > 1 else None
                if group is not None and dist.get_rank() in ranks:
                    line = TorchLine(group)
            lines.append(line)
        return cls(*lines)

    @classmethod
    def of_ranks(cls, ranks: MeshRanks) -> MeshGroup:
        """The mesh of an engine's ranks. All ranks of the run must call it at the same point; failures propagate as
        described in [Note: groups of an axis]. If one dimension has all ranks, its group is also the world group.
        """
        lines: dict[tuple[int, ...], Line] = {}
        for axes in _LINES:
            some = ranks.along(*axes)
            if some.members not in lines:
                what = f"matrices along {' and '.join(axis.value for axis in axes)}"
                lines[some.members] = Line(open_exchanges(some, what) if some.size > 1 else None)
        return cls(*(lines[ranks.along(*axes).members] for axes in _LINES))

    def meet_before_messages(self, meet: Callable[[], object]) -> None:
        """Sets ``meet`` (:attr:`Line.meet`) of each mesh dimension group."""
        for line in self._lines():
            line.meet = meet

    @property
    def received_bytes(self) -> collections.Counter[str]:
        """Bytes received so far along all dimensions, by kind (:class:`~patrickstar.tensor2d.lines.Line`)."""
        return sum((line.received_bytes for line in self._lines()), collections.Counter())

    def _lines(self) -> list[Line]:
        """Each distinct group once."""
        return list(dict.fromkeys((self.along_rows, self.along_columns, self.world_group)))
