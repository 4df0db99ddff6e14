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
# they are used; NCCL has buffers beside.
_DEVICE_RESERVE_SHARE = 0.02
_COLLECTIVES_RESERVE_BYTES = 3 * 2**29


def make_budgets(config: Config, device: torch.device, num_local_ranks: int = 1) -> Budgets:
    """The budgets of ``config`` on ``device``: ``device_memory`` and ``host_memory``, which are each rank's, else the
    ratios that it gives, else what is free; the ``num_local_ranks`` of this machine share the host's.

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
        device_bytes = _gpu_bytes(device, tracer.overall_gpu_mem_ratio, sharers, num_local_ranks)
    else:
        device_bytes = _C.UNLIMITED
    if config.host_memory is not None:
        host_bytes = config.host_memory
    elif shared is not None:
        host_bytes = shared[1]
    else:
        ratio = tracer.overall_cpu_mem_ratio
        host_bytes = default_budget_bytes() if ratio is None else int(usable_bytes() * ratio)
        host_bytes //= max(sharers, num_local_ranks)
    return Budgets(device_bytes=device_bytes, host_bytes=host_bytes)


def _gpu_bytes(device: torch.device, ratio: float | None, sharers: int, num_local_ranks: int) -> int:
    """The ratio of the GPU's memory; without one what other processes leave of it, less what is used outside of
    PyTorch's allocator. ``sharers`` processes divide it.
    """
    free, total = torch.cuda.mem_get_info(device)
    if ratio is not None:
        return int(total * ratio) // sharers
    reserve = int(total * _DEVICE_RESERVE_SHARE) + (_COLLECTIVES_RESERVE_BYTES if num_local_ranks > 1 else 0)
    own = torch.cuda.memory_reserved(device)
    left = free + own if sharers == 1 else total // sharers
    return max(left - reserve, total // 100)
