"""How much memory there is: the host's, honestly, and the budgets that the configuration gives."""

from __future__ import annotations

import dataclasses
import os

import torch

from patrickstar import _C
from patrickstar.config import Config
from patrickstar.host_memory import usable_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes that an engine may use."""

    device_bytes: int
    """On the device, activations included; ``_C.UNLIMITED`` on a simulated device without ``device_memory``."""
    host_bytes: int
    """On the host, for chunks."""


def make_budgets(config: Config, device: torch.device, num_local_ranks: int = 1) -> Budgets:
    """The budgets of ``config`` on ``device``: ``device_memory`` and ``host_memory``, which are each rank's, else the
    ratios, of which the ``num_local_ranks`` of this machine share the host's.
    """
    tracer = config.client.mem_tracer
    sharers = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if tracer.use_fake_dist else 1
    if config.device_memory is not None:
        device_bytes = config.device_memory
    elif device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        device_bytes = int(total * tracer.overall_gpu_mem_ratio) // sharers
    else:
        device_bytes = _C.UNLIMITED
    host_bytes = config.host_memory
    if host_bytes is None:
        host_bytes = int(usable_bytes() * tracer.overall_cpu_mem_ratio) // max(sharers, num_local_ranks)
    return Budgets(device_bytes=device_bytes, host_bytes=host_bytes)
