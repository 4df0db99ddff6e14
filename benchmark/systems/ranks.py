"""The ranks of one job, as a worker sees them: which one it is, and how it meets the others.

The launcher sets the variables of torchrun and serves torch's store, as torchrun's agent does. A system makes its own
groups of these (``init_torch_group`` for those that use torch's default group); the benchmark itself uses none of them:
its barrier is a key in the store, so that it warms up and waits for nothing that a system uses.
"""

from __future__ import annotations

import dataclasses
import datetime
import os

import torch
import torch.distributed as dist

_LONG = datetime.timedelta(days=1)  # the launcher ends workers that take too long


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Which rank this process is."""

    rank: int
    """From 0 to ``num_ranks`` - 1; all are on this machine, so it is the index of the GPU too."""
    num_ranks: int
    """Processes of the job."""

    @classmethod
    def from_environment(cls) -> RankPlace:
        """By torchrun's variables; one rank without them."""
        return cls(rank=int(os.environ.get("RANK", 0)), num_ranks=int(os.environ.get("WORLD_SIZE", 1)))


class Barrier:
    """Where all ranks wait for each other, some hundred microseconds at most after the last has come."""

    def __init__(self, place: RankPlace):
        self._num_ranks = place.num_ranks
        self._num_passed = 0
        if self._num_ranks > 1:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            server = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=_LONG)
            self._store = dist.PrefixStore("benchmark/barrier", server)

    def wait(self) -> None:
        """Returns when every rank has called it as many times as this one."""
        if self._num_ranks == 1:
            return
        self._num_passed += 1
        arrived, opened = f"{self._num_passed}/arrived", f"{self._num_passed}/open"
        if self._store.add(arrived, 1) == self._num_ranks:
            self._store.set(opened, "1")
        self._store.wait([opened])


def init_torch_group() -> None:
    """torch's default group of all ranks: NCCL for GPUs and gloo for the CPU (offloaded gradients have their norm
    there).
    """
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
