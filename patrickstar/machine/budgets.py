"""How much memory there is: the host's, honestly, and the budgets that the configuration gives."""

from __future__ import annotations

import dataclasses
import os

import torch

from patrickstar import _C
from patrickstar.config import Config
from patrickstar.machine.host_memory import default_budget_bytes, usable_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes that an engine may use."""

    device_bytes: int
    """On the device, activations included; ``_C.UNLIMITED`` on a simulated device without ``device_memory``."""
    host_bytes: int
    """On the host, for chunks."""


# What of a GPU an engine leaves when nobody says: kernels are loaded, and libraries take workspaces of their own, as
# they are used, which is no more on a large GPU; NCCL, where it connects ranks, has buffers beside.
_DEVICE_RESERVE_SHARE = 0.02
_MOST_DEVICE_RESERVE_BYTES = 2**30
_COLLECTIVES_RESERVE_BYTES = 3 * 2**29
# What CUDA itself takes of a GPU in a process that computes there.
_CONTEXT_BYTES = 2**29


def make_budgets(
    config: Config,
    device: torch.device,
    num_local_ranks: int = 1,
    num_device_ranks: int = 1,
    held_bytes: int = 0,
) -> Budgets:
    """The budgets of ``config`` on ``device``: ``device_memory`` and ``host_memory``, which are each rank's, else the
    ratios that it gives, else what is free; the ``num_local_ranks`` of this machine share the host's, and the
    ``num_device_ranks`` on one GPU share that one's. None of them may take memory before all have asked, but for the
    ``held_bytes`` of the host that they have together and go on using.

    Engines of one process share one budget: what this configuration does not give is that of those that are open.
    """
    tracer = config.client.mem_tracer
    sharers = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if tracer.use_fake_dist else 1
    shared = _C.shared_budgets(device.index if device.type == "cuda" else -1)
    if config.device_memory is not None:
        device_bytes = config.device_memory
    elif shared is not None and tracer.overall_gpu_mem_ratio is None:
        device_bytes = shared[0]
    elif device.type == "cuda":
        by_nccl = num_local_ranks > 1 and num_device_ranks == 1
        device_sharers = num_device_ranks if num_local_ranks > 1 else sharers
        device_bytes = _gpu_bytes(device, tracer.overall_gpu_mem_ratio, device_sharers, by_nccl)
    else:
        device_bytes = _C.UNLIMITED
    if config.host_memory is not None:
        host_bytes = config.host_memory
    elif shared is not None:
        host_bytes = shared[1]
    else:
        ratio = tracer.overall_cpu_mem_ratio
        host_bytes = default_budget_bytes(held_bytes) if ratio is None else int(usable_bytes() * ratio)
        host_bytes //= max(sharers, num_local_ranks)
    return Budgets(device_bytes=device_bytes, host_bytes=host_bytes)


def _gpu_bytes(device: torch.device, ratio: float | None, sharers: int, by_nccl: bool) -> int:
    """The ratio of the GPU's memory; without one what other processes leave of it, less what is used outside of
    PyTorch's allocator. ``sharers`` processes divide it; what PyTorch holds in this one is its own.
    """
    free, total = torch.cuda.mem_get_info(device)
    if ratio is not None:
        return int(total * ratio) // sharers
    own = torch.cuda.memory_reserved(device)
    return max(free // sharers + own - device_reserve_bytes(total, by_nccl), total // 100)


def device_reserve_bytes(total: int, by_nccl: bool) -> int:
    """What an engine leaves of a GPU of ``total`` bytes; ``by_nccl``: NCCL connects its ranks."""
    kernels = min(int(total * _DEVICE_RESERVE_SHARE), _MOST_DEVICE_RESERVE_BYTES)
    return kernels + (_COLLECTIVES_RESERVE_BYTES if by_nccl else 0)


def expected_device_bytes(total: int, by_nccl: bool) -> int:
    """The budget that an engine would take of a GPU of ``total`` bytes which nobody else uses, for plans without it."""
    return max(total - _CONTEXT_BYTES - device_reserve_bytes(total, by_nccl), total // 100)
