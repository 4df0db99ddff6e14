"""From a user's dict to a :class:`Config`: the only place that reads dicts.

Unknown keys are refused with the nearest known key, wrong types with what is expected.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import logging
import math
import numbers
import os
import re
from collections.abc import Mapping
from typing import Any

from patrickstar.config.checks import check_values
from patrickstar.config.schema import (
    AdamConfig,
    Bf16Config,
    ClientConfig,
    Config,
    DelaysConfig,
    Fp16Config,
    HostAffinity,
    HostThreadsConfig,
    MemTracerConfig,
    OptimizerConfig,
    OptimizerType,
    OptsConfig,
    ProfileConfig,
    Speculation,
    Streaming,
)

logger = logging.getLogger("patrickstar")

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(value: int | str, name: str) -> int:
    """Bytes of an integer or a string such as ``"24GiB"``, ``"1.5 GB"`` or ``"4096"``.

    Raises:
        ValueError: ``value`` is not a positive amount of memory.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([a-zA-Z]*)\s*", value)
        if match and match.group(2).lower() in _UNITS:
            value = int(float(match.group(1)) * _UNITS[match.group(2).lower()])
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value <= 0:
        raise ValueError(
            f'{name} is {value!r}; give bytes as a positive integer or a string such as "24GiB" or "500MB"'
        )
    return int(value)


def parse_config(config: Mapping[str, Any] | Config | None) -> Config:
    """Checks a user's dict and turns it into a :class:`Config`; None gives the defaults.

    Raises:
        ValueError: an unknown key (naming the nearest), a wrong type, or an impossible value.
    """
    if isinstance(config, Config):
        return config
    if config is None:
        config = {}
    if not isinstance(config, Mapping):
        raise ValueError(f"config is a {type(config).__name__}; give a dict (or None for the defaults)")
    config = dict(config)
    for name in ("device_memory", "host_memory"):
        if config.get(name) is not None:
            config[name] = parse_bytes(config[name], name)
    parsed = _parse_section(Config, config, path="")
    fp16 = parsed.fp16 if parsed.fp16 is not None and parsed.fp16.enabled else None
    bf16 = parsed.bf16 if parsed.bf16 is not None and parsed.bf16.enabled else None
    parsed = dataclasses.replace(parsed, fp16=fp16, bf16=bf16)
    check_values(parsed)
    return parsed


def log_accepted_options(config: Config) -> None:
    """Says once, in one line, which options are accepted because the design always does better."""
    defaults = OptsConfig()
    options = config.client.opts
    accepted = [
        f"client.opts.{f.name}"
        for f in dataclasses.fields(options)
        if getattr(options, f.name) != getattr(defaults, f.name)
    ]
    if accepted:
        logger.info("accepted without effect, PatrickStar always does better: %s", ", ".join(accepted))
    if config.client.mem_tracer.use_async_mem_monitor:
        logger.debug(
            "client.mem_tracer.use_async_mem_monitor: the allocator's exact counters are used instead of polling"
        )


SECTIONS: dict[str, type] = {
    "OptimizerConfig": OptimizerConfig,
    "AdamConfig": AdamConfig,
    "Fp16Config": Fp16Config,
    "Bf16Config": Bf16Config,
    "ClientConfig": ClientConfig,
    "MemTracerConfig": MemTracerConfig,
    "OptsConfig": OptsConfig,
    "ProfileConfig": ProfileConfig,
    "DelaysConfig": DelaysConfig,
    "HostThreadsConfig": HostThreadsConfig,
}
_CHOICES: dict[str, type[enum.Enum]] = {
    "Speculation": Speculation,
    "Streaming": Streaming,
    "HostAffinity": HostAffinity,
}


def _parse_section(cls: type, values: Mapping[str, Any], path: str) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(f"{path.rstrip('.')} is {values!r}; it is a section, give a dict")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    parsed = {}
    for key, value in values.items():
        if key not in fields:
            raise ValueError(_unknown_key(key, path, list(fields)))
        parsed[key] = _parse_value(str(fields[key].type), value, path + key)
    return cls(**parsed)


def _nearest(word: str, known: list[str]) -> str:
    return max(known, key=lambda name: difflib.SequenceMatcher(None, word.lower(), name.lower()).ratio())


def _unknown_key(key: object, path: str, known: list[str]) -> str:
    near = _nearest(str(key), known)
    section = f"section {path.rstrip('.')!r}" if path else "the configuration"
    return f"unknown key {path}{key}: did you mean {path}{near}? Keys of {section}: {', '.join(known)}"


def _parse_value(annotation: str, value: Any, name: str) -> Any:
    optional = annotation.endswith(" | None")
    kind = annotation.removesuffix(" | None")
    if optional and value is None:
        return None
    if kind in SECTIONS:
        return _parse_section(SECTIONS[kind], value, name + ".")
    if kind == "OptimizerType":
        return _parse_optimizer_type(value, name)
    if kind in _CHOICES:
        return _parse_choice(_CHOICES[kind], value, name)
    if kind == "bool":
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it is a switch, give True or False")
        return value
    if kind == "int":
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise ValueError(f"{name} is {value!r}; give an integer")
        return int(value)
    if kind == "float":
        return _parse_float(value, name)
    if kind == "str":
        return _parse_text(value, name)
    return _parse_betas(value, name)


def _parse_float(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; give a finite number")
    return float(value)


def _parse_text(value: Any, name: str) -> str:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError(f"{name} is {value!r}; give a path")
    return str(os.fspath(value))


def _parse_betas(value: Any, name: str) -> tuple[float, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{name} is {value!r}; give two numbers, such as (0.9, 0.999)")
    return (_parse_float(value[0], f"{name}[0]"), _parse_float(value[1], f"{name}[1]"))


def _parse_choice(choices: type[enum.Enum], value: Any, name: str) -> enum.Enum:
    known = [f'"{member.value}"' for member in choices]
    if isinstance(value, choices):
        return value
    if value not in [member.value for member in choices]:
        raise ValueError(f"{name} is {value!r}; give {', '.join(known[:-1])} or {known[-1]}")
    return choices(value)


def _parse_optimizer_type(value: Any, name: str) -> OptimizerType:
    known = [member.value for member in OptimizerType]
    if isinstance(value, OptimizerType):
        return value
    if value not in known:
        near = _nearest(str(value), known)
        raise ValueError(f"{name} is {value!r}; PatrickStar has {' and '.join(known)}: did you mean {near!r}?")
    return OptimizerType(value)
