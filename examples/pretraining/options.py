"""A training run's options, and the PatrickStar configuration that they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How a model is trained, and within which limits. None leaves a choice to PatrickStar (docs/config.md)."""

    precision: str = "bf16"
    """``"bf16"``, ``"fp16"`` or ``"fp32"``; master weights and states are float32 in any case."""
    lr: float = 3e-4
    """The highest learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's."""
    eps: float = 1e-8
    """AdamW's."""
    weight_decay: float = 0.01
    """Default weight decay of parameter groups."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises."""
    schedule_steps: int | None = None
    """Steps at whose end the cosine of the learning rate has come down; None: it stays."""
    clipping: float = 0.0
    """Largest global norm of the gradients; 0: no clipping."""
    accumulate: int = 1
    """Forwards and backwards per step."""
    gpu_memory: int | str | None = None
    """Each rank's device budget, in bytes or such as ``"24GiB"``."""
    host_memory: int | str | None = None
    """Each rank's host budget for model data."""
    chunk_numel: int | None = None
    """Elements per chunk."""
    margin_use_ratio: float | None = None
    """Share of what is left of the device's memory that optimizer states may take."""
    states_on_host: bool = False
    """True if all optimizer states stay on the host."""
    speculation: str = "auto"
    """When updates on the host start: ``optimizer.speculation``."""
    states: str = "fp32"
    """Storage of momentum and variance: ``optimizer.states``."""
    cpu_embedding: bool = False
    """True if embeddings stay on the host."""
    plan: Path | None = None
    """A saved plan for the first step."""
    profile: Path | None = None
    """The folder for the profile of one step."""
    profile_step: int = 4
    """Which one."""
    host_threads: int | None = None
    """Threads that compute on the host."""
    rank_timeout_seconds: float | None = None
    """How long a rank waits for another one."""
    further: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keys of the configuration that have no option here; they win."""

    def engine_config(self) -> dict[str, Any]:
        """The configuration for ``initialize_engine``, with the keys that differ from its defaults."""
        params = {"lr": self.lr, "betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}
        optimizer = {"type": "AdamW", "params": params, "speculation": self.speculation}
        optimizer["states"] = self.states
        config = {
            "optimizer": optimizer,
            "gradient_clipping": self.clipping,
            "device_memory": self.gpu_memory,
            "host_memory": self.host_memory,
            "steps_per_print": 0,  # a run's own lines have more
        }
        if self.states_on_host:
            params["use_hybrid_adam"] = False
        if self.precision != "fp32":
            config[self.precision] = {"enabled": True}
        if self.chunk_numel is not None:
            config["default_chunk_size"] = self.chunk_numel
        if self.margin_use_ratio is not None:
            config["client"] = {"mem_tracer": {"margin_use_ratio": self.margin_use_ratio}}
        if self.cpu_embedding:
            config["use_cpu_embedding"] = True
        if self.plan is not None:
            config["plan"] = str(self.plan)
        if self.profile is not None:
            config["profile"] = {"step": self.profile_step, "output": str(self.profile)}
        if self.host_threads is not None:
            config["host_threads"] = {"num_threads": self.host_threads}
        if self.rank_timeout_seconds is not None:
            config["rank_timeout_seconds"] = self.rank_timeout_seconds
        return _merged(config, self.further)


def _merged(config: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the values of ``over``, section by section."""
    merged = dict(config)
    for key, value in over.items():
        sections = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if sections else value
    return merged
