"""The configuration: one frozen dataclass per section, and the only place that reads dicts.

``parse_config`` turns the dict a user writes into a :class:`Config`; nothing past this module sees a dict. Unknown keys
are refused with the nearest known key, wrong types and impossible values with what is expected.
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

import torch

from patrickstar import _C

logger = logging.getLogger("patrickstar")

PROFILE_VARIABLE = "PATRICKSTAR_PROFILE"
"""The environment variable that asks for a profile where the configuration does not: ``<step>,<folder>``."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


class OptimizerType(enum.Enum):
    """Which Adam: they differ in where weight decay goes."""

    ADAM = "Adam"
    ADAMW = "AdamW"


class Speculation(enum.Enum):
    """When updates on the host start."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"
    COMMIT = "commit"


class Streaming(enum.Enum):
    """Who updates the states that stay on the host."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class HostAffinity(enum.Enum):
    """Where threads that compute on the host run."""

    AUTO = "auto"
    PINNED = "pinned"
    FREE = "free"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamConfig:
    """``optimizer.params``: the defaults of every parameter group."""

    lr: float = 1e-3
    """Learning rate, at least 0."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the two moments, each in [0, 1)."""
    eps: float = 1e-8
    """Added to the denominator, at least 0."""
    weight_decay: float = 0.0
    """L2 term with Adam, decoupled decay with AdamW; at least 0."""
    use_hybrid_adam: bool = True
    """Whether optimizer states may live on the device where its memory has a margin; else all are on the host."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """``optimizer``."""

    type: OptimizerType = OptimizerType.ADAM
    """``"Adam"`` or ``"AdamW"``."""
    params: AdamConfig = dataclasses.field(default_factory=AdamConfig)
    """Its options."""
    speculation: Speculation = Speculation.AUTO
    """Whether updates on the host start during backward, expecting that neither clipping nor an overflow will act, into
    memory of their own (up to 14 bytes per parameter, within ``host_memory``), and are done again where one did:
    ``"auto"`` (with a GPU), ``"always"`` or ``"never"``. It changes no number.

    ``"commit"`` starts them in backward in place, which needs no memory, and is for good. It is a promise: every
    backward is followed by exactly one step with the options it began with (no accumulation, no values read or written
    in between; what would break the promise is refused), there is neither clipping nor loss scaling, and gradients that
    are not finite are applied as ``torch.optim`` applies them. A backward that fails half way leaves a model that is
    updated in part: go on from a checkpoint.
    """
    streaming: Streaming = Streaming.NEVER
    """Whether optimizer states that stay on the host may be updated by the GPU, through which they pass (14 bytes per
    parameter up and as many down), beside the host's threads: ``"auto"`` (with a GPU, where the threads are
    behind and measured speeds say that it helps), ``"always"`` or ``"never"``. It changes no number. It pays
    where there are few cores for a GPU; with 16 of them host memory bounds updates, and it does not.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp16Config:
    """``fp16``: float16 training with loss scaling (DeepSpeed's keys and semantics)."""

    enabled: bool = True
    """False is the same as leaving the section out."""
    loss_scale: float = 0.0
    """A static scale, or 0 for a dynamic one."""
    initial_scale_power: int = 16
    """The dynamic scale starts at 2 to this power."""
    loss_scale_window: int = 1000
    """Steps without overflow after which the dynamic scale doubles."""
    hysteresis: int = 2
    """Overflows that are tolerated before the dynamic scale halves."""
    min_loss_scale: float = 1.0
    """The dynamic scale never falls below this."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bf16Config:
    """``bf16``: bfloat16 training; no loss scaling is needed."""

    enabled: bool = True
    """False is the same as leaving the section out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemTracerConfig:
    """``client.mem_tracer``: how much memory chunks may take. ``device_memory`` and ``host_memory`` win over the
    ratios.
    """

    use_async_mem_monitor: bool = True
    """Accepted; the allocator's exact counters always replace the first PatrickStar's polling thread."""
    warmup_gpu_chunk_mem_ratio: float = 0.1
    """Share of the device budget for chunks in the warm-up step (and always, with a static partition)."""
    overall_gpu_mem_ratio: float = 0.8
    """Share of the device's memory that is the device budget."""
    overall_cpu_mem_ratio: float = 0.8
    """Share of the host's memory that is the host budget."""
    margin_use_ratio: float = 0.8
    """Share of the device memory left after compute copies and the tide that optimizer states may take."""
    use_fake_dist: bool = False
    """Several processes share one device: budgets are divided by ``LOCAL_WORLD_SIZE``."""
    with_static_partition: bool = False
    """Chunks get a fixed share of the device (``warmup_gpu_chunk_mem_ratio``) instead of what the tide leaves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptsConfig:
    """``client.opts``: options of the first PatrickStar that this design always improves on. Accepted."""

    with_mem_saving_comm: bool = False
    """Accepted; collectives work in place on whole chunks."""
    with_mem_cache: bool = False
    """Accepted; device slots and host blocks are always reused."""
    with_async_move: bool = False
    """Accepted; transfers are always asynchronous."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """``client``."""

    mem_tracer: MemTracerConfig = dataclasses.field(default_factory=MemTracerConfig)
    """Memory shares."""
    opts: OptsConfig = dataclasses.field(default_factory=OptsConfig)
    """Accepted options without effect."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """``profile``: one step as a trace, a picture and a summary. ``python -m patrickstar.profile`` asks for it."""

    step: int = 4
    """Which step of the engine, counted from 1. The first measures, the second is the first with a plan."""
    output: str = "profile"
    """The folder for ``step<N>.trace.json`` (chrome://tracing, https://ui.perfetto.dev), ``step<N>.svg`` (with
    matplotlib) and ``step<N>.txt``.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelaysConfig:
    """``delays``: delays made on purpose, for tests and benchmarks. They change no number."""

    link_gbps: float = 0.0
    """A simulated link between host and device: 10^9 bytes per second, each way; 0: as fast as memory is copied."""
    link_latency_us: float = 0.0
    """What every transfer takes beside that, in microseconds."""
    max_random_us: float = 0.0
    """Random delays up to this before every transfer, moment of compute and update on the host, in microseconds."""
    seed: int = 0
    """Of the random delays."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostThreadsConfig:
    """``host_threads``: the threads that update, copy and touch host memory. They change no number."""

    num_threads: int = 0
    """How many, with the one that hands out the work; 0: one for each CPU that the process may use, with a GPU but for
    one core, which launches kernels. A cgroup's CPU quota is not exceeded.
    """
    affinity: HostAffinity = HostAffinity.AUTO
    """``"pinned"``: each has a CPU of its own, cores before their further hyper-threads, spread over NUMA nodes.
    ``"free"``: the system places them. ``"auto"``: pinned with a GPU, free without one, where PyTorch's own threads
    compute on the same CPUs, and free where ``LOCAL_WORLD_SIZE`` is more than 1 and ``num_sharing_processes`` is not
    said. A CPU quota below the number of CPUs leaves them free in any case.
    """
    num_sharing_processes: int | None = None
    """Processes that may use the same CPUs, this one included. They divide them, whole cores and neighbours, by
    ``LOCAL_RANK``. None: 1, all that this process may use are its own. It is for the user to say: CPUs that processes
    share look from inside like those that a launcher (numactl, Slurm) gave this process alone.
    """


def profile_of_environment() -> ProfileConfig | None:
    """What ``PATRICKSTAR_PROFILE=<step>,<folder>`` asks for; None when it is not set.

    Raises:
        ValueError: it is set to something else.
    """
    value = os.environ.get(PROFILE_VARIABLE)
    if not value:
        return None
    step, _, output = value.partition(",")
    if not step.isdecimal() or not output:
        raise ValueError(f"{PROFILE_VARIABLE} is {value!r}; give <step>,<folder>, for example 4,profile")
    return ProfileConfig(step=int(step), output=output)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration of an engine."""

    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """Which optimizer, and its defaults."""
    fp16: Fp16Config | None = None
    """float16 training; None or disabled: not."""
    bf16: Bf16Config | None = None
    """bfloat16 training; neither section: float32."""
    gradient_clipping: float = 0.0
    """Largest global L2 norm of the gradients; 0 or less: no clipping."""
    default_chunk_size: int = 32 * 1024 * 1024
    """Elements per chunk. A smaller size is chosen when the device budget is too small for this one."""
    release_after_init: bool = False
    """Whether each process keeps only its share after the initialisation (with several processes)."""
    use_cpu_embedding: bool = False
    """Keep ``nn.Embedding`` weights in host memory and look them up there."""
    client: ClientConfig = dataclasses.field(default_factory=ClientConfig)
    """Memory shares and accepted options."""
    device_memory: int | None = None
    """Device budget in bytes, or a string such as ``"24GiB"``; activations included. None: by ratio (unlimited on the
    simulated device).
    """
    host_memory: int | None = None
    """Host budget for chunks, in bytes or as a string; None: by ratio."""
    profile: ProfileConfig | None = dataclasses.field(default_factory=profile_of_environment)
    """Which step to profile; None: what the environment variable ``PATRICKSTAR_PROFILE=<step>,<folder>`` says, or none.
    """
    rank_timeout_seconds: float = 600.0
    """How long a rank waits for another one before it gives up with an error (with several ranks)."""
    delays: DelaysConfig = dataclasses.field(default_factory=DelaysConfig)
    """A simulated link and random delays."""
    host_threads: HostThreadsConfig = dataclasses.field(default_factory=HostThreadsConfig)
    """How many threads compute on the host, and where."""
    plan: str | None = None
    """Path of a plan that ``engine.plan().save(path)`` wrote for the same model, chunk size and budgets: the first step
    then replays it. It changes no number; a plan for other chunks is refused.
    """

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of parameters and gradients in forward and backward."""
        if self.fp16 is not None:
            return torch.float16
        return torch.float32 if self.bf16 is None else torch.bfloat16


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
    _check_values(parsed)
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


_SECTIONS = {
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
    if kind in _SECTIONS:
        return _parse_section(_SECTIONS[kind], value, name + ".")
    if kind == "OptimizerType":
        return _parse_optimizer_type(value, name)
    if kind in _CHOICES:
        return _parse_choice(_CHOICES[kind], value, name)
    if kind == "str":
        if not isinstance(value, str):
            raise ValueError(f"{name} is {value!r}; give a path as a string")
        return value
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


def _check_values(config: Config) -> None:
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
