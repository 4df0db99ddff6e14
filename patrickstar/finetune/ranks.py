"""This process among torchrun's, and communication with the others.

    with joined_ranks() as ranks:
        ranks.say("on rank 0 alone")
        total, = ranks.sums(own)

Usage: ``torchrun --nproc_per_node=2 -m patrickstar finetune ...``; a process started without torchrun is rank 0 of 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from patrickstar import _C


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those of its run. Methods that return a value must be called by all of them."""

    rank: int = 0
    """From 0 to ``size`` - 1."""
    size: int = 1
    """Processes of the run."""

    @property
    def is_first(self) -> bool:
        """True for rank 0, which prints and writes single files."""
        return self.rank == 0

    def say(self, *words: object) -> None:
        """Prints on rank 0."""
        if self.is_first:
            print(*words, flush=True)

    def sums(self, *values: float) -> list[float]:
        """The sum of each value over the ranks."""
        total = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(total)
        return total.tolist()

    def means(self, *values: float) -> list[float]:
        """The mean of each value over the ranks."""
        return [total / self.size for total in self.sums(*values)]

    def from_first(self, values: torch.Tensor | None) -> torch.Tensor:
        """Broadcasts rank 0's tensor (1-dimensional, uint8, on the CPU); the others pass None."""
        if self.size > 1:
            numel = torch.tensor([values.numel() if values is not None else 0])
            dist.broadcast(numel, src=0)
            values = torch.empty(int(numel), dtype=torch.uint8) if values is None else values
            dist.broadcast(values, src=0)
        return values


@contextlib.contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The ranks that torchrun started. Engines inside use their torch.distributed and leave it unchanged."""
    size = int(os.environ.get("WORLD_SIZE") or 1)
    if size == 1:
        yield Ranks()
        return
    if not torch.cuda.is_available():
        # torchrun leaves each rank one thread; all threads for each would be far too many.
        torch.set_num_threads(max(1, _C.num_available_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", size))))
    dist.init_process_group("gloo")  # for numbers on the hosts; an engine makes groups of its own
    try:
        yield Ranks(rank=dist.get_rank(), size=size)
        dist.barrier()
    finally:
        dist.destroy_process_group()
