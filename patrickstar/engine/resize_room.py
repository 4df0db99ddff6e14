"""What memory says about other ranks: whether their shares fit, and how large their micro-batches may be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from patrickstar import _C
from patrickstar.elastic.sampler import OfTide
from patrickstar.engine.session import Session
from patrickstar.machine.engine_options import state_scheme
from patrickstar.module.preprocess import make_layout
from patrickstar.planning.micro_batches import most_samples
from patrickstar.ranks.messages import reading


def layout_for(session: Session, num_ranks: int) -> _C.Layout:
    """Of the first of so many ranks; the others' shares are as large."""
    optimizer = session.config.optimizer
    scheme = state_scheme(optimizer.states, optimizer.speculation, num_ranks)
    return make_layout(session.params_now(), session.chunk_numel, num_ranks, 0, scheme)


def check_room(session: Session, num_ranks: int) -> None:
    """A rank's share of parameters and optimizer states is not more than both budgets together, where the configuration
    gives both: others are measured when ranks are opened. That is needed, and not always enough.
    """
    config = session.config
    if config.device_memory is None or config.host_memory is None:
        return
    layout = layout_for(session, num_ranks)
    needed = sum(layout.chunk(chunk)["home_bytes"] for chunk in range(layout.num_chunks))
    there = config.device_memory + config.host_memory
    if needed > there:
        raise _C.MemoryBudgetError(
            f"each of {num_ranks} ranks has {needed} bytes of parameters and optimizer states, and device_memory "
            f"({config.device_memory}) and host_memory ({config.host_memory}) are {there} together; keep more ranks, "
            f"or begin again with a host_memory of at least {needed - config.device_memory} bytes"
        )


def allowed_micro_batches(session: Session, num_ranks: int, carried: Mapping[str, Any]) -> dict[str, int]:
    """By name of what is carried and wants to know: the most samples that a micro-batch may have on so many ranks, by
    the last step on this rank. Nothing before the first step.
    """
    moments = session.runtime.timeline()
    asking = {name: item for name, item in carried.items() if isinstance(item, OfTide) and item.measured_micro_batch}
    if not moments or not asking:
        return {}
    layout, host_bytes = layout_for(session, num_ranks), session.runtime.report()["host_budget_bytes"]
    limit_bytes = session.runtime.plan_problem()["limit_bytes"]
    return {
        name: most_samples(
            layout,
            moments,
            samples=item.measured_micro_batch,
            upto=item.global_batch // num_ranks,
            limit_bytes=limit_bytes,
            host_bytes=host_bytes,
        )
        for name, item in asking.items()
    }


def least_of_all(messages: list[bytes]) -> dict[str, int]:
    """Of what ranks say :func:`allowed_micro_batches` is on each, as JSON."""
    with reading("micro-batches that fit"):
        said = [json.loads(message) for message in messages]
        return {name: min(one[name] for one in said) for name in said[0]}
