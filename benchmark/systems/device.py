"""The device that a peer trains on."""

from __future__ import annotations

import torch

from benchmark.systems import Job


def training_device() -> torch.device:
    """The first GPU, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def limit_device_memory(job: Job) -> None:
    """Holds PyTorch's CUDA allocator to ``job.gpu_bytes``, which is how PatrickStar's budget binds too. Without a GPU
    nothing is limited.
    """
    if job.gpu_bytes is not None and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.gpu_bytes / total), 0)
