"""The configuration as the core's options: the only place that knows both."""

from __future__ import annotations

import torch

from patrickstar import _C
from patrickstar.config import Config, DelaysConfig, Speculation, Streaming
from patrickstar.memory import Budgets


def make_runtime_options(
    config: Config, device: torch.device, budgets: Budgets, limit_rounding_bytes: int
) -> _C.RuntimeOptions:
    """What ``_C.Runtime`` is told, but for the chunk size.

    Args:
        config: the whole configuration.
        device: the engine's device; a CPU is the simulated one.
        budgets: what :func:`patrickstar.memory.make_budgets` gave.
        limit_rounding_bytes: what PyTorch's CUDA allocator may take beyond a limit that it is given.
    """
    tracer = config.client.mem_tracer
    options = _C.RuntimeOptions()
    options.cuda_device = device.index if device.type == "cuda" else -1
    options.device_limit_bytes = budgets.device_bytes
    options.limit_rounding_bytes = limit_rounding_bytes
    options.host_limit_bytes = budgets.host_bytes
    options.warmup_payload_ratio = tracer.warmup_gpu_chunk_mem_ratio
    options.margin_use_ratio = tracer.margin_use_ratio
    options.partition = _C.Partition.STATIC if tracer.with_static_partition else _C.Partition.TIDE
    hybrid = config.optimizer.params.use_hybrid_adam
    options.state_placement = _C.StatePlacement.HYBRID if hybrid else _C.StatePlacement.HOST
    options.speculation = _speculation_mode(config.optimizer.speculation, device)
    options.streaming = _streaming_mode(config.optimizer.streaming, device)
    options.delays = _delay_options(config.delays)
    return options


def _speculation_mode(speculation: Speculation, device: torch.device) -> _C.SpeculationMode:
    return {
        Speculation.AUTO: _C.SpeculationMode.ON if device.type == "cuda" else _C.SpeculationMode.OFF,
        Speculation.ALWAYS: _C.SpeculationMode.ON,
        Speculation.NEVER: _C.SpeculationMode.OFF,
        Speculation.COMMIT: _C.SpeculationMode.COMMIT,
    }[speculation]


def _streaming_mode(streaming: Streaming, device: torch.device) -> _C.StreamingMode:
    return {
        Streaming.AUTO: _C.StreamingMode.AUTO if device.type == "cuda" else _C.StreamingMode.OFF,
        Streaming.ALWAYS: _C.StreamingMode.ALWAYS,
        Streaming.NEVER: _C.StreamingMode.OFF,
    }[streaming]


def _delay_options(delays: DelaysConfig) -> _C.DelayOptions:
    options = _C.DelayOptions()
    options.bytes_per_second = delays.link_gbps * 1e9
    options.latency_seconds = delays.link_latency_us * 1e-6
    options.max_random_seconds = delays.max_random_us * 1e-6
    options.seed = delays.seed
    return options
