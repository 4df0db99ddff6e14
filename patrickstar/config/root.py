"""The whole configuration: PatrickStar's keys, and those of DeepSpeed."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field

from patrickstar.config.fates import HONOURED, OtherSpelling, Reader, mapped
from patrickstar.config.monitors import (
    CsvMonitorConfig,
    FlopsProfilerConfig,
    TensorBoardConfig,
    WandbConfig,
)
from patrickstar.config.optimizer import OptimizerConfig
from patrickstar.config.other_keys import with_other_keys
from patrickstar.config.quantization import QuantizationConfig
from patrickstar.config.schedulers import SchedulerConfig
from patrickstar.config.schema import (
    ActivationsConfig,
    Bf16Config,
    ClientConfig,
    DelaysConfig,
    DiskMemoryConfig,
    Fp16Config,
    HostThreadsConfig,
    ProfileConfig,
    RankReduction,
    SequenceParallelConfig,
    profile_of_environment,
)
from patrickstar.config.tensor_parallel import TensorParallelConfig
from patrickstar.config.values import (
    AtLeast0,
    AtLeast1,
    FilePath,
    Integer,
    Memory,
    Number,
    Positive,
    Section,
    Switch,
    SwitchOrPath,
    ignoring_case,
)
from patrickstar.config.zero import ZeroConfig


def _steps(value: Any) -> Any:
    return None if isinstance(value, float) and math.isinf(value) else value


class _EngineKeys(Section):
    """What both entry points act on."""

    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """Which optimizer updates the parameters, and its options."""
    fp16: Fp16Config | None = None
    """Training in float16, with loss scaling; without the section, or disabled: not."""
    bf16: Annotated[Bf16Config | None, OtherSpelling("bfloat16")] = None
    """Training in bfloat16; without this section and ``fp16``, training is in float32."""
    gradient_clipping: Annotated[Number, HONOURED] = 0.0
    """Largest global L2 norm of the gradients; larger ones are scaled down to it. 0 or less: no clipping."""
    default_chunk_size: Annotated[Integer, Field(ge=1024), HONOURED] = 32 * 1024 * 1024
    """Elements per chunk, at least 1024. A smaller size is chosen when the device budget is too small for this one."""
    release_after_init: Annotated[Switch, HONOURED] = False
    """Of several processes on a machine: True: all build the model at once, whole, and keep their shares afterwards.
    False: one after the other does, so that no more than one whole model exists at a time. A model on the meta device
    is initialised piece by piece by all at once in either case.
    """
    use_cpu_embedding: Annotated[Switch, HONOURED] = False
    """Keep ``nn.Embedding`` weights in host memory and look them up there. Tables that are tied to other layers, or
    divided by ``tensor_parallel``, stay in chunks, which are where there is room.
    """
    client: ClientConfig = Field(default_factory=ClientConfig)
    """Shares of memory that chunks may take, and options of the first PatrickStar."""
    device_memory: Annotated[Memory | None, HONOURED] = None
    """Device budget in bytes, or a string such as ``"24GiB"``; activations included. None: what is free (unlimited on
    the simulated device).
    """
    host_memory: Annotated[Memory | None, HONOURED] = None
    """Host budget for chunks, in bytes or as a string; None: what is available."""
    disk_memory: DiskMemoryConfig = Field(default_factory=DiskMemoryConfig)
    """A disk for optimizer states that host and device have no room for."""
    steps_per_print: Annotated[AtLeast0 | None, BeforeValidator(_steps), HONOURED] = 10
    """Number of steps from one logged line of figures to the next (docs/logging.md); 0, None or infinite: none is
    logged.
    """
    profile: ProfileConfig | None = Field(default_factory=profile_of_environment)
    """Which step is profiled, and the folder for it; None: what the environment variable
    ``PATRICKSTAR_PROFILE=<step>,<folder>`` says, or no step.
    """
    rank_timeout_seconds: Annotated[Positive, Field(le=1e9), HONOURED] = 600.0
    """How long a rank waits for another one before it gives up with an error (with several ranks)."""
    delays: DelaysConfig = Field(default_factory=DelaysConfig)
    """A simulated link between host and device, and random delays, for tests."""
    host_threads: HostThreadsConfig = Field(default_factory=HostThreadsConfig)
    """Number and placement of the threads that compute on the host."""
    sequence_parallel: SequenceParallelConfig = Field(default_factory=SequenceParallelConfig)
    """Sequences that several ranks share, so that none has all of their tokens."""
    tensor_parallel: TensorParallelConfig = Field(default_factory=TensorParallelConfig)
    """Tensor parallelism: matrices and activations that are divided over ranks, by rows and columns."""
    activations: ActivationsConfig = Field(default_factory=ActivationsConfig)
    """Memory that activations of long sequences take."""
    quantization: QuantizationConfig | None = None
    """Frozen weights of linear layers in 4 or 8 bits (docs/guides/qlora.md); None: as ``patrickstar.from_pretrained``
    was told, or not.
    """
    prove_rewrites: Annotated[Switch, HONOURED] = True
    """Compares the rewritten model with the original one before training begins. Rewritten are shared sequences,
    matrices on a mesh, modules in tiles and the fused loss. The comparison is a forward and a backward of a few tokens
    through the first layers, on the first rank's host. Losses or gradients that differ are an error.
    """
    plan: Annotated[FilePath | None, HONOURED] = None
    """Path of a plan that ``engine.plan().save(path)`` wrote for the same model, chunk size and budgets: the first step
    then replays it. It changes no number; a plan for other chunks is refused.
    """
    plan_cache: Annotated[SwitchOrPath | None, HONOURED] = None
    """Whether plans are kept from run to run, so that the first step of a run like an earlier one replays a plan: True
    (in ``patrickstar`` below ``XDG_CACHE_HOME``, else in ``~/.cache/patrickstar``), False, or the path of a folder for
    them. None: what the environment variable ``PATRICKSTAR_PLAN_CACHE`` says (``0``, ``1`` or a path), or True. It
    changes no number. With ``plan`` no other plan is read or kept.
    """

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of parameters and gradients in forward and backward."""
        if self.fp16 is not None:
            return torch.float16
        return torch.float32 if self.bf16 is None else torch.bfloat16

    @property
    def ranks_per_sample(self) -> int:
        """How many neighbouring ranks are given the same batches."""
        return self.sequence_parallel.size * self.tensor_parallel.num_ranks


class _InitializeKeys(Section):
    """What ``patrickstar.initialize`` alone acts on."""

    train_batch_size: Annotated[AtLeast1 | None, HONOURED, Reader.INITIALIZE] = None
    """Samples of a step on all ranks: micro-batch x accumulation x ranks. Of the three sizes one or two may be left
    out.
    """
    train_micro_batch_size_per_gpu: Annotated[AtLeast1 | None, HONOURED, Reader.INITIALIZE] = None
    """Number of samples of one forward on one rank."""
    gradient_accumulation_steps: Annotated[AtLeast1 | None, HONOURED, Reader.INITIALIZE] = None
    """Number of backward passes whose gradients one optimizer step accumulates."""
    managed_gradient_accumulation: Annotated[Switch, HONOURED, Reader.INITIALIZE] = True
    """Whether the engine counts backwards, and updates at each ``gradient_accumulation_steps``-th ``step()``; False: at
    each ``step()``, with the backwards since the last one. The loss is divided in either case.
    """
    scheduler: Annotated[SchedulerConfig | None, Reader.INITIALIZE] = None
    """A learning-rate schedule, which is stepped with the optimizer."""
    dataloader_drop_last: Annotated[Switch, HONOURED, Reader.INITIALIZE] = False
    """Whether the loader of ``training_data`` leaves out a last batch that is not full."""
    wall_clock_breakdown: Annotated[Switch, HONOURED, Reader.INITIALIZE] = False
    """Whether logged lines have the times of forward, backward and step."""
    flops_profiler: Annotated[FlopsProfilerConfig, Reader.INITIALIZE] = Field(default_factory=FlopsProfilerConfig)
    """A count of the floating point operations of one step."""
    tensorboard: Annotated[TensorBoardConfig, Reader.INITIALIZE] = Field(default_factory=TensorBoardConfig)
    """Figures written to TensorBoard's event files."""
    wandb: Annotated[WandbConfig, Reader.INITIALIZE] = Field(default_factory=WandbConfig)
    """Figures reported to Weights & Biases."""
    csv_monitor: Annotated[CsvMonitorConfig, Reader.INITIALIZE] = Field(default_factory=CsvMonitorConfig)
    """Figures written to a CSV file."""


class _FurtherKeys(with_other_keys(""), Section):
    """The other keys of DeepSpeed, at top level."""

    zero_optimization: ZeroConfig = Field(default_factory=ZeroConfig)
    """DeepSpeed's ZeRO: which states are sharded over the ranks, and which are offloaded."""
    sequence_parallel_size: Annotated[
        AtLeast1 | None, mapped("sequence_parallel.size", "so many ranks share each sequence")
    ] = None
    """Number of ranks that each sequence is divided over, as DeepSpeed says it."""
    gradient_allreduce_op: Annotated[RankReduction, BeforeValidator(ignoring_case(RankReduction)), HONOURED] = (
        RankReduction.MEAN
    )
    """What becomes of the ranks' gradients: ``"mean"`` or ``"sum"``. The sum is made of the mean in float32, so 16-bit
    gradients overflow no sooner.
    """


class Config(_FurtherKeys, _InitializeKeys, _EngineKeys):
    """The whole configuration of an engine."""
