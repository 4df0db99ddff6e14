"""Processes of a Lightning run as ranks: joining them, and the collectives that Lightning asks a strategy for."""

from __future__ import annotations

import atexit
import datetime
import os
from typing import Any

import torch
import torch.distributed as dist


def join_ranks(environment: Any, num_local: int, device: torch.device, timeout_seconds: float) -> None:
    """Initialises ``torch.distributed`` unless somebody did; the engine's own groups are made within it.

    Args:
        environment: Lightning's cluster environment.
        num_local: processes of this run on this node.
        device: this process's.
        timeout_seconds: for the first meeting and the collectives here.
    """
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(num_local))
    if dist.is_initialized():
        return
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )
    atexit.register(_leave_ranks)


def _leave_ranks() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def reduce_over_ranks(value: Any, group: Any, reduce_op: Any) -> Any:
    """The mean, or what ``reduce_op`` says (``"mean"``, ``"sum"``, ... or a ``ReduceOp``), of a tensor over the ranks
    of ``group`` (None: all), as a new tensor; anything else as it is.
    """
    if not isinstance(value, torch.Tensor) or not dist.is_initialized():
        return value
    name = reduce_op.lower() if isinstance(reduce_op, str) else None
    is_mean = reduce_op is None or name in ("mean", "avg")
    operation = dist.ReduceOp.SUM if is_mean else getattr(dist.ReduceOp, name.upper()) if name else reduce_op
    result = value.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, op=operation, group=group)
    return result / dist.get_world_size(group) if is_mean else result


def broadcast_object(value: Any, source: int) -> Any:
    """``value`` of rank ``source``."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, source)
    return values[0]
