"""Tensor parallelism in a plan: the model is sharded in place, and its exchanges are charged to a rank.

A Hugging Face model is sharded as on real ranks (:mod:`patrickstar.tensor2d.plans`;
:mod:`patrickstar.tensor2d.sharded_models` for one dimension), so a trace has the real parameters, panels and products.
Exchanges send nothing. Each ends when the link has carried its bytes, and a wait costs the time that products begun in
between did not hide (patrickstar/tensor2d/panels.py).

Bytes are those received by a rank if collectives send the least possible, as in :mod:`patrickstar.tensor2d.cost`: a
whole panel, and (n - 1) / n of a summand for a sum over n ranks. In groups of more than two ranks, panels copied in
rounds and owners that receive all summands directly take longer.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from patrickstar.planning.cluster import Cluster, LineRates
from patrickstar.planning.machines import Machine
from patrickstar.planning.sharded import CannotDivideError
from patrickstar.ranks.exchanges import PendingExchange
from patrickstar.tensor2d.cost import Mode
from patrickstar.tensor2d.group import MeshGroup
from patrickstar.tensor2d.lines import Line, num_bytes
from patrickstar.tensor2d.model_cost import choose_for
from patrickstar.tensor2d.plans import parallelize
from patrickstar.tensor2d.sharded_models import has_1d_form, parallelize_1d


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixMesh:
    """Adjacent ranks that share matrices, and the shape of their mesh."""

    mode: Mode
    rows: int
    """1 for one-dimensional tensor parallelism."""
    columns: int
    reason: str = dataclasses.field(default="", compare=False)
    """Reason for the choice; empty if the user chose."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.rows * self.columns

    def described(self) -> str:
        """Returns a text for messages."""
        return "in one dimension" if self.mode is Mode.ONE else f"for a mesh of {self.rows} x {self.columns}"


def cheapest_mesh(model: nn.Module, batch: int, length: int, ranks: int, mode: Mode | None = None) -> MatrixMesh:
    """Returns the mesh of ``ranks`` ranks that receives the fewest bytes, with the reason.

    Args:
        model: of Hugging Face, on the meta device.
        batch: samples of all ranks together.
        length: tokens per sample.
        ranks: number of ranks.
        mode: considers only this mode; None: all that the model supports.

    Raises:
        CannotDivideError: the layers cannot be divided, or the model has no form over a mesh.
    """
    mode = Mode.TWO if mode is None and not has_1d_form(model) else mode
    try:
        found = choose_for(model, batch=batch, length=length, ranks=ranks, mode=mode)
    except ValueError as error:
        raise CannotDivideError(str(error)) from error
    return MatrixMesh(mode=found.mode, rows=found.rows, columns=found.columns, reason=found.reason)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedMatrices:
    """A mesh with the rates of its dimension groups."""

    mesh: MatrixMesh
    along_columns: LineRates
    """Between adjacent ranks of one row; in one dimension, between all ranks."""
    along_rows: LineRates
    """Between ranks of one column."""

    @classmethod
    def on(cls, mesh: MatrixMesh, machine: Machine, cluster: Cluster) -> SharedMatrices:
        """The rates of ``mesh`` on adjacent ranks of ``cluster``."""
        return cls(
            mesh=mesh,
            along_columns=cluster.line_rates(machine, mesh.columns, 1),
            along_rows=cluster.line_rates(machine, mesh.rows, mesh.columns),
        )


class Costs(Protocol):
    """The running totals of a trace."""

    seconds: float
    """Device operations and waits."""

    @property
    def repetitions(self) -> int:
        """Number of identical consecutive operations that one traced operation represents now."""

    def charge(self, seconds: float, flops: float) -> None:
        """Adds a cost without an operation."""


class PlannedMatrices:
    """A tensor-parallel model, sharded in place; rank 0 is traced.

    Raises:
        CannotDivideError: the model, its batch or its sequences do not fit the mesh.
    """

    def __init__(self, model: nn.Module, batch: int, length: int, shared: SharedMatrices):
        mesh = shared.mesh
        self._exchanges = PlannedExchanges()
        columns = PlannedLine(self._exchanges, mesh.columns, shared.along_columns)
        rows = PlannedLine(self._exchanges, mesh.rows, shared.along_rows)
        world_group = PlannedLine(self._exchanges, mesh.size, shared.along_columns)
        self._lines = (columns, rows, world_group)
        _check(batch, length, mesh)
        try:
            if mesh.mode is Mode.ONE:
                parallelize_1d(model, columns)
            else:
                parallelize(model, MeshGroup(rows, columns, world_group))
        except ValueError as error:
            raise CannotDivideError(str(error)) from error
        self.batch = batch // mesh.rows
        """Samples of a rank."""

    def trace(self, costs: Costs) -> None:
        """Begins a traced step; waits are charged to ``costs``."""
        self._exchanges.begin_step(costs)
        for line in self._lines:
            line.received_bytes.clear()

    @property
    def exposed_seconds(self) -> float:
        """Seconds that the rank waited for other ranks' tensors in the last traced step."""
        return self._exchanges.exposed_seconds

    @property
    def link_seconds(self) -> float:
        """Busy seconds of the rank's link in that step."""
        return self._exchanges.link_seconds

    @property
    def total_received_bytes(self) -> int:
        """Bytes that the rank received in that step."""
        return sum(self.received_bytes.values())

    @property
    def received_bytes(self) -> collections.Counter[str]:
        """Bytes that the rank received in that step, by kind (:class:`~patrickstar.tensor2d.lines.Line`)."""
        return sum((line.received_bytes for line in self._lines), collections.Counter())


class PlannedExchanges:
    """A rank's link in a trace: exchanges run one after the other, in parallel with compute."""

    def __init__(self) -> None:
        self.exposed_seconds = 0.0
        self.link_seconds = 0.0
        self._costs: Costs | None = None
        self._free_at = 0.0

    def begin_step(self, costs: Costs) -> None:
        """Begins a step on the clock of ``costs``."""
        self._costs = costs
        self._free_at = self.exposed_seconds = self.link_seconds = 0.0

    def begin(self, seconds: float, latency: float) -> PlannedExchange:
        """Begins an exchange that occupies the link for ``seconds``."""
        if self._costs is None:
            return PlannedExchange(self, 0.0)
        begin, times = max(self._costs.seconds, self._free_at), self._costs.repetitions
        self._free_at = begin + times * seconds
        self.link_seconds += times * seconds
        return PlannedExchange(self, self._free_at + times * latency)

    @property
    def repetitions(self) -> int:
        """Number of exchanges that one represents now."""
        return 1 if self._costs is None else self._costs.repetitions

    def wait_until(self, end: float) -> None:
        """Charges the device's wait until ``end``."""
        if self._costs is not None and end > self._costs.seconds:
            exposed = end - self._costs.seconds
            self.exposed_seconds += exposed
            self._costs.charge(exposed, 0.0)


class PlannedExchange:
    """A pending exchange that ends at ``end``."""

    def __init__(self, exchanges: PlannedExchanges, end: float):
        self._exchanges, self._end = exchanges, end

    def wait(self) -> None:
        """Waits for the rest of it."""
        self._exchanges.wait_until(self._end)


class _Received(collections.Counter[str]):
    """Counts received bytes once per represented exchange."""

    def __init__(self, exchanges: PlannedExchanges):
        super().__init__()
        self._exchanges = exchanges

    def __setitem__(self, kind: str, total: int) -> None:
        super().__setitem__(kind, self[kind] + self._exchanges.repetitions * (total - self[kind]))


class PlannedLine(Line):
    """The dimension group of rank 0, with ``size`` ranks."""

    def __init__(self, exchanges: PlannedExchanges, size: int, rates: LineRates):
        super().__init__()
        self.size = size
        self.received_bytes = _Received(exchanges)
        self._planned, self._rates = exchanges, rates

    def _begin_broadcast(self, tensor: torch.Tensor, owner: int) -> PendingExchange:
        return self._timed(num_bytes(tensor), self._rates.panels_gbps)

    def send(self, tensor: torch.Tensor, owner: int) -> PendingExchange:
        """Counts a sum as large as in the other ranks' :meth:`collect`."""
        return self._timed(num_bytes(tensor) * (self.size - 1) / self.size, self._rates.sums_gbps)

    def collect(self, incoming: Sequence[torch.Tensor]) -> PendingExchange:
        """Counts a rank's average received bytes over all panels of the group."""
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


def _check(batch: int, length: int, mesh: MatrixMesh) -> None:
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
