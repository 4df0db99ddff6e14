"""PatrickStar as a system: the core of examples/pretrain_gpt.py, with the benchmark's model."""

from __future__ import annotations

from typing import Any

import torch

import patrickstar
from benchmark.systems import ADAMW, Job
from benchmark.systems.device import training_device
from benchmark.systems.weights import build_job_model
from examples.pretraining import Pretraining, TrainingOptions


def build_chunked(job: Job) -> Chunked:
    """PatrickStar within ``job.gpu_bytes`` (None: its default share of the GPU) and the rank's part of
    ``job.host_bytes``.
    """
    return Chunked(job)


def training_options(job: Job) -> TrainingOptions:
    """What PatrickStar is given for ``job``."""
    further: dict[str, Any] = {"optimizer": {"master": job.master}}
    if job.ranks_per_batch > 1:
        further["tensor_parallel"] = {"rows": job.rows, "columns": job.columns}
    return TrainingOptions(
        **ADAMW,
        speculation=job.speculation,
        states=job.states,
        clipping=job.clipping,
        chunk_numel=job.chunk_numel,
        gpu_memory=job.gpu_bytes,
        host_memory=job.host_bytes // job.ranks if job.host_bytes is not None else None,
        further=further,
    )


def engine_config(job: Job) -> dict[str, Any]:
    """The same as an engine's configuration."""
    return training_options(job).engine_config()


class Chunked:
    """See :class:`benchmark.systems.System`."""

    def __init__(self, job: Job):
        options = training_options(job)
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
