"""A configuration of which a trainer's arguments, or the user's own optimizer, decide some keys.

The user gives PatrickStar's keys (a dict or a JSON file). Keys that the trainer decides may be missing; if present,
they must have the same value, or ``"auto"``.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from patrickstar.config.reading import read_config
from patrickstar.config.spellings import AUTO
from patrickstar.engine.optimizer_takeover import TakenOver

TRAINER_KEYS = ("resume", "grace_seconds")
"""Keys of a trainer's configuration that are not the engine's (trainer_signals.py)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """One key that the trainer decides."""

    key: str
    """Dotted key of the configuration, such as ``"optimizer.params.lr"``."""
    value: Any
    """The trainer's value."""
    source: str
    """Its origin, for errors: ``"TrainingArguments.learning_rate"``."""


def own_config(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    """A copy of the user's configuration, from a dict or a JSON file; the section ``bf16`` has one name.

    Raises:
        ValueError: it is no dict.
    """
    values = copy.deepcopy(dict(read_config(config)))
    return {"bf16" if name == "bfloat16" else name: value for name, value in values.items()}


def of_engine(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without :data:`TRAINER_KEYS`."""
    return {name: value for name, value in config.items() if name not in TRAINER_KEYS}


def ranks_per_sample(config: Mapping[str, Any]) -> int:
    """Number of ranks that get the same batches, since they share sequences or matrices. Reads an unvalidated
    configuration.
    """
    section, matrices = config.get("sequence_parallel"), config.get("tensor_parallel")
    sizes = [section.get("size") if isinstance(section, Mapping) else config.get("sequence_parallel_size")]
    if isinstance(matrices, Mapping):
        inner = matrices.get("tp")
        inner_size = inner.get("tp_size") if isinstance(inner, Mapping) else None
        sizes += [matrices.get("rows"), matrices.get("columns") or matrices.get("autotp_size") or inner_size]
    return math.prod(size for size in sizes if type(size) is int and size > 0)


def with_parallelism(config: Mapping[str, Any], parallelism: Any) -> dict[str, Any]:
    """``config`` with the sizes of an ``accelerate.ParallelismConfig`` (None: unchanged): tensor parallelism
    (``tp_size``: columns of a mesh) or context parallelism (``cp_size``; ``sp_size``: Ulysses). All other ranks are
    data-parallel, with chunks sharded over them.

    Raises:
        ValueError: it contradicts ``config``, or numbers of ranks do not fit.
    """
    if parallelism is None:
        return dict(config)
    sizes = {name: getattr(parallelism, f"{name}_size", None) or 1 for name in ("tp", "cp", "sp")}
    if sizes["cp"] > 1 and sizes["sp"] > 1:
        raise ValueError(f"parallelism_config has cp_size {sizes['cp']} and sp_size {sizes['sp']}; give one of them")
    data = math.prod(getattr(parallelism, f"dp_{name}_size", None) or 1 for name in ("replicate", "shard"))
    world, wanted = int(os.environ.get("WORLD_SIZE", "1")), data * math.prod(sizes.values())
    if data > 1 and wanted != world:
        raise ValueError(
            f"the sizes of parallelism_config are for {wanted} ranks, and there are {world}; leave dp_replicate_size "
            "and dp_shard_size out, and data is shared by what the others leave"
        )
    sequences = {"size": max(sizes["cp"], sizes["sp"]), **({"mode": "ulysses"} if sizes["sp"] > 1 else {})}
    sections = {
        "tensor_parallel": ({"columns": sizes["tp"]}, sizes["tp"]),
        "sequence_parallel": (sequences, sequences["size"]),
    }
    decisions = [
        Decision(key=f"{name}.{key}", value=value, source=f"parallelism_config's {key} of {name}")
        for name, (section, size) in sections.items()
        for key, value in section.items()
        if size > 1
    ]
    result = without_decided(config, decisions)
    for decision in decisions:
        name, key = decision.key.split(".")
        result[name] = {**result.get(name, {}), key: decision.value}
    return result


def without_decided(config: Mapping[str, Any], decisions: Iterable[Decision]) -> dict[str, Any]:
    """``config`` without the keys of ``decisions``. A missing ``enabled`` of a section counts as True.

    Raises:
        ValueError: a key has another value than the trainer's.
    """
    config = copy.deepcopy(dict(config))
    for decision in decisions:
        *path, name = decision.key.split(".")
        section: Any = config
        for part in path:
            section = section.get(part) if isinstance(section, Mapping) else None
        if not isinstance(section, dict):
            continue
        said = section.pop(name, True if name == "enabled" and path else AUTO)
        if said != AUTO and not _same(said, decision.value):
            raise ValueError(
                f"{decision.key} is {said!r} in the configuration, but {decision.source} is {decision.value!r}; leave "
                f'{decision.key} out or set it to "auto"'
            )
    return config


def optimizer_decisions(taken: TakenOver) -> list[Decision]:
    """The keys that a user's optimizer decides."""
    options = [
        Decision(key=f"optimizer.params.{name}", value=value, source=f"the optimizer's {name}")
        for name, value in taken.defaults.items()
    ]
    return [Decision(key="optimizer.type", value=taken.type.value, source="the optimizer's class"), *options]


def precision_decisions(precision: str, source: str) -> list[Decision]:
    """The keys that a precision (``"no"``, ``"bf16"``, ``"fp16"``) decides."""
    return [
        Decision(key=f"{name}.enabled", value=precision == name, source=f"{source} ({name})")
        for name in ("bf16", "fp16")
    ]


def with_precision(config: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """``config``, after :func:`precision_decisions` were removed, with that precision and its options."""
    result = {key: value for key, value in config.items() if key not in ("bf16", "fp16")}
    if precision != "no":
        result[precision] = {**config.get(precision, {}), "enabled": True}
    return result


def decided_precision(config: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """``config`` with an Accelerator's ``mixed_precision``.

    Raises:
        ValueError: it has another precision, or PatrickStar lacks this one.
    """
    if precision not in ("no", "bf16", "fp16"):
        raise ValueError(f'mixed_precision is {precision!r}; PatrickStar trains in "no", "bf16" or "fp16"')
    decided = without_decided(config, precision_decisions(precision, f"mixed_precision={precision!r}"))
    return with_precision(decided, precision)


def with_optimizer(config: Mapping[str, Any], taken: TakenOver) -> dict[str, Any]:
    """``config`` with the type and options of a user's optimizer.

    Raises:
        ValueError: it has another type or other options.
    """
    config = without_decided(config, optimizer_decisions(taken))
    section = dict(config.get("optimizer", {}))
    section |= {"type": taken.type.value, "params": {**section.get("params", {}), **taken.defaults}}
    return {**config, "optimizer": section}


def _same(said: Any, value: Any) -> bool:
    if isinstance(said, bool) or isinstance(value, bool):
        return said is value
    if isinstance(said, (int, float)) and isinstance(value, (int, float)):
        return math.isclose(said, value, rel_tol=1e-12)
    if isinstance(said, (list, tuple)) and isinstance(value, (list, tuple)):
        return len(said) == len(value) and all(_same(a, b) for a, b in zip(said, value, strict=True))
    return bool(said == value)
