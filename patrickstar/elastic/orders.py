"""What whoever started a run tells it while it trains, and what the run says of itself: through the rendezvous' store.

    store = serve_rendezvous("127.0.0.1", 29600)   # processes have its environment
    orders = Orders(store)
    number = orders.resize(4)            # and start the processes that join
    orders.outcome(number)               # None until the run has carried it out or refused it
    orders.report()

The other side is :class:`patrickstar.elastic.ElasticRun`.
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
    """What a run is told to do, at its next look."""

    RESIZE = "resize"
    STOP = "stop"
    """To end between two steps, with a checkpoint where the run keeps them."""


@dataclasses.dataclass(frozen=True)
class Order:
    """One of them; they are carried out in the order in which they were given."""

    kind: OrderKind
    num_ranks: int = 0
    """From then on, of :attr:`OrderKind.RESIZE`."""
    leaving: tuple[int, ...] | None = None
    """Ranks that end; None: the run decides (``Engine.resize``)."""


class OutcomeKind(enum.Enum):
    """What became of an order."""

    DONE = "done"
    REFUSED = "refused"
    """The run goes on as before."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an order ended."""

    kind: OutcomeKind
    reason: str
    """Why it was refused; empty where it was not."""
    seconds: float
    """Without training."""


@dataclasses.dataclass(frozen=True)
class RunReport:
    """What a run says of itself at each look, of the time since the look before it."""

    num_steps: int
    """Optimizer steps from the run's beginning, checkpoints and resizes included."""
    num_ranks: int
    seconds_per_step: float
    """Resizes and checkpoints left out; 0 before the first whole interval."""
    loss: float | None
    """As the script gave it last, of rank 0; None: it gave none."""
    checkpoint_steps: int
    """Steps of the last complete checkpoint; 0: there is none."""
    has_ended: bool
    """The script has ended its run, or has stopped as it was ordered."""


@dataclasses.dataclass(frozen=True)
class Look:
    """What all ranks know after a look ([Note: looks], elastic/run.py)."""

    order: Order | None
    """To be carried out now."""
    next_step: int
    """After this step is the next look."""
    saves: bool
    """A checkpoint is due."""


class OrderBoard:
    """The keys of both sides in a store."""

    def __init__(self, store: dist.Store):
        self._base = store  # [Note: references to stores]
        self._store = dist.PrefixStore(_PREFIX, store)

    def issue(self, order: Order) -> int:
        """Adds an order; gives its number, from 1."""
        number = self._store.add("issued", 1)
        self._set(f"order/{number}", _fields(order))
        return number

    def order(self, number: int) -> Order | None:
        """The order of that number, if it was given."""
        return _order(self._get(f"order/{number}"))

    def first_open_order(self) -> int:
        """The number of the first that has no outcome: of a run that goes on from a checkpoint not the first of all."""
        number = 1
        while self.outcome(number) is not None:
            number += 1
        return number

    def tell(self, step: int, look: Look) -> None:
        """Rank 0 tells the others what it saw after so many steps."""
        told = {"order": None if look.order is None else _fields(look.order)}
        self._set(f"look/{step}", {**told, "next_step": look.next_step, "saves": look.saves})

    def told(self, step: int) -> Look:
        """What it told, which is there."""
        fields = self._get(f"look/{step}")
        assert fields is not None
        return Look(order=_order(fields["order"]), next_step=fields["next_step"], saves=fields["saves"])

    def look_key(self, step: int) -> str:
        """The key of that look in the store."""
        return f"{_PREFIX}/look/{step}"

    def conclude(self, number: int, outcome: Outcome) -> None:
        """Says how it ended."""
        self._set(f"outcome/{number}", {**dataclasses.asdict(outcome), "kind": outcome.kind.value})

    def outcome(self, number: int) -> Outcome | None:
        """How it ended, if it did."""
        fields = self._get(f"outcome/{number}")
        return None if fields is None else Outcome(OutcomeKind(fields["kind"]), fields["reason"], fields["seconds"])

    def write_report(self, report: RunReport) -> None:
        """Replaces the one before."""
        self._set("report", dataclasses.asdict(report))

    def report(self) -> RunReport | None:
        """The last one; None before the first look."""
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
    return Order(OrderKind(fields["kind"]), fields["num_ranks"], None if leaving is None else tuple(leaving))


class Orders:
    """For the process that serves the rendezvous and starts the others.

    Args:
        store: of :func:`patrickstar.elastic.serve_rendezvous`, of this run alone.
    """

    def __init__(self, store: dist.Store):
        self._board = OrderBoard(store)

    def resize(self, num_ranks: int, leaving: Sequence[int] | None = None) -> int:
        """Orders as many ranks; processes that are to join are for the caller to start. Gives the order's number.

        Raises:
            ValueError: fewer than one rank.
        """
        if num_ranks < 1:
            raise ValueError(f"num_ranks is {num_ranks}; give at least 1, or order the run to stop")
        return self._board.issue(Order(OrderKind.RESIZE, num_ranks, None if leaving is None else tuple(leaving)))

    def stop(self) -> int:
        """Orders the run to end between two steps. Gives the order's number."""
        return self._board.issue(Order(OrderKind.STOP))

    def outcome(self, number: int) -> Outcome | None:
        """What became of that order; None: not carried out yet."""
        return self._board.outcome(number)

    def report(self) -> RunReport | None:
        """What the run said last; None before its first look."""
        return self._board.report()
