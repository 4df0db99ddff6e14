"""Short training runs that several proofs share: an engine, its steps, and all that a checkpoint must bring back."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from patrickstar.runtime import initialize_engine
from proofs.failing_allocations import TOKENS, Net

SCARCE = 110_000  # bytes of device memory: less than the model takes


def config(*, on_device: bool = False, speculation: str = "auto", **more: Any) -> dict[str, Any]:
    """An engine's configuration with small chunks, so that a step has many transfers."""
    params = {"lr": 2e-3, "weight_decay": 0.01, "use_hybrid_adam": on_device}
    optimizer = {"type": "AdamW", "params": params, "speculation": speculation}
    return {"optimizer": optimizer, "default_chunk_size": 2048, "bf16": {"enabled": True}, **more}


def in_8_bits() -> Run:
    """A run with moments in 8 bits, of which the device has no room for all chunks."""
    options = config(device_memory=300_000)
    options["optimizer"]["states"] = "8bit"
    return Run(options, functools.partial(Net, 64))  # smaller matrices keep float32


def on_disk(folder: Path, io: str = "threads") -> dict[str, Any]:
    """A configuration whose optimizer states pass through a file in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    disk = {"path": str(folder), "size": "1GiB", "io": io}
    return config(device_memory=200_000, host_memory=200_000, disk_memory=disk)


class Run:
    """A model in training; step n has the same batch in each run."""

    def __init__(self, options: dict[str, Any] | None = None, net: Callable[[], torch.nn.Module] = Net):
        random.seed(1)  # forks of a process begin with other numbers
        torch.manual_seed(1)
        self.engine, self.optimizer = initialize_engine(net, 0, options or config())

    def step(self, number: int) -> float:
        """One step; returns the loss."""
        rank, size = int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
        generator = torch.Generator().manual_seed(number * size + rank)
        loss = self.engine(torch.randint(0, TOKENS, (2, 4), generator=generator))
        self.engine.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def steps(self, begin: int, end: int) -> list[float]:
        """Losses of steps from ``begin`` on, before ``end``."""
        return [self.step(number) for number in range(begin, end)]

    def state(self) -> dict[str, Any]:
        """Parameters, optimizer states, number of steps."""
        states = self.optimizer.state_dict()["state"]
        return {"model": self.engine.state_dict(), "optimizer": states, "steps": self.engine._session.num_steps}

    def close(self) -> None:
        """Closes the engine."""
        self.engine.close()


def trained(num_steps: int, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """The state after so many steps without a fault."""
    run = Run(options)
    run.steps(0, num_steps)
    state = run.state()
    run.close()
    return state


def files(folder: Path) -> dict[str, bytes]:
    """Contents of a checkpoint's files by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def num_descriptors() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208
