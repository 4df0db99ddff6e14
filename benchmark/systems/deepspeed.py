"""DeepSpeed ZeRO-3 with parameters and optimizer offloaded to pinned host memory, and its CPU Adam.

On one rank only: its partitioning starts from the whole model in host memory, which each of several ranks would hold.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.ops.op_builder import CPUAdamBuilder

from benchmark.ranks import init_torch_group, limit_device_memory, training_device
from benchmark.systems import ADAMW, Job
from benchmark.systems.weights import build_job_model, fill_parameters

_SUB_GROUP_NUMEL = int(1e8)
_PREFETCH_NUMEL = int(2e8)


def compile_kernels() -> None:
    """Compiles DeepSpeed's CPU Adam, once per machine."""
    CPUAdamBuilder().load(verbose=False)


class Zero3:
    """See :class:`benchmark.systems.System`."""

    def __init__(self, job: Job):
        self.device = training_device()
        limit_device_memory(job.gpu_bytes)
        init_torch_group()
        config = zero3_config(job.batch, job.clipping, pin=self.device.type == "cuda")
        self.version = deepspeed.__version__.strip()
        self.settings: dict[str, Any] = {"config": config}
        model = build_job_model(job).to(torch.bfloat16)
        model.to_empty(device="cpu")
        fill_parameters(model)
        # Parameter by parameter; initialize() would first move the whole model to the GPU.
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
        self._engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self._engine.train()

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = self._engine(**batch).loss
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()

    def grad_norm(self) -> float | None:
        norm = self._engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def report(self) -> dict[str, Any]:
        return {}


def zero3_config(batch: int, clipping: float, *, pin: bool) -> dict[str, Any]:
    """ZeRO stage 3 with parameters and optimizer in host memory, pinned or pageable."""
    host = {"device": "cpu", "pin_memory": pin}
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clipping,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_param": host,
            "offload_optimizer": host,
            "sub_group_size": _SUB_GROUP_NUMEL,
            "stage3_prefetch_bucket_size": _PREFETCH_NUMEL,
        },
    }
