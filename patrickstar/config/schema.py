"""Sections of the configuration that the engine itself reads. The text under each key is its meaning.

Those with a file of their own: optimizer.py, quantization.py, tensor_parallel.py.
"""

from __future__ import annotations

import enum
import os
from typing import Annotated

from pydantic import Field

from patrickstar.config.fates import HONOURED, OtherSpelling, no_effect, refused
from patrickstar.config.values import (
    AtLeast0,
    AtLeast1,
    FilePath,
    Memory,
    NonNegative,
    Positive,
    Section,
    Share,
    Switch,
)

PROFILE_VARIABLE = "PATRICKSTAR_PROFILE"
"""The environment variable that asks for a profile where the configuration does not: ``<step>,<folder>``."""
_MOST_THREADS = 4096


class RankReduction(enum.Enum):
    """What becomes of the ranks' gradients."""

    MEAN = "mean"
    SUM = "sum"


class SequenceMode(enum.Enum):
    """How attention over a sequence that ranks share is computed (:class:`patrickstar.sequence.Mode`)."""

    AUTO = "auto"
    RING = "ring"
    ZIGZAG = "zigzag"
    ULYSSES = "ulysses"
    HYBRID = "hybrid"
    RSA = "rsa"


class LossComputation(enum.Enum):
    """How much of a language model's logits exists at a time."""

    WHOLE = "whole"
    FUSED = "fused"


class ActivationOffload(enum.Enum):
    """Whose activations may leave the device between forward and backward."""

    AUTO = "auto"
    NEVER = "never"
    ALWAYS = "always"


class KeepAttention(enum.Enum):
    """Whether what attention gives in checkpointed layers is kept for their backward."""

    AUTO = "auto"
    NEVER = "never"
    ALWAYS = "always"


class DiskIo(enum.Enum):
    """How bytes go to a disk and come back."""

    AUTO = "auto"
    IO_URING = "io_uring"
    THREADS = "threads"


class HostAffinity(enum.Enum):
    """Where threads that compute on the host run."""

    AUTO = "auto"
    PINNED = "pinned"
    FREE = "free"


class Fp16Config(Section):
    """The section ``fp16``: float16 training with loss scaling (DeepSpeed's keys and semantics)."""

    enabled: Annotated[Switch, HONOURED] = True
    """Whether training is in float16; False is the same as leaving the section out."""
    loss_scale: Annotated[NonNegative, HONOURED] = 0.0
    """A static loss scale, or 0 for a dynamic one."""
    initial_scale_power: Annotated[AtLeast0, Field(le=127), HONOURED] = 16
    """Power of 2 that the dynamic scale starts at."""
    loss_scale_window: Annotated[AtLeast1, HONOURED] = 1000
    """Number of steps without overflow; in the step that follows them the dynamic scale doubles."""
    hysteresis: Annotated[AtLeast1, HONOURED] = 2
    """The dynamic scale halves at this many overflows, and at each one after that until the count begins anew; with 1,
    at every overflow.
    """
    min_loss_scale: Annotated[Positive, HONOURED] = 1.0
    """Value that the dynamic scale never falls below."""
    consecutive_hysteresis: Annotated[Switch, HONOURED] = False
    """Whether the count of overflows begins anew with each step without one; else only when the scale doubles."""
    auto_cast: Annotated[Switch, HONOURED] = False
    """Whether floating point inputs are cast to float16. They are in either case."""
    fp16_master_weights_and_grads: Annotated[
        Switch, refused("masters are float32, which exactness is built on; leave it out")
    ] = False
    """Whether the optimizer's master weights and gradients are float16."""


class Bf16Config(Section):
    """The section ``bf16``: bfloat16 training; no loss scaling is needed."""

    enabled: Annotated[Switch, HONOURED] = True
    """Whether training is in bfloat16; False is the same as leaving the section out."""
    check_grad_overflow: Annotated[
        Switch, OtherSpelling("check_overflow"), no_effect("a step whose gradients are not finite is always skipped")
    ] = True
    """Whether a step is skipped when its gradients are not finite."""
    immediate_grad_update: Annotated[
        Switch, no_effect("gradients are summed as backward makes them; ``optimizer.speculation`` starts updates there")
    ] = False
    """Whether gradients are added to the optimizer's copies of them during backward."""
    bf16_master_weights_and_grads: Annotated[
        Switch, refused("masters are float32, which exactness is built on; leave it out")
    ] = False
    """Whether the optimizer's master weights and gradients are bfloat16."""
    bf16_optimizer_states: Annotated[
        Switch, refused("momentum and variance are float32, which exactness is built on; leave it out")
    ] = False
    """Whether the optimizer's momentum and variance are bfloat16."""


class MemTracerConfig(Section):
    """``client.mem_tracer``: how much memory chunks may take. ``device_memory`` and ``host_memory`` win over the
    ratios.
    """

    use_async_mem_monitor: Annotated[Switch, no_effect("the allocator's exact counters are always used")] = True
    """Whether a thread polls memory use, as the first PatrickStar did."""
    warmup_gpu_chunk_mem_ratio: Annotated[Share, HONOURED] = 0.1
    """Share of the device budget for chunks in the warm-up step."""
    overall_gpu_mem_ratio: Annotated[Share | None, HONOURED] = None
    """Share of the device's memory that is the device budget. None: what is free, less a reserve."""
    overall_cpu_mem_ratio: Annotated[Share | None, HONOURED] = None
    """Share of the host's memory that is the host budget. None: what is available, less a reserve."""
    margin_use_ratio: Annotated[Share | None, HONOURED] = None
    """Share of the device memory left after compute copies and the tide that optimizer states may take. None: all."""
    use_fake_dist: Annotated[Switch, HONOURED] = False
    """Ranks may be more than GPUs and share them: local rank n computes on GPU n modulo their number, collectives go
    through the host, and ranks divide what is free on their GPU, or a ratio of it. Processes that are no ranks of one
    run divide by ``LOCAL_WORLD_SIZE``.
    """
    with_static_partition: Annotated[Switch, no_effect("chunks get what activations leave, moment by moment")] = False
    """Chunks get a fixed share of the device, as they did at the first PatrickStar's choice."""


class OptsConfig(Section):
    """``client.opts``: options of the first PatrickStar that this design always improves on."""

    with_mem_saving_comm: Annotated[Switch, no_effect("collectives work in place on whole chunks")] = False
    """Whether chunks are broadcast one by one instead of all at once."""
    with_mem_cache: Annotated[Switch, no_effect("device slots and host blocks are always reused")] = False
    """Whether the memory of released chunks is kept for later ones."""
    with_async_move: Annotated[Switch, no_effect("transfers are always asynchronous")] = False
    """Whether chunks are moved while the GPU computes."""


class ClientConfig(Section):
    """The section ``client``: what chunks may take of memory, and options of the first PatrickStar."""

    mem_tracer: MemTracerConfig = Field(default_factory=MemTracerConfig)
    """Shares of device and host memory that chunks may take."""
    opts: OptsConfig = Field(default_factory=OptsConfig)
    """Options of the first PatrickStar, accepted without effect."""


class ProfileConfig(Section):
    """``profile``: one step as a trace, a picture and a summary. ``python -m patrickstar.profile`` asks for it."""

    step: Annotated[AtLeast1, HONOURED] = 4
    """Which step of the engine is profiled, counted from 1. The first measures, the second is the first with a plan."""
    output: Annotated[FilePath, HONOURED] = "profile"
    """The folder for ``step<N>.trace.json`` (chrome://tracing, https://ui.perfetto.dev), ``step<N>.svg`` (with
    matplotlib), ``step<N>.txt`` and, once a step was measured, ``step<N>.program.txt``.
    """


class DiskMemoryConfig(Section):
    """The section ``disk_memory``: a disk under the host, for optimizer states that nothing else has room for."""

    path: Annotated[FilePath | None, HONOURED] = None
    """A folder on the disk, which must be there; each rank makes one file in it that has no name and ends with the
    process. None: there is no disk.
    """
    size: Annotated[Memory | None, HONOURED] = None
    """What of the disk each rank may take, in bytes or as a string such as ``"2TiB"``; None: its part of 95 % of what
    is free there.
    """
    io: Annotated[DiskIo, HONOURED] = DiskIo.AUTO
    """How bytes are moved: ``"io_uring"``, ``"threads"`` that call pread and pwrite, or ``"auto"``: io_uring where the
    kernel lets this process use it, else threads.
    """


class DelaysConfig(Section):
    """``delays``: delays made on purpose, for tests and benchmarks. They change no number."""

    link_gbps: Annotated[NonNegative, HONOURED] = 0.0
    """Speed of a simulated link of host and device, in 10^9 bytes/s each way; 0: as fast as memory is copied."""
    link_latency_us: Annotated[NonNegative, HONOURED] = 0.0
    """Time that every transfer over the simulated link takes beside that of its bytes, in microseconds."""
    max_random_us: Annotated[NonNegative, HONOURED] = 0.0
    """Largest random delay, in microseconds: before every transfer, before compute, and after a wait on the host."""
    seed: Annotated[AtLeast0, HONOURED] = 0
    """Seed of the random delays."""


class SequenceParallelConfig(Section):
    """The section ``sequence_parallel``: ranks that have a slice each of the same sequences."""

    size: Annotated[AtLeast1, HONOURED] = 1
    """Number of ranks that share each sequence; it divides the number of all ranks. The others have other samples."""
    mode: Annotated[SequenceMode, HONOURED] = SequenceMode.AUTO
    """How attention is computed: ``"zigzag"`` or ``"ring"`` (keys and values travel round a ring of ranks),
    ``"ulysses"`` (each rank gets some heads of the whole sequence), ``"hybrid"`` (both), ``"rsa"`` (ring self-attention
    as published, for comparison), or ``"auto"``: what takes least time by counting (``patrickstar plan`` says why).
    """
    ulysses_size: Annotated[AtLeast1 | None, HONOURED] = None
    """With ``mode`` ``"hybrid"``: number of neighbours among which heads are divided; rings go across them. None: the
    ranks of a machine.
    """


class ActivationsConfig(Section):
    """The section ``activations``: what grows with the number of tokens, and need not exist for all of them at once."""

    loss: Annotated[LossComputation, HONOURED] = LossComputation.WHOLE
    """``"whole"``: as the model computes it, from all logits. ``"fused"``: a causal language model of Hugging Face
    computes it together with its output layer, some tokens at a time; ``logits`` of an output cannot be used while it
    trains with labels, and are made when they are used without autograd. A model that has another loss is refused.
    Beside ``tensor_parallel`` it changes nothing: a rank has its part of the logits, and nothing else of their size.
    """
    tile_tokens: Annotated[AtLeast0, HONOURED] = 0
    """The MLPs and norms of a model's layers are computed so many tokens at a time, and again in backward; 0: all
    tokens at once. Gradients of their parameters are sums over tiles in float32. A model without such modules is
    refused.
    """
    offload: Annotated[ActivationOffload, HONOURED] = ActivationOffload.AUTO
    """Whether tensors that a forward keeps for its backward go to host memory where the device has no room for them
    beside what is computed and the chunks that this needs, the first of them first, and come back in time; where host
    memory has no room they stay. ``"auto"``: of models of Hugging Face that checkpoint their layers, whose inputs these
    are then. ``"always"``: of any model. ``"never"``. Numbers do not depend on it.
    """
    keep_attention: Annotated[KeepAttention, HONOURED] = KeepAttention.AUTO
    """Whether what attention gives in a checkpointed layer of a model of Hugging Face is kept for the layer's backward,
    which else computes it once more. ``"auto"``: from 32,768 tokens on, where device and host have room beside the
    layers' inputs; of fewer tokens that room and the link are worth more to parameters. ``"always"``: of any number
    of tokens, where there is room. ``"never"``. Numbers do not depend on it. It needs checkpoints with
    ``use_reentrant=False``, no dropout in attention, and an ``offload`` that is not ``"never"``; layers that are
    compiled compute attention again.
    """


class HostThreadsConfig(Section):
    """``host_threads``: the threads that update, copy and touch host memory. They change no number."""

    num_threads: Annotated[AtLeast0, Field(le=_MOST_THREADS), HONOURED] = 0
    """Number of threads, with the one that hands out the work; 0: one for each CPU that the process may use, with a GPU
    but for one core, which launches kernels. A cgroup's CPU quota is not exceeded.
    """
    affinity: Annotated[HostAffinity, HONOURED] = HostAffinity.AUTO
    """``"pinned"``: each has a CPU of its own, cores before their further hyper-threads, spread over NUMA nodes.
    ``"free"``: the system places them. ``"auto"``: pinned with a GPU, free without one, where PyTorch's own threads
    compute on the same CPUs, and free where ``LOCAL_WORLD_SIZE`` is more than 1 and ``num_sharing_processes`` is not
    said. A CPU quota below the number of CPUs leaves them free in any case.
    """
    num_sharing_processes: Annotated[Annotated[AtLeast1, Field(le=_MOST_THREADS)] | None, HONOURED] = None
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
    if not step.isdecimal() or int(step) < 1 or not output:
        raise ValueError(
            f"{PROFILE_VARIABLE} is {value!r}; give <step>,<folder>, for example 4,profile; steps count from 1"
        )
    return ProfileConfig(step=int(step), output=output)
