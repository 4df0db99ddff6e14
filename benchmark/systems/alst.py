"""DeepSpeed's Arctic Long Sequence Training, set up as in its tutorial.

Ulysses over ZeRO-3 with parameters and optimizer on the host; MLPs and the loss in tiles; inputs of checkpointed layers
on the host.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import (
    TiledMLP,
    UlyssesSPAttentionHF,
    UlyssesSPDataLoaderAdapter,
    sequence_tiled_compute,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmark.ranks import training_device
from benchmark.systems import LOGITS_PER_TILE, Job
from benchmark.systems.deepspeed import compile_kernels, zero3_config
from benchmark.systems.long_layers import HostInputs, fast_attention
from benchmark.systems.weights import fill_rotary, initial_values

__all__ = ["Alst", "compile_kernels"]

_BUCKET_NUMEL = int(1e8)


class Model(nn.Module):
    """A model of Hugging Face that returns its part of the loss; logits exist a tile at a time."""

    def __init__(self, model: nn.Module, vocab: int):
        super().__init__()
        self.model = model
        self._vocab = vocab

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, shift_labels: torch.Tensor, num_targets: float
    ) -> torch.Tensor:
        """The sum over the targets, divided by ``num_targets``."""
        hidden = self.model.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        head, num_tokens = self.model.lm_head, input_ids.shape[1]
        total = sequence_tiled_compute(
            _loss_of_tile, num_tokens, math.ceil(num_tokens * self._vocab / LOGITS_PER_TILE),
            {"hidden": hidden, "targets": shift_labels}, {"head": head}, "hidden", compute_params=[head.weight],
            output_unshard_dimension=0, output_reduction="sum",
        )  # fmt: skip
        return total / num_targets


def _loss_of_tile(hidden: torch.Tensor, targets: torch.Tensor, head: nn.Module) -> torch.Tensor:
    logits = head(hidden).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def _tile_mlp(mlp: nn.Module, tile_tokens: int) -> None:
    forward = type(mlp).forward

    def tiled(hidden: torch.Tensor) -> torch.Tensor:
        num_tiles = math.ceil(hidden.shape[1] / tile_tokens)
        return TiledMLP.apply(forward, mlp, hidden, num_tiles, list(mlp.parameters()))

    mlp.forward = tiled  # type: ignore[method-assign]


def _checkpoint(function: Any, *args: Any) -> Any:
    """Hugging Face's checkpointing function. Reentrant as in Arctic Training, so only inputs are kept."""
    with HostInputs():
        return checkpoint(function, *args, use_reentrant=True)


class Alst:
    """See :class:`benchmark.systems.System`."""

    def __init__(self, job: Job):
        self._job, self.device = job, training_device()
        deepspeed.init_distributed(dist_backend="nccl" if self.device.type == "cuda" else "gloo")
        self._config = _config(job, pin=self.device.type == "cuda")
        self.version = deepspeed.__version__.strip()
        self.settings: dict[str, Any] = {"config": self._config, "tile_tokens": job.tile_tokens}
        with deepspeed.zero.Init(config_dict_or_path=self._config):  # parameter by parameter: never whole
            model = dataclasses.replace(job.shape, checkpointing=False).build()
        _fill(model)
        model.gradient_checkpointing_enable({"use_reentrant": True})
        for layer in model.model.layers:
            layer._gradient_checkpointing_func = _checkpoint
            _tile_mlp(layer.mlp, job.tile_tokens)
        self._mpu = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=job.ranks,
            micro_batch_size=1, seq_length=job.length, seq_length_is_variable=False,
        )  # fmt: skip
        whole = Model(model, job.shape.vocab)
        self._engine, *_ = deepspeed.initialize(
            model=whole, model_parameters=whole.parameters(), config=self._config, mpu=self._mpu
        )
        self._engine.train()
        if self.device.type == "cuda":  # PyTorch keeps the memory pinned while the model was made
            torch.cuda.empty_cache()
            getattr(torch._C, "_host_emptyCache", lambda: None)()

    def _batch(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """This rank's tokens with their positions and targets."""
        sample = {"input_ids": tokens, "position_ids": torch.arange(tokens.shape[1])[None], "labels": tokens}
        if self._mpu is None:
            sample["shift_labels"] = nn.functional.pad(sample.pop("labels")[:, 1:], (0, 1), value=-100)
        else:  # the adapter exchanges one sample per rank; here all ranks give the same sample
            adapter = UlyssesSPDataLoaderAdapter(
                [sample],
                sp_rank=self._mpu.get_sequence_parallel_rank(),
                sp_group=self._mpu.get_sequence_parallel_group(),
                sp_world_size=self._mpu.get_sequence_parallel_world_size(),
                device=self.device,
            )
            sample = next(adapter)
        return {name: value.to(self.device) for name, value in sample.items()}

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch = self._batch(batch["input_ids"])
        with fast_attention():
            # Each rank has a part of the sum over the targets, and ZeRO averages over the ranks.
            loss = self._engine(**batch, num_targets=self._job.num_targets / self._job.ranks)
            self._engine.backward(loss)
        self._engine.step()
        total = loss.detach().float()
        dist.all_reduce(total)
        return total / self._job.ranks

    def grad_norm(self) -> float | None:
        norm = self._engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def report(self) -> dict[str, Any]:
        return {}


def _fill(model: nn.Module) -> None:
    """Fills the sharded parameters, and rotary embeddings in float32.

    ``zero.Init`` makes rotary embeddings in bfloat16, which would be another model than the other systems train.
    """
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters(param, modifier_rank=0):
            if dist.get_rank() == 0:
                param.data.copy_(initial_values(name, param.shape, model.config.num_hidden_layers, param.device))
    fill_rotary(model)


def _config(job: Job, *, pin: bool) -> dict[str, Any]:
    config = zero3_config(1, job.clipping, pin=pin)
    config["zero_optimization"]["reduce_bucket_size"] = _BUCKET_NUMEL
    return {**config, "sequence_parallel_size": job.ranks}
