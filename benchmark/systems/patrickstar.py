"""PatrickStar as a system: the model is built on the meta device and gets its values chunk by chunk."""

from __future__ import annotations

from typing import Any

import torch

import patrickstar
from benchmark.systems import ADAMW, Job
from benchmark.systems.device import training_device
from benchmark.systems.weights import build_meta_gpt
from patrickstar.runtime import initialize_engine

_CHUNK_NUMEL = 64 * 2**20
MARGIN_USE_RATIO = 0.95  # the default, 0.8, leaves more for steps that vary


def build_chunked(job: Job) -> Chunked:
    """PatrickStar within ``job.gpu_bytes`` (None: its default share of the GPU) and the rank's part of
    ``job.host_bytes``.
    """
    return Chunked(job)


class Chunked:
    """See :class:`benchmark.systems.System`."""

    def __init__(self, job: Job):
        config = {
            "optimizer": {"type": "AdamW", "params": ADAMW, "speculation": job.speculation, "streaming": job.streaming},
            "bf16": {"enabled": True},
            "gradient_clipping": job.clipping,
            "default_chunk_size": _CHUNK_NUMEL,
            "device_memory": job.gpu_bytes,
            "host_memory": job.host_bytes // job.ranks if job.host_bytes is not None else None,
            "client": {"mem_tracer": {"margin_use_ratio": MARGIN_USE_RATIO}},
        }
        self.version = patrickstar.__version__
        self.settings: dict[str, Any] = {"config": config}
        self.device = training_device()
        self._engine, self._optimizer = initialize_engine(
            lambda: build_meta_gpt(job.shape), self.device.index or 0, config
        )
        self._engine.train()

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self._optimizer.zero_grad()
        loss = self._engine(**batch).loss
        self._engine.backward(loss)
        self._optimizer.step()
        return loss.detach()

    def report(self) -> dict[str, Any]:
        return self._engine.report()
