"""The two communicators in which chunks are gathered and scattered, and their first messages.

They may be opened before their members are ranks of one world (``passing.connect_ahead``), and given to the groups of
ranks as these open. Whoever has them closes them.
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
    """Of the same members in the same order."""

    gather: _C.collective.Communicator
    """For all-gathers."""
    scatter: _C.collective.Communicator
    """For reduce-scatters and exchanges, independent of ``gather``."""
    connections: contextlib.ExitStack
    """Ends both, whatever other processes do."""

    def close(self) -> None:
        """Waits for no other process: what is under way ends with an error."""
        for communicator in (self.gather, self.scatter):
            communicator.abort()  # both, before one is closed: what one has begun may be behind what waits in another
        self.connections.close()


def warm_up(
    gather: _C.collective.Communicator,
    scatter: _C.collective.Communicator,
    device: torch.device,
    timeout_seconds: float = math.inf,
) -> None:
    """NCCL connects ranks at their first messages, which may wait; from then on enqueuing does not. Each communicator
    is connected for what it is for: all-gathers take other connections than messages between two ranks, of which a
    scatter is made, and each kind takes a third of a second and memory.

    Args:
        gather, scatter: of the same members.
        device: this process's GPU.
        timeout_seconds: for all of it; without, whoever watches the ranks ends it.

    Raises:
        RankFailure: of :func:`wait_for`.
    """
    memory = torch.zeros(3, gather.size, 4, device=device)
    whole, scratch, shard = (part.data_ptr() for part in memory)
    with torch.cuda.device(device):
        gather.all_gather(whole, 16)
        scatter.reduce_scatter_mean(whole, shard, scratch, 4, _C.DType.FLOAT32)
        wait_for([gather, scatter], device, timeout_seconds)


def wait_for(communicators: Sequence[_C.collective.Communicator], device: torch.device, timeout_seconds: float) -> None:
    """Until all that was enqueued on the current stream of a CUDA device has run.

    Raises:
        RankFailure: another process is gone, or has not come within ``timeout_seconds``; all are aborted then.
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
