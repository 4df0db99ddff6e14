"""The whole configuration: PatrickStar's keys, and those of DeepSpeed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from patrickstar.choices import RankReduction
from patrickstar.config.checkpoint import CheckpointConfig
from patrickstar.config.expert_parallel import ExpertParallelConfig
from patrickstar.config.fates import HONOURED, OtherSpelling, Reader, mapped
from patrickstar.config.fp8 import Fp8Config
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

if TYPE_CHECKING:
    import torch


def _steps(value: Any) -> Any:
    return None if isinstance(value, float) and math.isinf(value) else value


class _EngineKeys(Section):
    """Keys that both entry points act on."""

    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The optimizer that updates the parameters, and its options."""
    fp16: Fp16Config | None = None
    """Training in float16, with loss scaling; off if the section is missing or disabled."""
    bf16: Annotated[Bf16Config | None, OtherSpelling("bfloat16")] = None
    """Training in bfloat16; without this section and ``fp16``, training is in float32."""
    gradient_clipping: Annotated[Number, HONOURED] = 0.0
    """Largest global L2 norm of the gradients; larger ones are scaled down to it. 0 or less: no clipping."""
    default_chunk_size: Annotated[Integer, Field(ge=1024), HONOURED] = 32 * 1024 * 1024
    """Elements per chunk, at least 1024. A smaller size is chosen if the device budget is too small for this one."""
    release_after_init: Annotated[Switch, HONOURED] = False
    """For several processes on a machine. True: all build the whole model at once, and keep their shards afterwards.
    False: they build it one after the other, so that at most one whole model exists at a time. A model on the meta
    device is always initialised unit by unit by all processes at once.
    """
    use_cpu_embedding: Annotated[Switch, HONOURED] = False
    """Keep ``nn.Embedding`` weights in host memory and look them up there. Tables that are tied to other layers, or
    sharded by ``tensor_parallel``, stay in chunks.
    """
    client: ClientConfig = Field(default_factory=ClientConfig)
    """Shares of memory for chunks, and options of the first PatrickStar."""
    device_memory: Annotated[Memory | None, HONOURED] = None
    """Device budget in bytes, or a string such as ``"24GiB"``; it includes activations. None: the free memory
    (unlimited on the simulated device).
    """
    host_memory: Annotated[Memory | None, HONOURED] = None
    """Host budget for chunks, in bytes or as a string; None: the available memory."""
    disk_memory: DiskMemoryConfig = Field(default_factory=DiskMemoryConfig)
    """A disk for optimizer states that fit neither host nor device."""
    steps_per_print: Annotated[AtLeast0 | None, BeforeValidator(_steps), HONOURED] = 10
    """Steps between logged lines of figures (docs/logging.md); 0, None or infinite: no lines."""
    profile: ProfileConfig | None = Field(default_factory=profile_of_environment)
    """The profiled step, and the folder for the profile; None: the value of the environment variable
    ``PATRICKSTAR_PROFILE=<step>,<folder>``, or no step.
    """
    rank_timeout_seconds: Annotated[Positive, Field(le=1e9), HONOURED] = 600.0
    """Seconds that a rank waits for another one before it raises an error (with several ranks)."""
    delays: DelaysConfig = Field(default_factory=DelaysConfig)
    """A simulated link between host and device, and random delays, for tests."""
    host_threads: HostThreadsConfig = Field(default_factory=HostThreadsConfig)
    """Number and placement of the threads that compute on the host."""
    sequence_parallel: SequenceParallelConfig = Field(default_factory=SequenceParallelConfig)
    """Context parallelism: sequences that are sharded over ranks."""
    tensor_parallel: TensorParallelConfig = Field(default_factory=TensorParallelConfig)
    """Tensor parallelism: matrices and activations that are sharded over ranks, by rows and columns."""
    expert_parallel: ExpertParallelConfig = Field(default_factory=ExpertParallelConfig)
    """Expert parallelism: experts of a mixture that are divided among ranks."""
    activations: ActivationsConfig = Field(default_factory=ActivationsConfig)
    """Memory of the activations of long sequences."""
    quantization: QuantizationConfig | None = None
    """Frozen weights of linear layers in 4 or 8 bits (docs/guides/qlora.md). None: the quantization that
    ``patrickstar.from_pretrained`` was given, if any.
    """
    fp8: Fp8Config | None = None
    """Products of linear layers and experts in 8-bit floating point; off if the section is missing or disabled."""
    prove_rewrites: Annotated[Switch, HONOURED] = True
    """Compare the rewritten model with the original one before training begins. Rewritten are context-parallel and
    tensor-parallel models, experts that are divided among ranks, tiled modules and the fused loss. The comparison is a
    forward and a backward of a few tokens through the first layers, on the first rank's host. Losses or gradients that
    differ are an error.
    """
    plan: Annotated[FilePath | None, HONOURED] = None
    """Path of a plan that ``engine.plan().save(path)`` wrote for the same model, chunk size and budgets; the first step
    replays it. It changes no number; a plan for other chunks is refused.
    """
    plan_cache: Annotated[SwitchOrPath | None, HONOURED] = None
    """Keep plans from run to run, so that the first step of a similar run replays a plan. True: in ``patrickstar``
    below ``XDG_CACHE_HOME``, or in ``~/.cache/patrickstar``; False: no; or the path of a folder. None: the environment
    variable ``PATRICKSTAR_PLAN_CACHE`` (``0``, ``1`` or a path), or True. It changes no number. With ``plan`` no other
    plan is read or kept.
    """

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of parameters and gradients in forward and backward."""
        import torch

        if self.fp16 is not None:
            return torch.float16
        return torch.float32 if self.bf16 is None else torch.bfloat16

    @property
    def ranks_per_sample(self) -> int:
        """Neighbouring ranks that get the same batches."""
        return self.sequence_parallel.size * self.tensor_parallel.num_ranks


class _InitializeKeys(Section):
    """Keys that only ``patrickstar.initialize`` acts on."""

    train_batch_size: Annotated[AtLeast1 | None, HONOURED, Reader.INITIALIZE] = None
    """Samples of a step on all ranks: micro-batch x accumulation x ranks. One or two of the three sizes may
    be missing.
    """
    train_micro_batch_size_per_gpu: Annotated[AtLeast1 | None, HONOURED, Reader.INITIALIZE] = None
    """Samples of one forward on one rank."""
    gradient_accumulation_steps: Annotated[AtLeast1 | None, HONOURED, Reader.INITIALIZE] = None
    """Backward passes whose gradients one optimizer step accumulates."""
    managed_gradient_accumulation: Annotated[Switch, HONOURED, Reader.INITIALIZE] = True
    """True: the engine counts backward passes and updates at each ``gradient_accumulation_steps``-th ``step()``. False:
    it updates at each ``step()``, with the passes since the last one. The loss is divided in either case.
    """
    scheduler: Annotated[SchedulerConfig | None, Reader.INITIALIZE] = None
    """A learning-rate schedule, which is stepped with the optimizer."""
    dataloader_drop_last: Annotated[Switch, HONOURED, Reader.INITIALIZE] = False
    """True: the loader of ``training_data`` drops a last batch that is not full."""
    wall_clock_breakdown: Annotated[Switch, HONOURED, Reader.INITIALIZE] = False
    """True: logged lines include the times of forward, backward and step."""
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

    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """How checkpoints of the training state are saved and loaded."""
    zero_optimization: ZeroConfig = Field(default_factory=ZeroConfig)
    """DeepSpeed's ZeRO: the states that are sharded over the ranks, and those that are offloaded."""
    sequence_parallel_size: Annotated[
        AtLeast1 | None, mapped("sequence_parallel.size", "so many ranks share each sequence")
    ] = None
    """Ranks over which each sequence is sharded, as in DeepSpeed."""
    gradient_allreduce_op: Annotated[RankReduction, BeforeValidator(ignoring_case(RankReduction)), HONOURED] = (
        RankReduction.MEAN
    )
    """Reduction of the ranks' gradients: ``"mean"`` or ``"sum"``. The sum is computed from the mean in float32, so
    16-bit gradients overflow no sooner.
    """


class Config(_FurtherKeys, _InitializeKeys, _EngineKeys):
    """The whole configuration of an engine."""
