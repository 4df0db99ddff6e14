"""Memory checks of a resize: whether the new ranks' shards fit, and the largest micro-batches."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from patrickstar import _C
from patrickstar.config import Config
from patrickstar.elastic.sampler import ForActivations
from patrickstar.machine.budgets import Budgets
from patrickstar.machine.host_memory import available_bytes, budget_within, reserve_bytes, usable_bytes
from patrickstar.machine.state_scheme import state_scheme
from patrickstar.module.layouts import make_layout
from patrickstar.planning.micro_batches import most_samples
from patrickstar.ranks.messages import reading
from patrickstar.session.session import Session
from patrickstar.sizes import enough_size, show_exactly, show_shortage, show_size


def layout_for(session: Session, num_ranks: int) -> _C.Layout:
    """Layout of the first of ``num_ranks`` ranks; the shares of the others are equally large."""
    optimizer = session.config.optimizer
    scheme = state_scheme(optimizer)
    return make_layout(session.params_now(), session.chunk_numel, num_ranks, 0, scheme)


def check_room(session: Session, num_ranks: int) -> None:
    """Raises MemoryBudgetError if a rank's parameters and states exceed all configured budgets together.

    Budgets that the configuration leaves open are measured later. The condition is necessary, not sufficient.
    """
    config, on_disk = session.config, _disk_bytes(session.config)
    if config.device_memory is None or config.host_memory is None or on_disk is None:
        return
    layout = layout_for(session, num_ranks)
    needed = sum(layout.chunk(chunk)["resting_tier_bytes"] for chunk in range(layout.num_chunks))
    there = config.device_memory + config.host_memory + on_disk
    if needed > there:
        disk = f", disk_memory.size ({show_size(on_disk)})" if on_disk else ""
        device, host = show_size(config.device_memory), show_size(config.host_memory)
        raise _C.MemoryBudgetError(
            f"parameters and optimizer states of each of {num_ranks} ranks: {show_shortage(needed, there)} "
            f"(device_memory ({device}){disk} and host_memory ({host}) together); keep more ranks, or begin "
            f"again with a host_memory of at least {enough_size(needed - there + config.host_memory)}"
        )


def _disk_bytes(config: Config) -> int | None:
    """Disk bytes for optimizer states; None: unlimited."""
    return 0 if config.disk_memory.path is None else config.disk_memory.size


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """A process's memory before a resize, in JSON's types."""

    host: str
    available_bytes: int
    """Free memory of the host."""
    usable_bytes: int
    """Host memory that the process may use."""
    reserve_bytes: int
    """Host memory that default budgets leave free."""
    held_bytes: int
    """Host memory of its chunks, freed when its core closes."""
    device_bytes: int
    """Its present device budget."""
    device: str
    """UUID of the GPU; empty: simulated."""
    free_device_bytes: int
    """Free memory of its device."""

    @classmethod
    def of(cls, session: Session) -> MemoryFacts:
        """Facts of this process."""
        report = session.report()
        device, free = _device_facts(session.device, report["device_budget_bytes"])
        return cls(
            host=socket.gethostname(),
            available_bytes=available_bytes(),
            usable_bytes=usable_bytes(),
            reserve_bytes=reserve_bytes(),
            held_bytes=report["host_bytes"],
            device_bytes=report["device_budget_bytes"],
            device=device,
            free_device_bytes=free,
        )


def _device_facts(device: torch.device, budget_bytes: int) -> tuple[str, int]:
    """UUID of the GPU, and its free bytes within the budget, including PyTorch's cache."""
    if device.type != "cuda":
        return "", _C.UNLIMITED
    taken = torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - taken
    return str(torch.cuda.get_device_properties(device).uuid), max(min(free, budget_bytes - taken), 0)


def expected_budgets(config: Config, staying: Sequence[MemoryFacts], ending: Sequence[MemoryFacts]) -> list[Budgets]:
    """Budgets that the new ranks will probably measure, where the configuration leaves them open.

    A host's available memory and the memory that its cores free are divided by its new ranks.

    Args:
        config: of all.
        staying: by new rank.
        ending: of processes that leave.
    """
    ratio = config.client.mem_tracer.overall_cpu_mem_ratio
    found = []
    for one in staying:
        here = [other for other in (*staying, *ending) if other.host == one.host]
        num_sharing = sum(other.host == one.host for other in staying)
        there = min(other.available_bytes for other in here) + sum(other.held_bytes for other in here)
        if config.host_memory is not None:
            host_bytes = config.host_memory
        elif ratio is not None:
            host_bytes = int(one.usable_bytes * ratio) // num_sharing
        else:
            host_bytes = budget_within(there, one.reserve_bytes, num_sharing)
        device_bytes = one.device_bytes if config.device_memory is None else config.device_memory
        found.append(Budgets(device_bytes=device_bytes, host_bytes=host_bytes))
    return found


def check_expected_room(session: Session, staying: Sequence[MemoryFacts], ending: Sequence[MemoryFacts]) -> None:
    """Like :func:`check_room`, for the expected budgets. Measured budgets may differ, since other processes take memory
    too.

    Raises:
        MemoryBudgetError: a rank's share exceeds its budgets.
    """
    layout, on_disk = layout_for(session, len(staying)), _disk_bytes(session.config)
    if on_disk is None:
        return
    needed = sum(layout.chunk(chunk)["resting_tier_bytes"] for chunk in range(layout.num_chunks))
    for rank, budgets in enumerate(expected_budgets(session.config, staying, ending)):
        if needed > budgets.device_bytes + budgets.host_bytes + on_disk:
            raise _C.MemoryBudgetError(
                f"each of {len(staying)} ranks has {show_exactly(needed)} of parameters and optimizer states, and rank "
                f"{rank} is expected to have {show_exactly(budgets.device_bytes)} of its device and "
                f"{show_exactly(budgets.host_bytes)} of its host ({staying[rank].host}); keep more ranks, or free "
                "memory there"
            )


def device_rooms(facts: Sequence[MemoryFacts], staying: Sequence[MemoryFacts]) -> list[int]:
    """Bytes that may arrive on each new rank's device; 0 if processes share a GPU, which cannot hold both cores.

    Args:
        facts: by old rank.
        staying: by new rank; staying ranks are the same objects as in ``facts``.
    """
    old = {id(one) for one in facts}
    gpus = [one.device for one in (*facts, *(one for one in staying if id(one) not in old))]
    is_shared = len(set(gpus)) < len(gpus) and set(gpus) != {""}
    return [0 if is_shared else one.free_device_bytes for one in staying]


def check_copies(facts: Sequence[MemoryFacts], copied_bytes: Sequence[int]) -> None:
    """Checks that hosts have room for the copies of a resize.

    Args:
        facts: by old rank.
        copied_bytes: by old rank, of published and kept copies.

    Raises:
        MemoryBudgetError: a host has no room.
    """
    for host in sorted({one.host for one in facts}):
        needed = sum(size for one, size in zip(facts, copied_bytes, strict=True) if one.host == host)
        there = min(one.available_bytes for one in facts if one.host == host)
        if needed > there:
            raise _C.MemoryBudgetError(
                f"the resize copies {show_exactly(needed)} on {host}, where {show_exactly(there)} are available; free "
                "memory there, or save a checkpoint and start as many ranks as you want"
            )


def allowed_micro_batches(session: Session, num_ranks: int, user_state: Mapping[str, Any]) -> dict[str, int]:
    """Largest micro-batch on ``num_ranks`` ranks, by name of each user state that asks for it.

    Computed from the last step on this rank; empty before the first step.
    """
    accesses = session.runtime.timeline()
    asking = {
        name: item
        for name, item in user_state.items()
        if isinstance(item, ForActivations) and item.measured_micro_batch
    }
    if not accesses or not asking:
        return {}
    layout, host_bytes = layout_for(session, num_ranks), session.runtime.report()["host_budget_bytes"]
    limit_bytes = session.runtime.plan_problem()["limit_bytes"]
    return {
        name: most_samples(
            layout,
            accesses,
            samples=item.measured_micro_batch,
            upto=item.global_batch // num_ranks,
            limit_bytes=limit_bytes,
            host_bytes=host_bytes,
            disk_bytes=_disk_bytes(session.config) or 0,
        )
        for name, item in asking.items()
    }


def least_of_all(messages: list[bytes]) -> dict[str, int]:
    """Minimum over all ranks' :func:`allowed_micro_batches`, as JSON."""
    with reading("micro-batches that fit"):
        said = [json.loads(message) for message in messages]
        return {name: min(one[name] for one in said) for name in said[0]}
