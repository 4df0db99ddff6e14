"""What can be configured: one frozen dataclass per section, with a docstring under each key."""

from __future__ import annotations

import dataclasses
import enum
import os

import torch

PROFILE_VARIABLE = "PATRICKSTAR_PROFILE"
"""The environment variable that asks for a profile where the configuration does not: ``<step>,<folder>``."""


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

    ``"commit"`` starts them in backward in place, which needs no memory, and is for good; so are then the updates of
    chunks whose states are on the device. It is a promise: every backward is followed by exactly one step with the
    options it began with (no accumulation, no values read or written in between; what would break the promise is
    refused), there is neither clipping nor loss scaling, and gradients that are not finite are applied as
    ``torch.optim`` applies them. A backward that fails half way leaves a model that is updated in part: go on from a
    checkpoint.
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
    """Several processes share one device: budgets that follow from ratios are divided by ``LOCAL_WORLD_SIZE``. Ranks of
    one run can do so on the simulated device; on a GPU they are refused, since NCCL wants one for each.
    """
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
    """Of several processes on a machine: True: all build the model at once, whole, and keep their shares afterwards.
    False: one after the other does, so that no more than one whole model exists at a time. A model on the meta device
    is initialised piece by piece by all at once in either case.
    """
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
