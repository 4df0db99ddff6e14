"""The device that a worker trains on."""

from __future__ import annotations

import torch

from benchmark.systems import Job
from benchmark.systems.ranks import RankPlace


def training_device() -> torch.device:
    """The GPU of this rank, or the CPU where there is none.

    Raises:
        ValueError: there are fewer GPUs than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    place, num_gpus = RankPlace.from_environment(), torch.cuda.device_count()
    if place.num_ranks > num_gpus:
        raise ValueError(f"{place.num_ranks} ranks need a GPU each, this machine has {num_gpus}; run fewer ranks")
    return torch.device("cuda", place.rank)


def limit_device_memory(job: Job) -> None:
    """Holds PyTorch's CUDA allocator to ``job.gpu_bytes``, which is how PatrickStar's budget binds too. Without a GPU
    nothing is limited.
    """
    device = training_device()
    if job.gpu_bytes is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.gpu_bytes / total), device)
