"""Orders to a running elastic run, and its reports, through the rendezvous' store.

    store = serve_rendezvous("127.0.0.1", 29600)   # processes have its environment
    orders = Orders(store)
    number = orders.resize(4)            # and start the joining processes
    orders.outcome(number)               # None until the run has carried it out or refused it
    orders.report()

The run's side is :class:`patrickstar.elastic.ElasticRun`.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

_PREFIX = "patrickstar/orders"


class OrderKind(enum.Enum):
    """Kinds of orders, carried out at the run's next check."""

    RESIZE = "resize"
    STOP = "stop"
    """End between two steps, with a checkpoint if the run keeps them."""


@dataclasses.dataclass(frozen=True)
class Order:
    """An order; orders are carried out in the order of issue."""

    kind: OrderKind
    num_ranks: int = 0
    """For :attr:`OrderKind.RESIZE`: the new number of ranks."""
    leaving: tuple[int, ...] | None = None
    """Ranks that end; None: the run decides (``Engine.resize``)."""
    global_batch: int = 0
    """For :attr:`OrderKind.RESIZE`: the new global batch, in samples; 0: it stays."""


class OutcomeKind(enum.Enum):
    """Results of an order."""

    DONE = "done"
    REFUSED = "refused"
    """The run goes on unchanged."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of an order."""

    kind: OutcomeKind
    reason: str
    """Why it was refused; empty otherwise."""
    seconds: float
    """Seconds without training."""


@dataclasses.dataclass(frozen=True)
class RunReport:
    """Report of a run at each check, about the time since the last one."""

    num_steps: int
    """Optimizer steps since the run's start, across checkpoints and resizes."""
    num_ranks: int
    seconds_per_step: float
    """Excluding resizes and checkpoints; 0 before the first whole interval."""
    loss: float | None
    """The script's last loss on rank 0; None if it gave none."""
    checkpoint_steps: int
    """Steps of the last complete checkpoint; 0: there is none."""
    has_ended: bool
    """The script has ended its run, or was stopped by an order."""
    num_samples: int = 0
    """Samples of these steps; 0 if no user state has a batch."""
    global_batch: int = 0
    """Samples of each of the interval's steps; 0: unknown."""
    noise_scale: float | None = None
    """The gradient noise scale, in samples; None: unknown (docs/guides/elastic.md)."""
    num_lost: int = 0
    """Ranks that were lost since the run's start, without which it goes on."""
    redundancy: int | None = None
    """See :class:`ElasticRun`; None: a lost rank ends the run."""
    num_parameters: int = 0
    """Parameters of the model, on all ranks together; 0: unknown."""


@dataclasses.dataclass(frozen=True)
class Look:
    """Common result of a check on all ranks (`ElasticRun`)."""

    order: Order | None
    """The order to carry out now, if any."""
    next_step: int
    """The step after which the next check takes place."""
    saves: bool
    """A checkpoint is due."""


class OrderBoard:
    """The store's keys of both sides."""

    def __init__(self, store: dist.Store):
        self._base = store  # keeps the store alive ([Note: references to stores])
        self._store = dist.PrefixStore(_PREFIX, store)

    def issue(self, order: Order) -> int:
        """Adds an order; returns its number, from 1."""
        number = self._store.add("issued", 1)
        self._set(f"order/{number}", _fields(order))
        return number

    def order(self, number: int) -> Order | None:
        """The order of that number, or None."""
        return _order(self._get(f"order/{number}"))

    def first_open_order(self) -> int:
        """The number of the first order without an outcome. After a restart from a checkpoint it may be
        greater than 1.
        """
        number = 1
        while self.outcome(number) is not None:
            number += 1
        return number

    def tell(self, step: int, look: Look, *, recoveries: int = 0) -> None:
        """Writes rank 0's result of the check after so many steps, for the other ranks. A step that is repeated after
        a recovery has another check.
        """
        told = {"order": None if look.order is None else _fields(look.order)}
        self._set(f"look/{recoveries}/{step}", {**told, "next_step": look.next_step, "saves": look.saves})

    def told(self, step: int, *, recoveries: int = 0) -> Look:
        """Reads the result that rank 0 has written."""
        fields = self._get(f"look/{recoveries}/{step}")
        assert fields is not None
        return Look(order=_order(fields["order"]), next_step=fields["next_step"], saves=fields["saves"])

    def look_key(self, step: int, *, recoveries: int = 0) -> str:
        """The store's key of the check after so many steps."""
        return f"{_PREFIX}/look/{recoveries}/{step}"

    def refuse_resizes(self, first: int, reason: str) -> int:
        """Refuses orders from ``first`` on until one that is no resize. Returns the number of the next order."""
        number = first
        while (order := self.order(number)) is not None and order.kind is OrderKind.RESIZE:
            self.conclude(number, Outcome(OutcomeKind.REFUSED, reason, 0.0))
            number += 1
        return number

    def conclude(self, number: int, outcome: Outcome) -> None:
        """Records an order's outcome."""
        self._set(f"outcome/{number}", {**dataclasses.asdict(outcome), "kind": outcome.kind.value})

    def outcome(self, number: int) -> Outcome | None:
        """The order's outcome, or None."""
        fields = self._get(f"outcome/{number}")
        return None if fields is None else Outcome(OutcomeKind(fields["kind"]), fields["reason"], fields["seconds"])

    def write_report(self, report: RunReport) -> None:
        """Replaces the report."""
        self._set("report", dataclasses.asdict(report))

    def report(self) -> RunReport | None:
        """The last report; None before the first check."""
        fields = self._get("report")
        return None if fields is None else RunReport(**fields)

    def _set(self, key: str, value: dict[str, Any]) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str) -> dict[str, Any] | None:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


def _fields(order: Order) -> dict[str, Any]:
    return {**dataclasses.asdict(order), "kind": order.kind.value}


def _order(fields: dict[str, Any] | None) -> Order | None:
    if fields is None:
        return None
    leaving = fields["leaving"]
    left = None if leaving is None else tuple(leaving)
    return Order(OrderKind(fields["kind"]), fields["num_ranks"], left, fields["global_batch"])


class Orders:
    """Issues orders; for the process that serves the rendezvous and starts the others.

    Args:
        store: from :func:`patrickstar.elastic.serve_rendezvous`, for this run alone.
    """

    def __init__(self, store: dist.Store):
        self._board = OrderBoard(store)

    def resize(self, num_ranks: int, leaving: Sequence[int] | None = None, global_batch: int = 0) -> int:
        """Orders a resize and returns the order's number. The caller must start the joining processes.

        Args:
            num_ranks: from now on; may be the present number.
            leaving: ranks that end; None: the run decides.
            global_batch: samples of a step from now on; 0: it stays.

        Raises:
            ValueError: fewer than one rank, or a negative batch.
        """
        if global_batch < 0:
            raise ValueError(f"global_batch is {global_batch}; give at least 1, or 0 to keep the present one")
        if num_ranks < 1:
            raise ValueError(f"num_ranks is {num_ranks}; give at least 1, or order the run to stop")
        left = None if leaving is None else tuple(leaving)
        return self._board.issue(Order(OrderKind.RESIZE, num_ranks, left, global_batch))

    def stop(self) -> int:
        """Orders the run to end between two steps. Returns the order's number."""
        return self._board.issue(Order(OrderKind.STOP))

    def outcome(self, number: int) -> Outcome | None:
        """The order's outcome; None: not carried out yet."""
        return self._board.outcome(number)

    def report(self) -> RunReport | None:
        """The run's last report; None before its first check."""
        return self._board.report()
