"""PatrickStar, whose ranks share each sequence."""

from __future__ import annotations

from typing import Any

import torch

import patrickstar
from benchmark.longest_systems import CLIPPING, Job
from benchmark.systems import ADAMW
from benchmark.systems.device import training_device
from benchmark.systems.weights import build_meta_model
from patrickstar.planning.models import enable_checkpointing

_PROCESS_BYTES = 4 * 2**30  # of host memory that a process takes beside its chunks: libraries, CUDA's context


def build(job: Job, variant: str) -> Chunked:
    """See :class:`benchmark.longest_systems.LongSystem`; there are no variants."""
    return Chunked(job)


class Chunked:
    """See :class:`benchmark.longest_systems.LongSystem`."""

    version = patrickstar.__version__

    def __init__(self, job: Job):
        self.settings: dict[str, Any] = {
            "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
            "bf16": {"enabled": True},
            "gradient_clipping": CLIPPING,
            "activations": {"loss": "fused", "tile_tokens": job.tile_tokens},
        }
        if job.ranks > 1:
            self.settings["sequence_parallel"] = {"size": job.ranks, "mode": "auto"}
        if job.host_bytes is not None:
            self.settings["host_memory"] = job.host_bytes // job.ranks - _PROCESS_BYTES

        def model() -> torch.nn.Module:
            built = build_meta_model(job.shape)
            enable_checkpointing(built)
            return built

        local_rank = training_device().index or 0
        self._engine, self._optimizer = patrickstar.initialize_engine(model, local_rank, self.settings)
        self._engine.train()

    def step(self, tokens: torch.Tensor) -> float:
        tokens = tokens.to(self._engine.device)
        loss = self._engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        self._engine.backward(loss)
        self._optimizer.step()
        return loss.item()

    def grad_norm(self) -> float | None:
        return self._engine.report()["grad_norm"]

    def device_peak_bytes(self) -> int | None:
        return self._engine.report()["device_peak_bytes"]
