"""``deepspeed.comm``: torch.distributed, initialised as DeepSpeed scripts expect. Functions that are not here, such as
``all_reduce``, are torch.distributed's.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["barrier", "get_local_rank", "get_rank", "get_world_size", "init_distributed", "is_initialized"]


def init_distributed(dist_backend: str | None = None, **accepted: Any) -> None:
    """Initialises torch.distributed from torchrun's environment; a process without it is a world of its own. Does
    nothing if it is initialised.

    Args:
        dist_backend: ``"nccl"``, ``"gloo"``, …; None: NCCL with a GPU, else gloo. The engine's collectives use groups
            of their own.
        **accepted: ``timeout``, ``init_method``, ``rank`` and ``world_size`` go to ``init_process_group``; DeepSpeed's
            other arguments are ignored.
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
    """True if the default process group of ``torch.distributed`` exists."""
    return dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    """This process's rank; 0 for a single process."""
    return dist.get_rank() if is_initialized() else int(os.environ.get("RANK") or 0)


def get_local_rank() -> int:
    """This process's rank on its machine."""
    return int(os.environ.get("LOCAL_RANK") or 0)


def get_world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if is_initialized() else int(os.environ.get("WORLD_SIZE") or 1)


def barrier() -> None:
    """Waits for all processes."""
    if is_initialized():
        dist.barrier()


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not hasattr(dist, name):
        raise AttributeError(f"neither patrickstar.comm nor torch.distributed has {name!r}")
    return getattr(dist, name)
