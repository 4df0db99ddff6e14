"""Sections of the configuration that the engine itself reads. The text under each key is its meaning.

Other files: optimizer.py, quantization.py, tensor_parallel.py.
"""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import Field

from patrickstar.choices import (
    ActivationOffload,
    DiskIo,
    ExpertsComputation,
    HostAffinity,
    KeepAttention,
    LossComputation,
    Recompute,
    SequenceMode,
)
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
"""The environment variable that requests a profile if the configuration does not: ``<step>,<folder>``."""
_MOST_THREADS = 4096


class Fp16Config(Section):
    """The section ``fp16``: float16 training with loss scaling (DeepSpeed's keys and semantics)."""

    enabled: Annotated[Switch, HONOURED] = True
    """True: training is in float16; False is the same as a missing section."""
    loss_scale: Annotated[NonNegative, HONOURED] = 0.0
    """A static loss scale, or 0 for a dynamic one."""
    initial_scale_power: Annotated[AtLeast0, Field(le=127), HONOURED] = 16
    """Power of 2 that the dynamic scale starts at."""
    loss_scale_window: Annotated[AtLeast1, HONOURED] = 1000
    """Number of steps without overflow; in the step that follows them the dynamic scale doubles."""
    hysteresis: Annotated[AtLeast1, HONOURED] = 2
    """The dynamic scale halves at this many overflows, and at each further one until the count restarts; with 1, at
    every overflow.
    """
    min_loss_scale: Annotated[Positive, HONOURED] = 1.0
    """Value that the dynamic scale never falls below."""
    consecutive_hysteresis: Annotated[Switch, HONOURED] = False
    """True: the count of overflows restarts with each step without one; else only when the scale doubles."""
    auto_cast: Annotated[Switch, HONOURED] = False
    """True if floating point inputs are cast to float16. They are in either case."""
    fp16_master_weights_and_grads: Annotated[
        Switch, refused("masters are float32, which exactness is built on; leave it out")
    ] = False
    """True if the optimizer's master weights and gradients are float16."""


class Bf16Config(Section):
    """The section ``bf16``: bfloat16 training; no loss scaling is needed."""

    enabled: Annotated[Switch, HONOURED] = True
    """True: training is in bfloat16; False is the same as a missing section."""
    check_grad_overflow: Annotated[
        Switch, OtherSpelling("check_overflow"), no_effect("a step whose gradients are not finite is always skipped")
    ] = True
    """True if a step is skipped when its gradients are not finite."""
    immediate_grad_update: Annotated[
        Switch, no_effect("gradients are summed as backward makes them; ``optimizer.speculation`` starts updates there")
    ] = False
    """True if gradients are added to the optimizer's copies of them during backward."""
    bf16_master_weights_and_grads: Annotated[
        Switch, refused("masters are float32, which exactness is built on; leave it out")
    ] = False
    """True if the optimizer's master weights and gradients are bfloat16."""
    bf16_optimizer_states: Annotated[
        Switch, refused("momentum and variance are float32, which exactness is built on; leave it out")
    ] = False
    """True if the optimizer's momentum and variance are bfloat16."""


class MemTracerConfig(Section):
    """``client.mem_tracer``: the memory that chunks may take. ``device_memory`` and ``host_memory`` override the
    ratios.
    """

    use_async_mem_monitor: Annotated[Switch, no_effect("the allocator's exact counters are always used")] = True
    """True if a thread polls memory use, as in the first PatrickStar."""
    warmup_gpu_chunk_mem_ratio: Annotated[Share, HONOURED] = 0.1
    """Share of the device budget for chunks in the warm-up step."""
    overall_gpu_mem_ratio: Annotated[Share | None, HONOURED] = None
    """Share of the device's memory that is the device budget. None: the free memory, less a reserve."""
    overall_cpu_mem_ratio: Annotated[Share | None, HONOURED] = None
    """Share of the host's memory that is the host budget. None: the available memory, less a reserve."""
    margin_use_ratio: Annotated[Share | None, HONOURED] = None
    """Share of the device memory left after compute copies and activation memory that optimizer states may take. None:
    all.
    """
    use_fake_dist: Annotated[Switch, HONOURED] = False
    """True: there may be more ranks than GPUs. Local rank n computes on GPU n modulo their number, collectives go
    through the host, and ranks divide the free memory of their GPU, or a ratio of it. Processes that are no ranks of
    one run divide by ``LOCAL_WORLD_SIZE``.
    """
    with_static_partition: Annotated[Switch, no_effect("chunks get what activations leave, access by access")] = False
    """True: chunks get a fixed share of the device, an option of the first PatrickStar."""


class OptsConfig(Section):
    """``client.opts``: options of the first PatrickStar that this design makes unnecessary."""

    with_mem_saving_comm: Annotated[Switch, no_effect("collectives work in place on whole chunks")] = False
    """True if chunks are broadcast one by one instead of all at once."""
    with_mem_cache: Annotated[Switch, no_effect("device and host buffers are always reused")] = False
    """True if the memory of released chunks is kept for later ones."""
    with_async_move: Annotated[Switch, no_effect("transfers are always asynchronous")] = False
    """True if chunks are moved while the GPU computes."""


class ClientConfig(Section):
    """The section ``client``: shares of memory for chunks, and options of the first PatrickStar."""

    mem_tracer: MemTracerConfig = Field(default_factory=MemTracerConfig)
    """Shares of device and host memory that chunks may take."""
    opts: OptsConfig = Field(default_factory=OptsConfig)
    """Options of the first PatrickStar, accepted without effect."""


class ProfileConfig(Section):
    """``profile``: one step as a trace, a picture and a summary, as for ``python -m patrickstar.profile``."""

    step: Annotated[AtLeast1, HONOURED] = 4
    """The profiled step of the engine, counted from 1. The first step measures, the second is the first with a plan."""
    output: Annotated[FilePath, HONOURED] = "profile"
    """The folder for ``step<N>.trace.json`` (chrome://tracing, https://ui.perfetto.dev), ``step<N>.svg`` (with
    matplotlib), ``step<N>.txt`` and, once a step was measured, ``step<N>.program.txt``.
    """


class DiskMemoryConfig(Section):
    """The section ``disk_memory``: a disk tier below the host, for optimizer states that fit nowhere else."""

    path: Annotated[FilePath | None, HONOURED] = None
    """An existing folder on the disk; each rank makes one unnamed file in it, which ends with the process. None: no
    disk.
    """
    size: Annotated[Memory | None, HONOURED] = None
    """Disk space that each rank may take, in bytes or as a string such as ``"2TiB"``; None: its part of 95 % of the
    free space.
    """
    io: Annotated[DiskIo, HONOURED] = DiskIo.AUTO
    """Interface for transfers: ``"io_uring"``, ``"threads"`` that call pread and pwrite, or ``"auto"``: io_uring if the
    kernel permits it to this process, else threads.
    """


class DelaysConfig(Section):
    """``delays``: artificial delays, for tests and benchmarks. They change no number."""

    link_gbps: Annotated[NonNegative, HONOURED] = 0.0
    """Speed of a simulated link of host and device, in 10^9 bytes/s each way; 0: as fast as memory is copied."""
    link_latency_us: Annotated[NonNegative, HONOURED] = 0.0
    """Time that every transfer over the simulated link takes beside that of its bytes, in microseconds."""
    max_random_us: Annotated[NonNegative, HONOURED] = 0.0
    """Largest random delay, in microseconds: before every transfer, before compute, and after a wait on the host."""
    seed: Annotated[AtLeast0, HONOURED] = 0
    """Seed of the random delays."""


class SequenceParallelConfig(Section):
    """The section ``sequence_parallel``: context parallelism; each rank has a slice of the same sequences."""

    size: Annotated[AtLeast1, HONOURED] = 1
    """Ranks that share each sequence; it divides the number of all ranks. The others have other samples."""
    mode: Annotated[SequenceMode, HONOURED] = SequenceMode.AUTO
    """Attention mode. ``"zigzag"`` and ``"ring"`` send keys and values round a ring of ranks. ``"ulysses"`` gives each
    rank some heads of the whole sequence. ``"hybrid"`` does both. ``"rsa"`` is ring self-attention as published, for
    comparison. ``"auto"`` takes the fastest by a cost model (``patrickstar plan`` says why).
    """
    ulysses_size: Annotated[AtLeast1 | None, HONOURED] = None
    """For ``"hybrid"``: neighbouring ranks over which heads are sharded; rings go across them. None: the ranks of a
    machine.
    """


class ActivationsConfig(Section):
    """The section ``activations``: memory that grows with the number of tokens, and need not exist for all of them at
    once.
    """

    loss: Annotated[LossComputation, HONOURED] = LossComputation.WHOLE
    """``"whole"``: the model computes its loss from all logits. ``"fused"``: a Hugging Face causal language model
    computes the loss together with its output layer, some tokens at a time. ``logits`` of an output then cannot be used
    in training with labels; without autograd they are computed on use. A model with another loss is refused. With
    ``tensor_parallel`` it changes nothing: a rank has its part of the logits, and nothing else of their size.
    """
    experts: Annotated[ExpertsComputation, HONOURED] = ExpertsComputation.FUSED
    """``"fused"``: experts that transformers computes with ``grouped_mm`` gather, gate and add up in one pass each. The
    products are the same; gradients of tokens, routing weights and biases are summed in float32, not in the model's
    dtype. ``"model"``: as transformers does. Other experts are computed as they are.
    """
    tile_tokens: Annotated[AtLeast0, HONOURED] = 0
    """Tokens for which the MLPs and norms of a model's layers are computed at a time, with recomputation in backward;
    0: all tokens at once. Gradients of their parameters are sums over tiles in float32. A model without such modules is
    refused.
    """
    offload: Annotated[ActivationOffload, HONOURED] = ActivationOffload.AUTO
    """Activation offload: tensors that a forward saves for its backward go to host memory, the earliest first, if the
    device has no room for them beside computation and its chunks. They are prefetched in backward; if host memory is
    full they stay. ``"auto"``: for Hugging Face models with activation checkpointing, whose layer inputs are offloaded.
    ``"always"``: for any model. ``"never"``. Numbers do not depend on it.
    """
    recompute: Annotated[Recompute, HONOURED] = Recompute.AUTO
    """Recomputation of checkpointed calls (``torch.utils.checkpoint`` with ``use_reentrant=False``, as Hugging Face's
    layers make them). ``"auto"``: with a GPU, the first step measures what each call would save. Calls then save
    everything, or the results of matrix products and attention, on the GPU or on the host, or nothing, whichever gives
    the shortest predicted step. ``"always"``: they save nothing. Numbers do not depend on it. Batch norms,
    ``preserve_rng_state=False`` and a ``context_fn`` of the user mean ``"always"``; compiled layers save everything or
    nothing.
    """
    keep_attention: Annotated[KeepAttention, HONOURED] = KeepAttention.AUTO
    """Selective recomputation: keep attention's outputs in checkpointed layers of a Hugging Face model, so that the
    layer's backward does not recompute attention. ``"auto"``: from 32,768 tokens on, if device and host have room
    beside the layers' inputs; with fewer tokens, room and link are worth more for parameters. ``"always"``: for any
    number of tokens, if there is room. ``"never"``. Numbers do not depend on it. It needs checkpoints with
    ``use_reentrant=False``, no dropout in attention, and an ``offload`` other than ``"never"``; compiled layers
    recompute attention.
    """


class HostThreadsConfig(Section):
    """``host_threads``: the threads that update parameters, copy and first touch host memory. They change no number."""

    num_threads: Annotated[AtLeast0, Field(le=_MOST_THREADS), HONOURED] = 0
    """Number of threads, including the one that distributes the work; 0: one for each CPU that the process may use,
    less one core with a GPU, for kernel launches, to which these threads give way (a nice value of 10). A cgroup's CPU
    quota is not exceeded.
    """
    affinity: Annotated[HostAffinity, HONOURED] = HostAffinity.AUTO
    """``"pinned"``: each thread has its own CPU, cores before further hyper-threads, spread over NUMA nodes.
    ``"free"``: the system places them. ``"auto"``: pinned with a GPU. Free without one, where PyTorch's own threads use
    the same CPUs, and if ``LOCAL_WORLD_SIZE`` is more than 1 and ``num_sharing_processes`` is not given. A CPU quota
    below the number of CPUs leaves them free in any case.
    """
    num_sharing_processes: Annotated[Annotated[AtLeast1, Field(le=_MOST_THREADS)] | None, HONOURED] = None
    """Processes that may use the same CPUs, this one included. They divide them by ``LOCAL_RANK``, in whole
    neighbouring cores. None: 1, all CPUs of this process are its own. The user must say so: shared CPUs look like those
    that a launcher (numactl, Slurm) gave to this process alone.
    """


def profile_of_environment() -> ProfileConfig | None:
    """The profile requested by ``PATRICKSTAR_PROFILE=<step>,<folder>``; None if it is not set.

    Raises:
        ValueError: it is malformed.
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
