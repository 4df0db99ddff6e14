"""The systems that ``benchmark.compare`` and ``benchmark.run longest`` run: PatrickStar and its peers.

Each system has a module in this package, with a function or class that makes a :class:`System` of a :class:`Job`. All
systems get the same job: the same model code, values, batches and optimizer. ``worker.py`` trains one system on one
rank in a process of its own; the parent (``run.py``) imports neither the systems nor CUDA.
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
"""Argument of ``torch.compile``: nothing, each transformer block as in torchtitan, or the whole model in one call."""

KERNELS = ("transformers", "liger")
"""Kernels of norms, rotary embeddings, MLPs and the loss: transformers', or Liger-Kernel's (Llama only)."""

LOGITS_PER_TILE = 2**28
"""For peers that compute the loss in tiles: 1 GiB in float32, as in Arctic Long Sequence Training."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The work and the limits of one run's processes."""

    system: str
    """A key of :data:`SYSTEMS`, or of :data:`LONG_SYSTEMS` where ranks share each sequence."""
    model: str
    """A key of ``SHAPES``."""
    ranks: int
    """Processes, each with a GPU of its own (if there are any)."""
    length: int
    """Tokens per sequence."""
    batch: int
    """Sequences per step of each rank, or of the ranks that share matrices or sequences."""
    clipping: float
    """Largest global norm of the gradients; 0: no clipping."""
    gpu_bytes: int | None
    """Limit on device memory of each rank; None: the whole GPU."""
    host_bytes: int | None
    """Limit on host memory of all ranks together; None: none."""
    warmup: int
    """Steps before the timed ones, ``steps``."""
    steps: int
    compiled: str = "no"
    """One of :data:`COMPILED`."""
    kernels: str = KERNELS[0]
    """One of :data:`KERNELS`."""
    speculation: str = "auto"
    """PatrickStar's ``optimizer.speculation``."""
    states: str = "fp32"
    """PatrickStar's ``optimizer.states``."""
    master: str = "exact"
    """PatrickStar's ``optimizer.master``."""
    rows: int = 1
    """PatrickStar's ``tensor_parallel.rows``."""
    columns: int = 1
    """PatrickStar's ``tensor_parallel.columns``."""
    fp8: str = "rowwise"
    """Recipe of systems that multiply in 8 bits."""
    recomputed: int | None = None
    """Blocks that FSDP2 recomputes, the first ones; None: all. PatrickStar chooses by itself."""
    chunk_numel: int = 64 * 2**20
    """PatrickStar's ``default_chunk_size``."""
    shares_sequence: bool = False
    """All ranks share each sequence."""
    tile_tokens: int = 8192
    """Tokens per tile, for MLPs of :data:`LONG_SYSTEMS` that are computed in tiles."""
    is_profiled: bool = True
    """One more step runs under the profiler."""

    @property
    def ranks_per_batch(self) -> int:
        """Number of ranks that are called with the same sequences."""
        return self.ranks if self.shares_sequence else self.rows * self.columns

    @property
    def shape(self) -> Shape:
        """The model's shape at this sequence length."""
        return dataclasses.replace(SHAPES[self.model], length=self.length)

    @property
    def num_targets(self) -> int:
        """Tokens of a sequence that have a next one."""
        return self.length - 1

    @property
    def spec(self) -> SystemSpec:
        """The system's entry."""
        return (LONG_SYSTEMS if self.shares_sequence else SYSTEMS)[self.system]


class System(Protocol):
    """A rank's part of a model with its optimizer, ready to train. It lives as long as its process."""

    version: str
    """The training package's version."""
    settings: dict[str, Any]
    """The system's settings beyond the job, for the record."""
    device: torch.device
    """The device of the batches."""

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Forward, backward and update; returns the loss before the update, of this rank's or of the shared batch."""
        ...

    def grad_norm(self) -> float | None:
        """Global norm of the last step's gradients before clipping; None where it was not computed."""
        ...

    def report(self) -> dict[str, Any]:
        """The system's own figures; ``device_peak_bytes`` among them if PyTorch's CUDA allocator does not know it."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SystemSpec:
    """Location and abilities of a system."""

    module: str
    """In this package."""
    build: str
    """Function or class of ``module``, called with a :class:`Job`; returns a :class:`System`."""
    package: str = "torch"
    """Import name of the required package."""
    prepare: str | None = None
    """Function of ``module`` for work that a machine needs once, such as compiling; not timed."""
    limits_host_itself: bool = False
    """The system keeps to ``Job.host_bytes`` by itself; otherwise its processes are killed when they exceed them."""
    max_ranks: int | None = None
    """The most ranks that ``build`` supports; None: any number."""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """Variables of its processes, unless the user sets them."""

    @property
    def is_installed(self) -> bool:
        """True if ``package`` can be found; it is not imported."""
        return importlib.util.find_spec(self.package) is not None


SYSTEMS = {
    "patrickstar": SystemSpec(module="patrickstar", build="Chunked", package="patrickstar", limits_host_itself=True),
    "hf-trainer": SystemSpec(
        module="hf_trainer", build="InTrainer", package="accelerate", limits_host_itself=True, max_ranks=1
    ),
    "fsdp2": SystemSpec(module="fsdp2", build="build_resident"),
    "fsdp2-offload": SystemSpec(module="fsdp2", build="build_offloaded"),
    "patrickstar-fp8": SystemSpec(
        module="patrickstar", build="build_fp8", package="patrickstar", limits_host_itself=True
    ),
    "fsdp2-fp8": SystemSpec(module="fsdp2", build="build_fp8", package="torchao"),
    "deepspeed-zero3-offload": SystemSpec(
        module="deepspeed", build="Zero3", package="deepspeed", prepare="compile_kernels", max_ranks=1
    ),
}

_EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

LONG_SYSTEMS = {
    "patrickstar": SystemSpec(
        module="patrickstar", build="LongSequence", package="patrickstar", limits_host_itself=True
    ),
    "fsdp2-offload": SystemSpec(module="long_fsdp2", build="build_inputs_on_device", environment=_EXPANDABLE),
    "fsdp2-offload-inputs": SystemSpec(module="long_fsdp2", build="build_inputs_on_host", environment=_EXPANDABLE),
    "fsdp2-offload-tiled": SystemSpec(module="long_fsdp2", build="build_tiled", environment=_EXPANDABLE),
    "deepspeed-ulysses": SystemSpec(
        module="alst", build="Alst", package="deepspeed", prepare="compile_kernels", environment=_EXPANDABLE
    ),
}
"""Systems at their best for one long sequence that all ranks share."""
