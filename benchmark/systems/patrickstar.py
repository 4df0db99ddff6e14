"""PatrickStar as a system: the core of examples/pretrain_gpt.py, and an engine whose ranks share each sequence."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import patrickstar
from benchmark.ranks import training_device
from benchmark.systems import ADAMW, Job
from benchmark.systems.weights import build_job_model, build_meta_model
from examples.pretraining import Pretraining, TrainingOptions

_PROCESS_BYTES = 4 * 2**30  # host memory of a process beside its chunks: libraries, CUDA's context


def training_options(job: Job) -> TrainingOptions:
    """PatrickStar's settings for ``job``."""
    further: dict[str, Any] = {"optimizer": {"master": job.master}}
    if job.ranks_per_batch > 1:
        further["tensor_parallel"] = {"rows": job.rows, "columns": job.columns}
    return TrainingOptions(
        **ADAMW, speculation=job.speculation, states=job.states, clipping=job.clipping, chunk_numel=job.chunk_numel,
        gpu_memory=job.gpu_bytes, host_memory=job.host_bytes // job.ranks if job.host_bytes is not None else None,
        further=further,
    )  # fmt: skip


def engine_config(job: Job) -> dict[str, Any]:
    """:func:`training_options` as an engine's configuration."""
    return training_options(job).engine_config()


class Chunked:
    """PatrickStar within ``job.gpu_bytes`` (None: its default share) and a rank's part of ``job.host_bytes``."""

    def __init__(self, job: Job, **further: Any):
        """``further``: keys of the configuration."""
        options = training_options(job)
        options = dataclasses.replace(options, further=options.further | further)
        self.version = patrickstar.__version__
        self.settings: dict[str, Any] = {"config": options.engine_config()}
        self.device = training_device()
        self._training = Pretraining(lambda: build_job_model(job), options, local_rank=self.device.index or 0)

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._training.step(batch)

    def grad_norm(self) -> float | None:
        return self._training.report()["grad_norm"]

    def report(self) -> dict[str, Any]:
        return self._training.report()


def build_fp8(job: Job) -> Chunked:
    """:class:`Chunked` with linear layers that multiply in 8 bits."""
    return Chunked(job, fp8={"recipe": job.fp8})


class LongSequence:
    """PatrickStar with the sequence sharded over all ranks, the loss fused and MLPs in tiles."""

    version = patrickstar.__version__

    def __init__(self, job: Job):
        self.settings: dict[str, Any] = {
            "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
            "bf16": {"enabled": True},
            "gradient_clipping": job.clipping,
            "activations": {"loss": "fused", "tile_tokens": job.tile_tokens},
        }
        if job.ranks > 1:
            self.settings["sequence_parallel"] = {"size": job.ranks, "mode": "auto"}
        if job.host_bytes is not None:
            self.settings["host_memory"] = job.host_bytes // job.ranks - _PROCESS_BYTES
        local_rank = training_device().index or 0
        self._engine, self._optimizer = patrickstar.initialize_engine(
            lambda: build_meta_model(job.shape), local_rank, self.settings
        )
        self._engine.train()
        self.device = self._engine.device

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = self._engine(**batch, use_cache=False).loss
        self._engine.backward(loss)
        self._optimizer.step()
        return loss.detach()

    def grad_norm(self) -> float | None:
        return self._engine.report()["grad_norm"]

    def report(self) -> dict[str, Any]:
        return self._engine.report()
