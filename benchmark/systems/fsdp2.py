"""FSDP2 (``torch.distributed.fsdp.fully_shard``) as a system, with everything resident or with CPUOffloadPolicy.

Set up as its documentation recommends: one group per transformer block and one for the rest, all-gathers in bfloat16
over float32 shards, resharding after forward, its own prefetching, the fused AdamW. The mesh is all ranks. Gradients
are reduced in bfloat16, its default: one rank's reduction changes no value, several send half the bytes of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmark.ranks import init_torch_group, limit_device_memory, training_device
from benchmark.systems import ADAMW, Job
from benchmark.systems.weights import blocks, build_job_model, fill_parameters


def build_resident(job: Job) -> Sharded:
    """Parameters, gradients and states on the GPUs."""
    device = training_device()
    return Sharded(job, device, shards=device, offload=OffloadPolicy())


def build_offloaded(job: Job) -> Sharded:
    """Parameters, gradients and states in pinned host memory, where AdamW also runs."""
    device = training_device()
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    return Sharded(job, device, shards=torch.device("cpu"), offload=offload)


def build_fp8(job: Job) -> Sharded:
    """:func:`build_resident` with the blocks' linear layers in FP8, as torchtitan converts them with torchao."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def convert(model: nn.Module) -> None:
        for block in blocks(model):
            convert_to_float8_training(block, config=Float8LinearConfig.from_recipe_name(job.fp8))

    device = training_device()
    return Sharded(job, device, shards=device, offload=OffloadPolicy(), change=convert)


class Sharded:
    """See :class:`benchmark.systems.System`."""

    version = torch.__version__

    def __init__(
        self,
        job: Job,
        device: torch.device,
        *,
        shards: torch.device,
        offload: OffloadPolicy,
        change: Callable[[nn.Module], object] = lambda model: None,
    ):
        """``change``: called with the model on the meta device."""
        limit_device_memory(job.gpu_bytes)
        init_torch_group()
        self.device = device
        self.settings: dict[str, Any] = {"param_dtype": "bfloat16", "offload_policy": repr(offload)}
        self._model = build_job_model(job)
        change(self._model)
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        if job.recomputed is not None:
            for block in blocks(self._model)[job.recomputed :]:
                block.gradient_checkpointing = False
        for block in blocks(self._model):
            fully_shard(block, mp_policy=precision, offload_policy=offload)
        fully_shard(self._model, mp_policy=precision, offload_policy=offload)
        self._model.to_empty(device=shards)
        fill_parameters(self._model)
        self._params = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(self._params, fused=True, **ADAMW)
        self._clipping = job.clipping
        self._norm: torch.Tensor | None = None

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = self._model(**batch).loss
        loss.backward()
        if self._clipping > 0:
            self._norm = nn.utils.clip_grad_norm_(self._params, self._clipping)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def grad_norm(self) -> float | None:
        if self._norm is None:
            return None
        return (self._norm.full_tensor() if isinstance(self._norm, DTensor) else self._norm).item()

    def report(self) -> dict[str, Any]:
        return {}
