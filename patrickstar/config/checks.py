"""Which values are possible, alone and together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from patrickstar import _C
from patrickstar.config.schema import Config, Speculation


def check_adam_options(options: Mapping[str, Any], name: str) -> None:
    """Checks lr, betas, eps and weight_decay of a parameter group (the ranges of ``torch.optim.Adam``).

    Raises:
        ValueError: one is out of its range.
    """
    for key in ("lr", "eps", "weight_decay"):
        if not float(options[key]) >= 0:
            raise ValueError(f"{name}.{key} is {options[key]}; it must be at least 0")
    for index, beta in enumerate(options["betas"]):
        if not 0 <= float(beta) < 1:
            raise ValueError(f"{name}.betas[{index}] is {beta}; it must be at least 0 and less than 1")


def check_values(config: Config) -> None:
    """Raises ValueError for a value, or a combination, that makes no sense."""
    check_adam_options(dataclasses.asdict(config.optimizer.params), "optimizer.params")
    if config.optimizer.speculation is Speculation.COMMIT and (config.fp16 is not None or config.gradient_clipping > 0):
        raise ValueError(
            'optimizer.speculation is "commit", which updates before the norm of all gradients is known; leave '
            'gradient_clipping and fp16 out, or set optimizer.speculation to "auto"'
        )
    if config.fp16 is not None and config.bf16 is not None:
        raise ValueError("fp16.enabled and bf16.enabled are both True; enable one")
    if not config.rank_timeout_seconds > 0:
        raise ValueError(f"rank_timeout_seconds is {config.rank_timeout_seconds}; it must be more than 0")
    if config.default_chunk_size < 1024:
        raise ValueError(
            f"default_chunk_size is {config.default_chunk_size} elements; give at least 1024 (64 * 1024 * 1024 is "
            "usual)"
        )
    if config.profile is not None and config.profile.step < 1:
        raise ValueError(f"profile.step is {config.profile.step}; steps are counted from 1")
    for name, value in dataclasses.asdict(config.delays).items():
        if value < 0:
            raise ValueError(f"delays.{name} is {value}; it must be at least 0")
    threads = config.host_threads
    if threads.num_threads < 0:
        raise ValueError(f"host_threads.num_threads is {threads.num_threads}; give at least 1, or 0 for one per CPU")
    if threads.num_sharing_processes is not None and threads.num_sharing_processes < 1:
        raise ValueError(
            f"host_threads.num_sharing_processes is {threads.num_sharing_processes}; give at least 1, this process"
        )
    tracer = config.client.mem_tracer
    for name in ("warmup_gpu_chunk_mem_ratio", "overall_gpu_mem_ratio", "overall_cpu_mem_ratio", "margin_use_ratio"):
        ratio = getattr(tracer, name)
        if not 0 < ratio <= 1:
            raise ValueError(f"client.mem_tracer.{name} is {ratio}; it is a share, give more than 0 and at most 1")
    if config.fp16 is not None:
        make_loss_scaler(config)  # the scaler checks its own values


def make_loss_scaler(config: Config) -> _C.optim.LossScaler | None:
    """The loss scaler that ``config.fp16`` asks for; None without float16."""
    if config.fp16 is None:
        return None
    return _C.optim.LossScaler(
        loss_scale=config.fp16.loss_scale,
        initial_scale_power=config.fp16.initial_scale_power,
        scale_window=config.fp16.loss_scale_window,
        hysteresis=config.fp16.hysteresis,
        min_scale=config.fp16.min_loss_scale,
    )
