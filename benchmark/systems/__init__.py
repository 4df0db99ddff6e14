"""The systems that ``benchmark.compare`` runs.

A *system* is one way to train a model: PatrickStar or a peer. Each has a module in this package whose functions
``build_*`` turn a :class:`Job` into a :class:`System`. All of them get the same job: the same model code, values,
batches and optimizer. A worker process per rank (``worker.py``) trains one system; the parent (``launcher.py``) imports
neither the systems nor CUDA.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any, Protocol

import torch

from benchmark.common import SHAPES, Shape

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
"""The optimizer of every system, over float32 master weights."""


COMPILED = ("no", "blocks", "whole")
"""What of a model ``torch.compile`` compiles: nothing, each transformer block by itself as torchtitan does, or all of
it in one call, which the system then cuts as it has to.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What the workers of one run train, and within which limits."""

    system: str
    """A key of :data:`SYSTEMS`."""
    model: str
    """A key of ``SHAPES``."""
    ranks: int
    """Worker processes, each with a GPU of its own (if there are any)."""
    length: int
    """Tokens per sequence."""
    batch: int
    """Sequences per step of each rank, or of the ranks that share matrices."""
    clipping: float
    """Largest global norm of the gradients; 0: no clipping."""
    speculation: str
    """PatrickStar's ``optimizer.speculation``."""
    gpu_bytes: int | None
    """Limit on device memory of each rank; None: the whole GPU."""
    host_bytes: int | None
    """Limit on host memory of all ranks together; None: none."""
    warmup: int
    """Steps before the timed ones."""
    steps: int
    """Timed steps."""
    compiled: str = "no"
    """One of :data:`COMPILED`."""
    states: str = "fp32"
    """PatrickStar's ``optimizer.states``."""
    master: str = "exact"
    """PatrickStar's ``optimizer.master``."""
    rows: int = 1
    """PatrickStar's ``tensor_parallel.rows``."""
    columns: int = 1
    """PatrickStar's ``tensor_parallel.columns``."""
    chunk_numel: int = 64 * 2**20
    """PatrickStar's ``default_chunk_size``."""

    @property
    def ranks_per_batch(self) -> int:
        """How many ranks are called with the same sequences."""
        return self.rows * self.columns

    @property
    def shape(self) -> Shape:
        """The model's shape at this sequence length."""
        return dataclasses.replace(SHAPES[self.model], length=self.length)


class System(Protocol):
    """A rank's part of a model with its optimizer, ready to train. It lives as long as its process."""

    version: str
    """Of the package that trains."""
    settings: dict[str, Any]
    """What this system was given beyond the job, for the record."""
    device: torch.device
    """Where batches go."""

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Forward, backward and update; returns the loss of this rank's batch before the update."""
        ...

    def grad_norm(self) -> float | None:
        """Global norm of the last step's gradients, before clipping; None where it was not computed."""
        ...

    def report(self) -> dict[str, Any]:
        """The system's own figures; ``device_peak_bytes`` among them if PyTorch's CUDA allocator does not know it."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SystemSpec:
    """Where a system is."""

    module: str
    """In this package."""
    build: str
    """Function of ``module`` that makes a :class:`System` of a :class:`Job`."""
    package: str
    """Import name of what has to be installed."""
    prepare: str | None = None
    """Function of ``module`` that does what a machine needs once, such as compiling; not part of the timing."""
    limits_host_itself: bool = False
    """Whether it keeps to ``Job.host_bytes`` by itself; otherwise its processes are ended when they exceed them."""
    max_ranks: int | None = None
    """The most ranks that ``build`` is made for; None: any number."""

    @property
    def is_installed(self) -> bool:
        """Whether ``package`` can be found (it is not imported)."""
        return importlib.util.find_spec(self.package) is not None


SYSTEMS = {
    "patrickstar": SystemSpec(
        module="patrickstar", build="build_chunked", package="patrickstar", limits_host_itself=True
    ),
    "hf-trainer": SystemSpec(
        module="hf_trainer", build="build_in_trainer", package="accelerate", limits_host_itself=True, max_ranks=1
    ),
    "fsdp2": SystemSpec(module="fsdp2", build="build_resident", package="torch"),
    "fsdp2-offload": SystemSpec(module="fsdp2", build="build_offloaded", package="torch"),
    "deepspeed-zero3-offload": SystemSpec(
        module="deepspeed", build="build_zero3_offloaded", package="deepspeed", prepare="compile_kernels", max_ranks=1
    ),
}
