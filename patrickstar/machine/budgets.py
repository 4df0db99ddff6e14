"""Memory budgets of an engine, from the configuration and from the memory that is free."""

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
    """Device bytes, activations included; ``_C.UNLIMITED`` on a simulated device without ``device_memory``."""
    host_bytes: int
    """Host bytes for chunks."""


# Default reserve on a GPU, for loaded kernels and library workspaces, which do not grow with the GPU. NCCL's buffers
# between ranks come on top.
_DEVICE_RESERVE_SHARE = 0.02
_MOST_DEVICE_RESERVE_BYTES = 2**30
_COLLECTIVES_RESERVE_BYTES = 3 * 2**29
# CUDA's own memory in a process that computes on the GPU.
_CONTEXT_BYTES = 2**29


def make_budgets(
    config: Config,
    device: torch.device,
    num_local_ranks: int = 1,
    num_device_ranks: int = 1,
    held_bytes: int = 0,
) -> Budgets:
    """Returns the budgets of ``config`` on ``device``.

    In order of precedence: ``device_memory`` and ``host_memory`` (per rank), the configured ratios, the free memory.
    The ranks of this machine share the host's memory, and ``num_device_ranks`` ranks share one GPU's. No rank may
    allocate before all have measured, except for the ``held_bytes`` of the host that they hold together.

    Engines of one process share one budget; unset values come from the engines that are open.
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
    elif tracer.overall_cpu_mem_ratio is not None:
        host_bytes = int(usable_bytes() * tracer.overall_cpu_mem_ratio) // max(sharers, num_local_ranks)
    else:
        host_bytes = default_budget_bytes(held_bytes, max(sharers, num_local_ranks))
    return Budgets(device_bytes=device_bytes, host_bytes=host_bytes)


def _gpu_bytes(device: torch.device, ratio: float | None, sharers: int, by_nccl: bool) -> int:
    """Bytes for one of ``sharers`` processes: the ratio of the GPU's memory, or the free memory less the reserve.
    Memory that PyTorch holds in this process counts as its own.
    """
    free, total = torch.cuda.mem_get_info(device)
    if ratio is not None:
        return int(total * ratio) // sharers
    own = torch.cuda.memory_reserved(device)
    return max(free // sharers + own - device_reserve_bytes(total, by_nccl), total // 100)


def device_reserve_bytes(total: int, by_nccl: bool) -> int:
    """Bytes of a GPU of ``total`` bytes that an engine leaves free; ``by_nccl``: NCCL connects its ranks."""
    kernels = min(int(total * _DEVICE_RESERVE_SHARE), _MOST_DEVICE_RESERVE_BYTES)
    return kernels + (_COLLECTIVES_RESERVE_BYTES if by_nccl else 0)


def expected_device_bytes(total: int, by_nccl: bool) -> int:
    """The default budget on an otherwise unused GPU of ``total`` bytes; for plans without the GPU."""
    return max(total - _CONTEXT_BYTES - device_reserve_bytes(total, by_nccl), total // 100)
