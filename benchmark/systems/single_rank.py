"""The process group of one process that FSDP2 and DeepSpeed ask for."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist


def init_single_rank_group() -> None:
    """NCCL for the GPU and gloo for the CPU (offloaded gradients have their norm there), met through a file."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT="29400")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        backend = "cpu:gloo,cuda:nccl"
    store = dist.FileStore(str(Path(tempfile.mkdtemp(prefix="benchmark-")) / "store"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
