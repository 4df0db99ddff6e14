"""How much memory there is: the host's, honestly, and the budgets that the configuration gives."""

from __future__ import annotations

import dataclasses
import os

import torch

from patrickstar import _C
from patrickstar.config import Config
from patrickstar.machine.host_memory import default_budget_bytes, usable_bytes

_ITEM_BYTES = {_C.DType.FLOAT32: 4, _C.DType.BFLOAT16: 2, _C.DType.FLOAT16: 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes that an engine may use."""

    device_bytes: int
    """On the device, activations included; ``_C.UNLIMITED`` on a simulated device without ``device_memory``."""
    host_bytes: int
    """On the host, for chunks."""
    taken_host_bytes: int = 0
    """Of these, what other engines of this process have."""


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
    taken = 0 if shared is None else shared[1] - shared[2]
    return Budgets(device_bytes=device_bytes, host_bytes=host_bytes, taken_host_bytes=taken)


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


def check_host_bytes(layout: _C.Layout, budgets: Budgets) -> None:
    """Whether what does not fit on a device of limited memory fits into host memory, with the largest gradient that is
    on its way there.

    Raises:
        MemoryBudgetError: it does not; the message has the least ``host_memory`` that works.
    """
    if budgets.device_bytes == _C.UNLIMITED or layout.num_chunks == 0:
        return
    chunks = [layout.chunk(index) for index in range(layout.num_chunks)]
    values = [chunk["shard_numel"] * _ITEM_BYTES[chunk["dtype"]] for chunk in chunks]
    homes = [
        num_bytes + (3 * 4 * chunk["shard_numel"] if chunk["trainable"] else 0)
        for num_bytes, chunk in zip(values, chunks, strict=True)
    ]
    device_bytes = int(budgets.device_bytes * _C.INITIAL_DEVICE_SHARE)
    on_host, left = sum(homes), device_bytes
    for num_bytes in homes:  # the first chunks are those that go to the device
        if num_bytes > left:
            break
        left -= num_bytes
        on_host -= num_bytes
    least = on_host + max(values)
    if on_host > 0 and budgets.host_bytes - budgets.taken_host_bytes < least:
        others = f", other engines of this process {budgets.taken_host_bytes}" if budgets.taken_host_bytes > 0 else ""
        raise _C.MemoryBudgetError(
            f"parameters and optimizer states need {sum(homes)} bytes; host memory takes "
            f"{max(budgets.host_bytes - budgets.taken_host_bytes - max(values), 0)} (host_memory is "
            f"{budgets.host_bytes}, of which a gradient on its way takes {max(values)}{others}) and the device "
            f"{device_bytes} before activations; raise host_memory to at least {least + budgets.taken_host_bytes} "
            "bytes, or device_memory"
        )
