"""FSDP2 with CPUOffloadPolicy and PyTorch's context parallelism over the same ranks, as torchtitan puts them together.

A group of parameters for the embedding, each layer and the output layer; checkpointed layers; the loss fused with the
output layer. Variants, by words: ``device`` or ``host``, where inputs of checkpointed layers are; ``tiled``: MLPs, too.

Layers are called one by one, not by the model of Hugging Face: where positions are not one after the other, as with a
balanced load they are not, that would take them for several documents and make a mask of tokens x tokens.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel

from benchmark.longest_systems import CLIPPING, LOGITS_PER_TILE, Job
from benchmark.longest_systems.gathered import use_gathered_attention
from benchmark.longest_systems.layers import checkpoint_layer, fast_attention, tile_mlp
from benchmark.systems import ADAMW
from benchmark.systems.device import training_device
from benchmark.systems.ranks import init_torch_group
from benchmark.systems.weights import build_meta_model, fill_parameters
from patrickstar.sequence import linear_cross_entropy


def build(job: Job, variant: str) -> ContextParallel:
    """See :class:`benchmark.longest_systems.LongSystem`."""
    return ContextParallel(job, variant)


class LossHead(nn.Module):
    """The output layer, which gives the loss and never has all logits."""

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
    """See :class:`benchmark.longest_systems.LongSystem`."""

    version = torch.__version__

    def __init__(self, job: Job, variant: str):
        init_torch_group()
        self._job, self._device = job, training_device()
        words = variant.split()
        self.settings: dict[str, Any] = {
            "param_dtype": "bfloat16",
            "inputs": "host" if "host" in words else "device",
            "tile_tokens": job.tile_tokens if "tiled" in words else None,
            "rotation": "allgather",
        }
        self._mesh = init_device_mesh(self._device.type, (job.ranks,))
        model = build_meta_model(job.shape)
        model.lm_head = LossHead(model.lm_head, max(1, LOGITS_PER_TILE // job.shape.vocab))
        if job.ranks > 1 and self._device.type == "cpu":
            use_gathered_attention(model)
        self._model = self._sharded(model, words)
        self._params = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(self._params, fused=True, **ADAMW)
        self._norm: torch.Tensor | None = None

    def _sharded(self, model: nn.Module, words: list[str]) -> Decoder:
        decoder = Decoder(model)
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            "offload_policy": CPUOffloadPolicy(pin_memory=self._device.type == "cuda"),
        }
        for layer in model.model.layers:
            if "tiled" in words:
                tile_mlp(layer.mlp, self._job.tile_tokens)
            checkpoint_layer(layer, inputs_on_host="host" in words)
            fully_shard(layer, **options)
        for module in (model.model.embed_tokens, model.lm_head):
            fully_shard(module, **options)
        fully_shard(decoder, **options)
        decoder.to_empty(device="cpu")
        fill_parameters(model)
        return decoder

    def step(self, tokens: torch.Tensor) -> float:
        tokens = tokens.to(self._device)
        positions = torch.arange(tokens.shape[1], device=self._device)[None]
        targets = nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
        num_ranks = self._job.ranks
        with fast_attention(), self._divided([tokens, positions, targets]):
            # FSDP averages over the ranks, each of which has a part of the sum
            loss = self._model(tokens, positions, targets, self._job.num_targets / num_ranks)
            loss.backward()
        self._norm = nn.utils.clip_grad_norm_(self._params, CLIPPING)
        self._optimizer.step()
        self._optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        return total.item() / num_ranks

    def _divided(self, tensors: list[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
        """Within it these have this rank's tokens, and attention is over those of all ranks."""
        if self._job.ranks == 1:
            return contextlib.nullcontext()
        return context_parallel(
            self._mesh, buffers=tensors, buffer_seq_dims=[1] * len(tensors), no_restore_buffers=set(tensors)
        )

    def grad_norm(self) -> float | None:
        assert self._norm is not None
        return (self._norm.full_tensor() if isinstance(self._norm, DTensor) else self._norm).item()

    def device_peak_bytes(self) -> int | None:
        return None
