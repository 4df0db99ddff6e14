"""FSDP2 with CPUOffloadPolicy and PyTorch's context parallelism over the same ranks, as torchtitan combines them.

A group of parameters for the embedding, each layer and the output layer; checkpointed layers; the loss fused with the
output layer. Variants differ in where inputs of checkpointed layers are and in whether MLPs are computed in tiles.

Layers are called one by one, not by Hugging Face's model. A balanced load leaves positions out of order, which that
model would take for several documents, with a mask of tokens x tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel

from benchmark.ranks import init_torch_group, training_device
from benchmark.systems import ADAMW, LOGITS_PER_TILE, Job
from benchmark.systems.long_layers import checkpoint_layer, fast_attention, tile_mlp, use_gathered_attention
from benchmark.systems.weights import build_meta_model, fill_parameters
from patrickstar.sequence import linear_cross_entropy


def build_inputs_on_device(job: Job) -> ContextParallel:
    return ContextParallel(job, inputs_on_host=False, tiled=False)


def build_inputs_on_host(job: Job) -> ContextParallel:
    return ContextParallel(job, inputs_on_host=True, tiled=False)


def build_tiled(job: Job) -> ContextParallel:
    return ContextParallel(job, inputs_on_host=True, tiled=True)


class LossHead(nn.Module):
    """The output layer fused with the loss; logits exist a tile at a time."""

    def __init__(self, head: nn.Linear, tile_tokens: int):
        super().__init__()
        self.weight = head.weight
        self._tile_tokens = tile_tokens

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor, num_targets: float) -> torch.Tensor:
        """The sum over the targets, divided by ``num_targets``."""
        return linear_cross_entropy(
            hidden, self.weight, targets, num_targets=num_targets, tile_tokens=self._tile_tokens
        )


class Decoder(nn.Module):
    """A Llama or Qwen2 of Hugging Face, called with the tokens of one rank."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor, num_targets: float
    ) -> torch.Tensor:
        """The loss of these tokens, all [1, tokens]."""
        body = self.model.model
        hidden = body.embed_tokens(tokens)
        rotary = body.rotary_emb(hidden, position_ids=positions)
        for layer in body.layers:
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        return self.model.lm_head(body.norm(hidden), targets, num_targets)


class ContextParallel:
    """See :class:`benchmark.systems.System`."""

    version = torch.__version__

    def __init__(self, job: Job, *, inputs_on_host: bool, tiled: bool):
        init_torch_group()
        self._job, self.device = job, training_device()
        self.settings: dict[str, Any] = {
            "param_dtype": "bfloat16",
            "inputs": "host" if inputs_on_host else "device",
            "tile_tokens": job.tile_tokens if tiled else None,
            "rotation": "allgather",
        }
        self._mesh = init_device_mesh(self.device.type, (job.ranks,))
        model = build_meta_model(dataclasses.replace(job.shape, checkpointing=False))
        model.lm_head = LossHead(model.lm_head, max(1, LOGITS_PER_TILE // job.shape.vocab))
        if job.ranks > 1 and self.device.type == "cpu":
            use_gathered_attention(model)
        self._model = self._sharded(model, inputs_on_host=inputs_on_host, tiled=tiled)
        self._params = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(self._params, fused=True, **ADAMW)
        self._norm: torch.Tensor | None = None

    def _sharded(self, model: nn.Module, *, inputs_on_host: bool, tiled: bool) -> Decoder:
        decoder = Decoder(model)
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            "offload_policy": CPUOffloadPolicy(pin_memory=self.device.type == "cuda"),
        }
        for layer in model.model.layers:
            if tiled:
                tile_mlp(layer.mlp, self._job.tile_tokens)
            checkpoint_layer(layer, inputs_on_host=inputs_on_host)
            fully_shard(layer, **options)
        for module in (model.model.embed_tokens, model.lm_head):
            fully_shard(module, **options)
        fully_shard(decoder, **options)
        decoder.to_empty(device="cpu")
        fill_parameters(model)
        return decoder

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens = batch["input_ids"]
        positions = torch.arange(tokens.shape[1], device=self.device)[None]
        targets = nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
        num_ranks = self._job.ranks
        with fast_attention(), self._sharing([tokens, positions, targets]):
            # Each rank has a part of the sum over the targets, and FSDP averages over the ranks.
            loss = self._model(tokens, positions, targets, self._job.num_targets / num_ranks)
            loss.backward()
        self._norm = nn.utils.clip_grad_norm_(self._params, self._job.clipping)
        self._optimizer.step()
        self._optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        return total / num_ranks

    def _sharing(self, tensors: list[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
        """Within the context the tensors have this rank's tokens, and attention is over the tokens of all ranks."""
        if self._job.ranks == 1:
            return contextlib.nullcontext()
        return context_parallel(
            self._mesh, buffers=tensors, buffer_seq_dims=[1] * len(tensors), no_restore_buffers=set(tensors)
        )

    def grad_norm(self) -> float | None:
        assert self._norm is not None
        return (self._norm.full_tensor() if isinstance(self._norm, DTensor) else self._norm).item()

    def report(self) -> dict[str, Any]:
        return {}
