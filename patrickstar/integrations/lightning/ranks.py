"""Processes of a Lightning run as ranks: joining them, and the strategy's collectives."""

from __future__ import annotations

import atexit
import datetime
import os
from typing import Any

import torch
import torch.distributed as dist

from patrickstar.integrations.lightning.package import pl


class RankedStrategy(pl.strategies.ParallelStrategy):
    """A strategy of one process per device: ranks, launch and communication.

    Args:
        timeout_seconds: for the processes' first meeting and for these collectives.
        **kwargs: of ``ParallelStrategy``.
    """

    def __init__(self, timeout_seconds: float, **kwargs: Any):
        super().__init__(**kwargs)
        self._timeout_seconds = timeout_seconds
        self.num_nodes = 1
        """Number of machines in the run; the ``Trainer`` sets it."""

    @property
    def root_device(self) -> torch.device:
        """The compute device of this process, by its local rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Number of processes on this node, one per device."""
        return len(self.parallel_devices or ())

    @property
    def is_distributed(self) -> bool:
        """True if Lightning must shard the data over ranks."""
        return self.world_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """This rank's share of the data, as arguments of ``DistributedSampler``."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Sets this process's rank in Lightning's environment, and for rank-zero logging."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        pl.utilities.rank_zero.rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        if self.num_processes * self.num_nodes > 1:
            launcher = pl.strategies.launchers._SubprocessScriptLauncher
            self._launcher = launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Joins the ranks and sets the device; called before the module's ``setup``."""
        super().setup_environment()
        self.set_world_ranks()
        if self.world_size > 1:
            _join_ranks(self.cluster_environment, self.num_processes, self.root_device, self._timeout_seconds)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a metric over the ranks: the mean, or ``reduce_op``."""
        return _reduce(tensor, group, reduce_op)

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks; returns at once if ``torch.distributed`` is not initialized."""
        if dist.is_initialized():
            dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcasts ``obj`` from rank ``src``."""
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]


def _join_ranks(environment: Any, num_local: int, device: torch.device, timeout_seconds: float) -> None:
    """Initialises ``torch.distributed`` if necessary; the engine makes its own groups in it.

    Args:
        environment: Lightning's cluster environment.
        num_local: processes of this run on this node.
        device: of this process.
        timeout_seconds: for the first meeting and these collectives.
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


def _reduce(value: Any, group: Any, reduce_op: Any) -> Any:
    """Reduces a tensor over the ranks of ``group`` (None: all) to a new tensor: the mean, or ``reduce_op`` (``"mean"``,
    ``"sum"``, ... or a ``ReduceOp``). Other values are returned unchanged.
    """
    if not isinstance(value, torch.Tensor) or not dist.is_initialized():
        return value
    name = reduce_op.lower() if isinstance(reduce_op, str) else None
    is_mean = reduce_op is None or name in ("mean", "avg")
    operation = dist.ReduceOp.SUM if is_mean else getattr(dist.ReduceOp, name.upper()) if name else reduce_op
    result = value.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, op=operation, group=group)
    return result / dist.get_world_size(group) if is_mean else result
