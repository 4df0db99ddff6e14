"""The process's side of ``benchmark.launch``: which rank this is, its device, and the lines it sends.

A system creates its own process groups (:func:`init_torch_group` for those that use torch's default group). The
benchmark's barrier is a key in the launcher's store, so it warms up nothing that a system uses.
"""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, TextIO, TypeVar

import torch
import torch.distributed as dist

from benchmark.launch import Outcome

_LONG = datetime.timedelta(days=1)  # the launcher ends processes that take too long
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankPlace:
    """This process's rank. All ranks are on one machine, so it is the GPU's index too."""

    rank: int
    num_ranks: int

    @classmethod
    def from_environment(cls) -> RankPlace:
        """By torchrun's variables; rank 0 of 1 without them."""
        return cls(rank=int(os.environ.get("RANK", 0)), num_ranks=int(os.environ.get("WORLD_SIZE", 1)))


class Barrier:
    """All ranks wait for each other, some hundred microseconds at most after the last has arrived."""

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


class EventWriter:
    """Writes one JSON object per line to the launcher's pipe, so that figures sent before a failure are kept."""

    def __init__(self, pipe: TextIO):
        self._pipe = pipe

    def send(self, event: str, **values: Any) -> None:
        self._pipe.write(json.dumps({"event": event, **values}) + "\n")
        self._pipe.flush()


def init_torch_group() -> None:
    """Torch's default group of all ranks: NCCL for GPUs, gloo for the CPU (norms of offloaded gradients)."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def training_device() -> torch.device:
    """The GPU of this rank, or the CPU where there is none.

    Raises:
        ValueError: there are fewer GPUs than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    place, num_gpus = RankPlace.from_environment(), torch.cuda.device_count()
    if place.num_ranks > num_gpus:
        raise ValueError(f"{place.num_ranks} ranks need a GPU each, this machine has {num_gpus}; run fewer ranks")
    return torch.device("cuda", place.rank)


def limit_device_memory(num_bytes: int | None) -> None:
    """Limits PyTorch's CUDA allocator, as PatrickStar's budget does. No effect for None or without a GPU."""
    device = training_device()
    if num_bytes is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), device)


_Job = TypeVar("_Job")


def work(run: Callable[[_Job, RankPlace, EventWriter], None], kind: type[_Job]) -> None:
    """Runs the job of the command line and ends the process; an exception is sent as the event ``failed``."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # dies with the launcher, in whose session it is not
    job = kind(**json.loads(sys.argv[1]))
    events = EventWriter(os.fdopen(int(sys.argv[2]), "w", encoding="utf-8"))
    exit_code = 0
    try:
        run(job, RankPlace.from_environment(), events)
    except BaseException as error:
        traceback.print_exc()
        events.send("failed", outcome=_outcome(error).value, reason=describe(error))
        exit_code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # destructors of a model of many GB take longer than the kernel's release of its memory


def describe(error: BaseException) -> str:
    """The error's class and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _outcome(error: BaseException) -> Outcome:
    """Allocators report exhausted memory by different classes and words."""
    by_class = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or type(error).__name__ == "MemoryBudgetError"
    by_words = any(words in str(error) for words in ("out of memory", "not enough memory", "can't allocate memory"))
    return Outcome.OUT_OF_MEMORY if by_class or by_words else Outcome.FAILED
