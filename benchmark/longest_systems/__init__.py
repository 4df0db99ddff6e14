"""The systems that ``benchmark.run longest`` runs, each at its best for one long sequence: a function ``build`` of a
module here, which is called in each rank's process.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch

from benchmark.common import SHAPES, LlamaShape

CLIPPING = 1.0
LOGITS_PER_TILE = 2**28
"""Of peers whose loss is computed in tiles: 1 GiB in float32, as Arctic Long Sequence Training has it."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What the ranks of one run train."""

    system: str
    """A key of :data:`SYSTEMS`."""
    model: str
    """A key of ``SHAPES``, of a :class:`~benchmark.common.LlamaShape`."""
    ranks: int
    """Processes, each with a GPU of its own (if there are any)."""
    length: int
    """Tokens of the sequence that all ranks share."""
    steps: int
    tile_tokens: int
    """Of MLPs that are computed in tiles."""
    host_bytes: int | None
    """Memory of the host that all ranks together may take; None: what is free."""
    results: str
    """As of :class:`~benchmark.rank_jobs.RankJob`."""

    @property
    def shape(self) -> LlamaShape:
        """The model's shape, whose layers are not yet checkpointed."""
        shape = SHAPES[self.model]
        assert isinstance(shape, LlamaShape)
        return dataclasses.replace(shape, length=self.length, checkpointing=False)

    @property
    def num_targets(self) -> int:
        """Tokens that have a next one."""
        return self.length - 1


class LongSystem(Protocol):
    """A rank's part of a model and its optimizer. It lives as long as its process."""

    version: str
    """Of the package that trains."""
    settings: dict[str, Any]
    """What it was given, for the record."""

    def step(self, tokens: torch.Tensor) -> float:
        """One step on the whole sequence, [1, length] on the host and the same on all ranks; its loss before."""
        ...

    def grad_norm(self) -> float | None:
        """Global norm of the last step's gradients before clipping."""
        ...

    def device_peak_bytes(self) -> int | None:
        """The highest of this rank so far; None: PyTorch's allocator knows it."""
        ...


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a system is."""

    module: str
    """In this package."""
    variant: str = ""
    """What ``build(job, variant)`` of the module gets."""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """Of its processes, where the user has not set it."""


_EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

SYSTEMS = {
    "patrickstar": Entry("chunked"),
    "fsdp2-offload": Entry("fsdp2", "device", _EXPANDABLE),
    "fsdp2-offload-inputs": Entry("fsdp2", "host", _EXPANDABLE),
    "fsdp2-offload-tiled": Entry("fsdp2", "host tiled", _EXPANDABLE),
    "deepspeed-ulysses": Entry("alst", "", _EXPANDABLE),
}
