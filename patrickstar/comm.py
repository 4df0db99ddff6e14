"""``deepspeed.comm``: torch.distributed, entered as a DeepSpeed script expects it."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["barrier", "get_local_rank", "get_rank", "get_world_size", "init_distributed", "is_initialized"]


def init_distributed(dist_backend: str | None = None, **accepted: Any) -> None:
    """Enters torch.distributed with what torchrun set in the environment; a process without that is a world of its own.
    Nothing happens when it was entered before.

    Args:
        dist_backend: ``"nccl"``, ``"gloo"``, …; None: NCCL with a GPU, else gloo. Collectives of the engine do not use
            it: they have groups of their own.
        **accepted: ``timeout``, ``init_method``, ``rank`` and ``world_size`` go to ``init_process_group``; DeepSpeed's
            other arguments are accepted.
    """
    if dist.is_initialized():
        return
    if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    wanted = ("timeout", "init_method", "rank", "world_size")
    options = {name: accepted[name] for name in wanted if accepted.get(name) not in (None, -1)}
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl" and not torch.cuda.is_available():
        backend = "gloo"
    alone = not options.get("init_method") and "WORLD_SIZE" not in os.environ
    if alone:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **options)


def is_initialized() -> bool:
    """Whether the default process group of ``torch.distributed`` exists."""
    return dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    """This process among all; 0 for one alone."""
    return dist.get_rank() if is_initialized() else int(os.environ.get("RANK") or 0)


def get_local_rank() -> int:
    """This process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK") or 0)


def get_world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if is_initialized() else int(os.environ.get("WORLD_SIZE") or 1)


def barrier() -> None:
    """Waits until all processes are here."""
    if is_initialized():
        dist.barrier()
