"""Expert parallelism in a plan: a rank has its part of the experts, and exchanges are charged to it.

Tokens are taken to be spread evenly over experts. An exchange ends when the link has carried its bytes, and the rank
waits for it, since the products that follow need its rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from patrickstar.experts.exchange import Travel
from patrickstar.experts.exchanged import ExchangedExperts, expert_params, find_experts
from patrickstar.module.expert_rows import Routing
from patrickstar.module.param_ranks import RankPart, keep_part
from patrickstar.planning.cluster import LineRates
from patrickstar.planning.sharded_matrices import Costs, PlannedExchanges


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedExperts:
    """Adjacent ranks that divide experts, with the rates between them."""

    size: int
    rates: LineRates


class PlannedExperts:
    """A model whose experts are divided; rank 0 is traced.

    Raises:
        ValueError: the experts cannot be divided.
    """

    def __init__(self, model: nn.Module, shared: SharedExperts):
        self._exchanges = PlannedExchanges()
        self._ranks = _PlannedRanks(self._exchanges, shared)
        exchanged = ExchangedExperts(self._ranks)
        part = RankPart(0, shared.size, lambda values: values)  # values are never read
        for experts in find_experts(model, shared.size).values():
            exchanged.add(experts)
            for param in expert_params(experts).values():
                keep_part(param, part)

    def trace(self, costs: Costs) -> None:
        """Begins a traced step; waits are charged to ``costs``."""
        self._exchanges.begin_step(costs)
        self._ranks.received_bytes = 0.0

    @property
    def exposed_seconds(self) -> float:
        """See ``PlannedMatrices``."""
        return self._exchanges.exposed_seconds

    @property
    def link_seconds(self) -> float:
        """See ``PlannedMatrices``."""
        return self._exchanges.link_seconds

    @property
    def total_received_bytes(self) -> int:
        """Bytes that the rank received in the last traced step."""
        return round(self._ranks.received_bytes)


class _PlannedRanks:
    """The ranks that divide experts, as rank 0 of a trace sees them."""

    def __init__(self, exchanges: PlannedExchanges, shared: SharedExperts):
        self.size = shared.size
        self.received_bytes = 0.0
        self._exchanges, self._rates = exchanges, shared.rates

    def arrange(self, routing: Routing) -> Travel:
        """Rows that are spread evenly over ranks."""
        num_rows, num_local = routing.order.numel(), routing.offsets.numel() // self.size
        each = [num_rows // self.size] * self.size
        each[0] += num_rows - sum(each)
        return Travel.of(each, each, torch.empty(self.size, num_local, dtype=torch.long, device="meta"))

    def exchange(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """New rows, which the link brings."""
        from_others = rows.nbytes * (self.size - 1) / self.size
        self.received_bytes += from_others * self._exchanges.repetitions
        seconds = from_others / (self._rates.panels_gbps * 1e9)
        self._exchanges.begin(seconds, self._rates.latency_seconds).wait()
        return torch.empty_like(rows)
