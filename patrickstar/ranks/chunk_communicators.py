"""The two communicators for all-gathers and reduce-scatters of chunks, and their first messages.

They can be opened before their members are ranks of one world (``passing.connect_ahead``), and passed to the groups of
ranks later. Their holder closes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence

import torch

from patrickstar import _C

_POLL_SECONDS = 0.0005


@dataclasses.dataclass(frozen=True)
class ChunkCommunicators:
    """Two independent communicators of the same members in the same order."""

    gather: _C.collective.Communicator
    """For all-gathers."""
    scatter: _C.collective.Communicator
    """For reduce-scatters and exchanges."""
    connections: contextlib.ExitStack
    """Closes both without waiting for other processes."""

    def close(self) -> None:
        """Aborts running operations, which raise an error, and closes both. Waits for no other process."""
        for communicator in (self.gather, self.scatter):
            # both, before one is closed: an operation of one may be queued behind a waiting operation of the other
            communicator.abort()
        self.connections.close()


def warm_up(
    gather: _C.collective.Communicator,
    scatter: _C.collective.Communicator,
    device: torch.device,
    timeout_seconds: float = math.inf,
) -> None:
    """Connects NCCL's ranks by first messages, which may wait; later enqueues do not.

    Each communicator is connected only for its own operations: all-gathers use other connections than point-to-point
    messages, from which reduce-scatters are made. Each kind takes a third of a second, and memory.

    Args:
        gather, scatter: communicators of the same members.
        device: this process's GPU.
        timeout_seconds: for both; without it, the watch of the ranks ends the wait.

    Raises:
        RankFailure: as :func:`wait_for`.
    """
    memory = torch.zeros(3, gather.size, 4, device=device)
    whole, scratch, shard = (part.data_ptr() for part in memory)
    with torch.cuda.device(device):
        gather.all_gather(whole, 16)
        scatter.reduce_scatter_mean(whole, shard, scratch, 4, _C.DType.FLOAT32)
        wait_for([gather, scatter], device, timeout_seconds)


def wait_for(communicators: Sequence[_C.collective.Communicator], device: torch.device, timeout_seconds: float) -> None:
    """Waits until all work enqueued on a CUDA device's current stream has run.

    Raises:
        RankFailure: another process is gone, or did not arrive within ``timeout_seconds``; all communicators are
            aborted.
    """
    deadline = time.monotonic() + timeout_seconds
    with torch.cuda.device(device):
        done = torch.cuda.Event()
        done.record()
    while not done.query():
        for communicator in communicators:
            communicator.check()
        if time.monotonic() > deadline:
            for communicator in communicators:
                communicator.abort()
            raise _C.RankFailure(f"values of other processes did not come within {timeout_seconds:g} s")
        time.sleep(_POLL_SECONDS)
    for communicator in communicators:
        communicator.check()
