"""Matrices that several ranks share, in a plan: the model divided in place, and what its exchanges cost a rank.

A model of Hugging Face is divided as on real ranks (:mod:`patrickstar.tensor2d.plans`, and
:mod:`patrickstar.tensor2d.sharded_models` for one dimension), so that a trace has its parameters, its panels and its
products. Its lines send nothing: an exchange is over when the link has brought its bytes, and a wait for it takes what
of that the products begun in between did not hide ([Note: one panel ahead]).

Bytes are those that a rank receives where collectives send no more than they must, as
:mod:`patrickstar.tensor2d.cost` counts them: a panel's, and of a sum over n ranks (n - 1) / n of a summand for each.
Copies of a panel that are sent in rounds ([Note: copies of copies]), and an owner that gets summands straight from all,
take longer in lines of more than two.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from patrickstar.planning.cluster import Cluster, LineRates
from patrickstar.planning.divided import CannotDivideError
from patrickstar.planning.machines import Machine
from patrickstar.ranks.exchanges import PendingExchange
from patrickstar.tensor2d.cost import Mode
from patrickstar.tensor2d.group import MeshGroup
from patrickstar.tensor2d.hugging_face import PLANS, SHARDED, choose_for
from patrickstar.tensor2d.lines import Line, num_bytes
from patrickstar.tensor2d.plans import parallelize
from patrickstar.tensor2d.sharded_models import parallelize_1d


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixMesh:
    """Ranks that share matrices, neighbours, and how these are divided."""

    mode: Mode
    rows: int
    """1 in one dimension."""
    columns: int
    reason: str = dataclasses.field(default="", compare=False)
    """Why so; empty where it was asked for."""

    @property
    def size(self) -> int:
        """How many ranks."""
        return self.rows * self.columns

    def described(self) -> str:
        """For people."""
        return "in one dimension" if self.mode is Mode.ONE else f"for a mesh of {self.rows} x {self.columns}"


def cheapest_mesh(config: Any, batch: int, length: int, ranks: int, mode: Mode | None = None) -> MatrixMesh:
    """The division of a model's layers among so many ranks that receives least, and why.

    Args:
        config: of transformers.
        batch: samples of all ranks together.
        length: tokens of each.
        ranks: how many.
        mode: the only one that is asked about; None: all that there is for the model.

    Raises:
        CannotDivideError: nothing divides them, or there is no plan for the model.
    """
    mode = Mode.TWO if mode is None and config.model_type not in SHARDED else mode
    try:
        found = choose_for(config, batch=batch, length=length, ranks=ranks, mode=mode)
    except ValueError as error:
        raise CannotDivideError(str(error)) from error
    return MatrixMesh(mode=found.mode, rows=found.rows, columns=found.columns, reason=found.reason)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedMatrices:
    """A mesh, and how fast its lines are."""

    mesh: MatrixMesh
    along_columns: LineRates
    """Between ranks of one row, which are neighbours; of all ranks in one dimension."""
    along_rows: LineRates
    """Between ranks of one column."""

    @classmethod
    def on(cls, mesh: MatrixMesh, machine: Machine, cluster: Cluster) -> SharedMatrices:
        """Of neighbours in ``cluster``."""
        return cls(
            mesh=mesh,
            along_columns=cluster.line_rates(machine, mesh.columns, 1),
            along_rows=cluster.line_rates(machine, mesh.rows, mesh.columns),
        )


class Costs(Protocol):
    """What a trace has counted so far."""

    seconds: float
    """Of the device's operations, and of waits."""

    @property
    def repetitions(self) -> int:
        """How many of its kind, one after the other, an operation stands for at the moment."""

    def charge(self, seconds: float, flops: float) -> None:
        """Adds what no operation shows."""


class PlannedMatrices:
    """A model whose matrices are divided over a mesh, in place; rank 0 is traced.

    Raises:
        CannotDivideError: the model, its batch or its sequences cannot be divided so.
    """

    def __init__(self, model: nn.Module, batch: int, length: int, shared: SharedMatrices):
        mesh = shared.mesh
        self._exchanges = PlannedExchanges()
        columns = PlannedLine(self._exchanges, mesh.columns, shared.along_columns)
        rows = PlannedLine(self._exchanges, mesh.rows, shared.along_rows)
        everybody = PlannedLine(self._exchanges, mesh.size, shared.along_columns)
        self._lines = (columns, rows, everybody)
        _check(model, batch, length, mesh)
        try:
            if mesh.mode is Mode.ONE:
                parallelize_1d(model, columns)
            else:
                parallelize(model, MeshGroup(rows, columns, everybody))
        except ValueError as error:
            raise CannotDivideError(str(error)) from error
        self.batch = batch // mesh.rows
        """Samples of a rank."""

    def trace(self, costs: Costs) -> None:
        """A step begins, whose waits are charged to ``costs``."""
        self._exchanges.begin_step(costs)
        for line in self._lines:
            line.received_bytes.clear()

    @property
    def exposed_seconds(self) -> float:
        """Of the last step that was traced, what the rank waits for others' tensors."""
        return self._exchanges.exposed_seconds

    @property
    def link_seconds(self) -> float:
        """Of that step, how long the rank's link is busy."""
        return self._exchanges.link_seconds

    @property
    def received_bytes(self) -> collections.Counter[str]:
        """By the rank, in that step, by kind (:class:`~patrickstar.tensor2d.lines.Line`)."""
        return sum((line.received_bytes for line in self._lines), collections.Counter())


class PlannedExchanges:
    """A rank's link in a trace: exchanges follow each other, beside what the device computes."""

    def __init__(self) -> None:
        self.exposed_seconds = 0.0
        self.link_seconds = 0.0
        self._costs: Costs | None = None
        self._free_at = 0.0

    def begin_step(self, costs: Costs) -> None:
        """From here on time is that of ``costs``."""
        self._costs = costs
        self._free_at = self.exposed_seconds = self.link_seconds = 0.0

    def begin(self, seconds: float, latency: float) -> PlannedExchange:
        """An exchange for which the link is busy for so long."""
        if self._costs is None:
            return PlannedExchange(self, 0.0)
        begin, times = max(self._costs.seconds, self._free_at), self._costs.repetitions
        self._free_at = begin + times * seconds
        self.link_seconds += times * seconds
        return PlannedExchange(self, self._free_at + times * latency)

    @property
    def repetitions(self) -> int:
        """How many exchanges one stands for at the moment."""
        return 1 if self._costs is None else self._costs.repetitions

    def wait_until(self, end: float) -> None:
        """The device does nothing else."""
        if self._costs is not None and end > self._costs.seconds:
            exposed = end - self._costs.seconds
            self.exposed_seconds += exposed
            self._costs.charge(exposed, 0.0)


class PlannedExchange:
    """One that is over at ``end``."""

    def __init__(self, exchanges: PlannedExchanges, end: float):
        self._exchanges, self._end = exchanges, end

    def wait(self) -> None:
        """What is left of it takes its time."""
        self._exchanges.wait_until(self._end)


class _Received(collections.Counter[str]):
    """What comes in exchanges that stand for several counts as often."""

    def __init__(self, exchanges: PlannedExchanges):
        super().__init__()
        self._exchanges = exchanges

    def __setitem__(self, kind: str, total: int) -> None:
        super().__setitem__(kind, self[kind] + self._exchanges.repetitions * (total - self[kind]))


class PlannedLine(Line):
    """The line of rank 0 of ``size``."""

    def __init__(self, exchanges: PlannedExchanges, size: int, rates: LineRates):
        super().__init__()
        self.size = size
        self.received_bytes = _Received(exchanges)
        self._planned, self._rates = exchanges, rates

    def _begin_broadcast(self, tensor: torch.Tensor, owner: int) -> PendingExchange:
        return self._timed(num_bytes(tensor), self._rates.panels_gbps)

    def send(self, tensor: torch.Tensor, owner: int) -> PendingExchange:
        """As the others' :meth:`collect`, of as large a sum."""
        return self._timed(num_bytes(tensor) * (self.size - 1) / self.size, self._rates.sums_gbps)

    def collect(self, incoming: Sequence[torch.Tensor]) -> PendingExchange:
        """Summands of one panel: what comes to a rank for each of these, on average over a line's panels."""
        total = sum(map(num_bytes, incoming))
        self.received_bytes["partial sums"] += total
        return self._timed(total / self.size, self._rates.sums_gbps)

    def _begin(
        self,
        sends: Sequence[tuple[int, torch.Tensor]] = (),
        receives: Sequence[tuple[int, torch.Tensor]] = (),
    ) -> PendingExchange:
        each_way = [sum(num_bytes(tensor) for _, tensor in way) for way in (sends, receives)]
        return self._timed(max(each_way), self._rates.sums_gbps)

    def _timed(self, total_bytes: float, gbps: float) -> PendingExchange:
        return self._planned.begin(total_bytes / (gbps * 1e9), self._rates.latency_seconds)


def _check(model: nn.Module, batch: int, length: int, mesh: MatrixMesh) -> None:
    kinds = SHARDED if mesh.mode is Mode.ONE else tuple(PLANS)
    kind = model.config.model_type  # type: ignore[union-attr]
    if kind not in kinds:
        raise CannotDivideError(
            f"--tensor-parallel: {type(model).__name__} (model type {kind!r}) has no plan {mesh.described()}; there "
            f"are plans for {', '.join(sorted(kinds))}"
        )
    if batch % mesh.rows:
        raise CannotDivideError(
            f"--tensor-parallel {mesh.rows}x{mesh.columns}: {mesh.rows} rows do not divide a batch of {batch}; give "
            f"--batch-size {-(-batch // mesh.rows) * mesh.rows}, or a mesh of fewer rows"
        )
    if mesh.mode is Mode.ONE and length % mesh.size:
        raise CannotDivideError(
            f"--tensor-parallel {mesh.size}: {mesh.size} ranks do not divide sequences of {length} tokens; give "
            f"--seq-len {-(-length // mesh.size) * mesh.size}, or a mesh of rows and columns"
        )
