"""A process's rank, node and device in a run."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedContext:
    """The numbers of this process among the ranks of a run, and its device."""

    rank: int = 0
    """From 0 to `world_size` - 1, over all nodes."""
    world_size: int = 1
    """Number of processes in the run, over all nodes."""
    local_rank: int = 0
    """From 0 to `local_world_size` - 1 on this node; the index of this process's GPU, unless ranks share GPUs."""
    local_world_size: int = 1
    """Processes of the run on this node; they share its cores, memory and links."""
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    """The device on which this process computes."""
    num_device_ranks: int = 1
    """Ranks of the run on this process's GPU, itself included; simulated devices are never shared."""


def make_context(
    rank: int,
    world_size: int,
    hosts: Callable[[], Mapping[int, str]] = dict,
    *,
    local_rank: int | None,
    device_type: str,
    device_index: int | None,
) -> DistributedContext:
    """The context of a rank, from LOCAL_RANK and LOCAL_WORLD_SIZE of the environment.

    Args:
        hosts: returns :func:`host_name` of each rank; called if there are several ranks and the environment does not
            give their nodes.
        local_rank: overrides LOCAL_RANK.
        device_type: "cpu" or "cuda".
        device_index: the GPU's index; None: ``local_rank``.
    """
    told_rank, told_size = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    if world_size == 1:
        local_rank = int(told_rank or 0) if local_rank is None else local_rank
        local_world_size = 1
    elif told_rank is not None and told_size is not None:
        local_rank = int(told_rank) if local_rank is None else local_rank
        local_world_size = int(told_size)
    else:
        mine = [other for other, host in hosts().items() if host == host_name()]
        if local_rank is None:
            local_rank = int(told_rank) if told_rank is not None else mine.index(rank)
        local_world_size = len(mine)
    index = local_rank if device_index is None else device_index
    device = torch.device("cuda", index) if device_type == "cuda" else torch.device("cpu")
    return DistributedContext(
        rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size, device=device
    )


def host_name() -> str:
    """A name that processes on one node share; containers on one machine count as separate nodes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
