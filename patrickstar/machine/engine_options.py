"""Translates the configuration into the core's options."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from patrickstar import _C
from patrickstar.config import (
    Config,
    DelaysConfig,
    DiskIo,
    DiskMemoryConfig,
    HostAffinity,
    HostThreadsConfig,
    Speculation,
)
from patrickstar.machine.budgets import Budgets


def make_engine_options(
    config: Config,
    device: torch.device,
    budgets: Budgets,
    limit_rounding_bytes: int,
    local_ranks: tuple[int, int],
) -> _C.EngineOptions:
    """Returns the options of ``_C.Runtime``, without the chunk size.

    Args:
        config: the whole configuration.
        device: the engine's device; a CPU is simulated.
        budgets: from :func:`patrickstar.machine.budgets.make_budgets`.
        limit_rounding_bytes: bytes that PyTorch's CUDA allocator may reserve beyond its limit.
        local_ranks: as in :func:`host_thread_options`.

    Raises:
        ValueError: several processes share CPUs and ``LOCAL_RANK`` is not set, or no folder is given for states on
            disk.
    """
    tracer = config.client.mem_tracer
    options = _C.EngineOptions()
    shared = options.device
    shared.cuda_device = device.index if device.type == "cuda" else -1
    shared.device_limit_bytes = budgets.device_bytes
    shared.limit_rounding_bytes = limit_rounding_bytes
    shared.host_limit_bytes = budgets.host_bytes
    shared.delays = _delay_options(config.delays)
    shared.host_threads = host_thread_options(
        config.host_threads, with_gpu=device.type == "cuda", local_ranks=local_ranks
    )
    options.residency.warmup_payload_ratio = tracer.warmup_gpu_chunk_mem_ratio
    if tracer.margin_use_ratio is not None:
        options.residency.margin_use_ratio = tracer.margin_use_ratio
    hybrid = config.optimizer.params.use_hybrid_adam
    several = (config.gradient_accumulation_steps or 1) > 1
    options.residency.backwards = _C.Backwards.SEVERAL if several else _C.Backwards.ONE
    options.residency.state_placement = _C.StatePlacement.HYBRID if hybrid else _C.StatePlacement.HOST
    options.update_start = update_start(config.optimizer.speculation, device)
    if config.disk_memory.path is not None:
        _fill_disk_options(options.disk, config.disk_memory, local_ranks[1])
    return options


_DISK_SHARE = 0.95  # of the free space


def _fill_disk_options(options: _C.DiskOptions, section: DiskMemoryConfig, num_local_ranks: int) -> None:
    folder = Path(section.path or "").absolute()
    if not folder.is_dir():
        raise ValueError(f"disk_memory.path is {section.path!r}, which is no folder; make it, or give another one")
    options.folder = str(folder)
    options.io = {DiskIo.AUTO: _C.DiskIo.AUTO, DiskIo.IO_URING: _C.DiskIo.URING, DiskIo.THREADS: _C.DiskIo.THREADS}[
        section.io
    ]
    if section.size is not None:
        options.limit_bytes = section.size
    else:
        system = os.statvfs(folder)
        options.limit_bytes = max(int(system.f_bavail * system.f_frsize * _DISK_SHARE) // num_local_ranks, 1)


def host_thread_options(
    threads: HostThreadsConfig, *, with_gpu: bool, local_ranks: tuple[int, int] = (0, 1)
) -> _C.HostThreadOptions:
    """Returns the arguments of :func:`patrickstar._C.choose_host_threads`.

    Args:
        threads: the configuration's section ``host_threads``.
        with_gpu: a GPU trains; the thread that launches its kernels needs a core.
        local_ranks: this rank's index among the run's ranks on this machine, and their number. They divide the CPUs
            unless the configuration sets ``num_sharing_processes``.

    Raises:
        ValueError: several processes share CPUs and ``LOCAL_RANK`` is not set.
    """
    options = _C.HostThreadOptions()
    options.num_threads = threads.num_threads
    options.launching_core = _C.LaunchingCore.RESERVED if with_gpu else _C.LaunchingCore.SHARED
    local_rank, num_local_ranks = local_ranks
    options.num_sharing = threads.num_sharing_processes or num_local_ranks
    if threads.num_sharing_processes is not None and options.num_sharing > 1:
        local_rank = _local_rank()
    options.sharing_index = local_rank % options.num_sharing
    # Pinned processes that do not know of each other would use the same CPUs.
    alone = os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"
    known = threads.num_sharing_processes is not None or num_local_ranks > 1 or alone
    pinned = {
        HostAffinity.AUTO: with_gpu and known,
        HostAffinity.PINNED: True,
        HostAffinity.FREE: False,
    }[threads.affinity]
    options.affinity = _C.Affinity.PINNED if pinned else _C.Affinity.FREE
    return options


def _local_rank() -> int:
    value = os.environ.get("LOCAL_RANK", "")
    if not value.isdecimal():
        raise ValueError(
            f"host_threads.num_sharing_processes is more than 1, but LOCAL_RANK is {value!r}; start the processes with "
            "torchrun, or set LOCAL_RANK to this process's index among those of this machine"
        )
    return int(value)


def update_start(speculation: Speculation, device: torch.device) -> _C.UpdateStart:
    """The earliest start of updates that the configuration asks for."""
    return {
        Speculation.AUTO: _C.UpdateStart.SPECULATIVE if device.type == "cuda" else _C.UpdateStart.AFTER_NORM,
        Speculation.ALWAYS: _C.UpdateStart.SPECULATIVE,
        Speculation.NEVER: _C.UpdateStart.AFTER_NORM,
        Speculation.COMMIT: _C.UpdateStart.COMMITTED,
    }[speculation]


def _delay_options(delays: DelaysConfig) -> _C.DelayOptions:
    options = _C.DelayOptions()
    options.bytes_per_second = delays.link_gbps * 1e9
    options.latency_seconds = delays.link_latency_us * 1e-6
    options.max_random_seconds = delays.max_random_us * 1e-6
    options.seed = delays.seed
    return options
