"""The two entry points: their defaults, and keys that change other keys."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from patrickstar.choices import OptimizerType
from patrickstar.config.root import Config
from patrickstar.config.update_rules import with_own_defaults


class Dialect(enum.Enum):
    """The entry point: its defaults, and the keys that it acts on."""

    PATRICKSTAR = "initialize_engine"
    """No clipping; Adam's weight decay is an L2 term; a section ``fp16`` or ``bf16`` enables it."""
    DEEPSPEED = "patrickstar.initialize"
    """DeepSpeed's defaults: clipping at 1; Adam is AdamW; these sections are off without ``enabled``. As in DeepSpeed,
    unknown keys at top level have no effect; a warning names them.
    """
    HOST = "a Trainer or an Accelerator"
    """``initialize_engine``'s defaults; keys that only ``patrickstar.initialize`` acts on are left to the host."""


DEEPSPEED_DEFAULTS: Mapping[str, Any] = {
    "gradient_clipping": 1.0,
    "fp16.enabled": False,
    "bf16.enabled": False,
    "optimizer.params.adam_w_mode": True,
}
"""Where DeepSpeed's defaults differ; those of a section apply if the section is given."""

_LEAST_SUB_GROUP_NUMEL = 1_000_000
_TORCH_ADAMW_DECAY = 0.01


def with_defaults(values: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """A copy with the dialect's defaults for missing keys."""
    result = dict(values)
    if dialect is Dialect.DEEPSPEED:
        for path, default in DEEPSPEED_DEFAULTS.items():
            _set_default(result, path.split("."), default, is_top=True)
    return result


def _set_default(place: dict[str, Any], path: list[str], default: Any, *, is_top: bool) -> None:
    name, *rest = path
    if not rest:
        place.setdefault(name, default)
        return
    inner = place.get(name) if is_top else place.get(name, {})
    if isinstance(inner, Mapping):
        place[name] = dict(inner)
        _set_default(place[name], rest, default, is_top=False)


def resolve(config: Config) -> Config:
    """The configuration after keys have changed other keys, and without disabled sections."""
    zero = config.zero_optimization
    sequence = config.sequence_parallel
    if config.sequence_parallel_size is not None and sequence.size == 1:
        sequence = sequence.model_copy(update={"size": config.sequence_parallel_size})
    updates: dict[str, Any] = {
        "fp16": config.fp16 if config.fp16 is not None and config.fp16.enabled else None,
        "bf16": config.bf16 if config.bf16 is not None and config.bf16.enabled else None,
        "fp8": config.fp8 if config.fp8 is not None and config.fp8.enabled else None,
        "default_chunk_size": _resolve_chunk_size(config),
        "optimizer": _resolve_optimizer(config),
        "sequence_parallel": sequence,
        "tensor_parallel": _resolve_columns(config),
        "expert_parallel": _resolve_experts(config),
        "disk_memory": _resolve_disk(config),
    }
    on_host = {"device": "cpu"}
    offload = {}
    if zero.cpu_offload:
        offload["offload_optimizer"] = zero.offload_optimizer.model_copy(update=on_host)
    if zero.cpu_offload_param:
        offload["offload_param"] = zero.offload_param.model_copy(update=on_host)
    updates["zero_optimization"] = zero.model_copy(update=offload)
    given = config.model_fields_set
    changed = {name: value for name, value in updates.items() if name in given or value != getattr(config, name)}
    return config.model_copy(update=changed)


def _resolve_chunk_size(config: Config) -> int:
    """The smaller of ``default_chunk_size`` and DeepSpeed's key, unless that is 0 or too small for a chunk."""
    own, sub_group = config.default_chunk_size, config.zero_optimization.sub_group_size
    return own if sub_group < _LEAST_SUB_GROUP_NUMEL else min(own, sub_group)


def _resolve_disk(config: Config) -> Any:
    """Takes ``disk_memory``'s folder from DeepSpeed's keys if it has none."""
    section, zero = config.disk_memory, config.zero_optimization
    offloads = [offload for offload in (zero.offload_optimizer, zero.offload_param) if offload.device == "nvme"]
    named = [offload.nvme_path for offload in offloads if offload.nvme_path is not None]
    return section.model_copy(update={"path": named[0]}) if named and section.path is None else section


def _resolve_columns(config: Config) -> Any:
    """Takes ``columns`` from DeepSpeed's keys if it is not set."""
    section = config.tensor_parallel
    said = max(section.autotp_size, section.tp.tp_size)
    return section.model_copy(update={"columns": said}) if said > 1 and section.columns == 1 else section


def _resolve_experts(config: Config) -> Any:
    """Takes the size from DeepSpeed's keys if it is not set."""
    section = config.expert_parallel
    if not section.enabled:
        return section.model_copy(update={"size": 1})
    said = section.autoep_size
    return section.model_copy(update={"size": said}) if said > 1 and section.size == 1 else section


def _resolve_optimizer(config: Config) -> Any:
    """Chooses Adam or AdamW as DeepSpeed's engine does: AdamW by name, or by ``adam_w_mode``. Other types are
    unchanged.
    """
    kind, params = config.optimizer.type, config.optimizer.params
    if kind not in (OptimizerType.ADAM, OptimizerType.ADAMW):
        return config.optimizer.model_copy(update={"params": with_own_defaults(kind, params)})
    decoupled = kind is OptimizerType.ADAMW or params.adam_w_mode is True
    if params.torch_adam and decoupled and "weight_decay" not in params.model_fields_set:
        params = params.model_copy(update={"weight_decay": _TORCH_ADAMW_DECAY})
    kind = OptimizerType.ADAMW if decoupled else OptimizerType.ADAM
    return config.optimizer.model_copy(update={"type": kind, "params": params})
