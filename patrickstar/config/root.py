"""The whole configuration: PatrickStar's keys, and those of DeepSpeed."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field

from patrickstar.config.fates import HONOURED, OtherSpelling, Reader, no_effect, refused, refused_section
from patrickstar.config.monitors import (
    CometConfig,
    CommsLoggerConfig,
    CsvMonitorConfig,
    FlopsProfilerConfig,
    TensorBoardConfig,
    TimersConfig,
    WandbConfig,
)
from patrickstar.config.schedulers import SchedulerConfig
from patrickstar.config.schema import (
    Bf16Config,
    ClientConfig,
    DelaysConfig,
    Fp16Config,
    HostThreadsConfig,
    OptimizerConfig,
    ProfileConfig,
    RankReduction,
    profile_of_environment,
)
from patrickstar.config.unused import (
    ActivationCheckpointingConfig,
    CheckpointConfig,
    CompileConfig,
    DataTypesConfig,
    EigenvalueConfig,
    ElasticityConfig,
    HybridEngineConfig,
    PipelineConfig,
    ProgressiveLayerDropConfig,
    TensorParallelConfig,
    TorchAutocastConfig,
)
from patrickstar.config.values import (
    Anything,
    AtLeast0,
    AtLeast1,
    DataType,
    FilePath,
    FloatType,
    Integer,
    Memory,
    Number,
    Positive,
    Section,
    Switch,
    Text,
    ignoring_case,
)
from patrickstar.config.zero import AioConfig, ZeroConfig

_SUM = no_effect("the ranks' mean is a sum in float32, in the order of ranks, times 1 / ranks: no factor is needed")


def _steps(value: Any) -> Any:
    return None if isinstance(value, float) and math.isinf(value) else value


class _EngineKeys(Section):
    """What both entry points act on."""

    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """Which optimizer, and its defaults."""
    fp16: Fp16Config | None = None
    """float16 training; None or disabled: not."""
    bf16: Annotated[Bf16Config | None, OtherSpelling("bfloat16")] = None
    """bfloat16 training; neither section: float32."""
    gradient_clipping: Annotated[Number, HONOURED] = 0.0
    """Largest global L2 norm of the gradients; 0 or less: no clipping."""
    default_chunk_size: Annotated[Integer, Field(ge=1024), HONOURED] = 32 * 1024 * 1024
    """Elements per chunk, at least 1024. A smaller size is chosen when the device budget is too small for this one."""
    release_after_init: Annotated[Switch, HONOURED] = False
    """Of several processes on a machine: True: all build the model at once, whole, and keep their shares afterwards.
    False: one after the other does, so that no more than one whole model exists at a time. A model on the meta device
    is initialised piece by piece by all at once in either case.
    """
    use_cpu_embedding: Annotated[Switch, HONOURED] = False
    """Keep ``nn.Embedding`` weights in host memory and look them up there."""
    client: ClientConfig = Field(default_factory=ClientConfig)
    """Memory shares and accepted options."""
    device_memory: Annotated[Memory | None, HONOURED] = None
    """Device budget in bytes, or a string such as ``"24GiB"``; activations included. None: by ratio (unlimited on the
    simulated device).
    """
    host_memory: Annotated[Memory | None, HONOURED] = None
    """Host budget for chunks, in bytes or as a string; None: by ratio."""
    profile: ProfileConfig | None = Field(default_factory=profile_of_environment)
    """Which step to profile; None: what the environment variable ``PATRICKSTAR_PROFILE=<step>,<folder>`` says, or none.
    """
    rank_timeout_seconds: Annotated[Positive, Field(le=1e9), HONOURED] = 600.0
    """How long a rank waits for another one before it gives up with an error (with several ranks)."""
    delays: DelaysConfig = Field(default_factory=DelaysConfig)
    """A simulated link and random delays."""
    host_threads: HostThreadsConfig = Field(default_factory=HostThreadsConfig)
    """How many threads compute on the host, and where."""
    plan: Annotated[FilePath | None, HONOURED] = None
    """Path of a plan that ``engine.plan().save(path)`` wrote for the same model, chunk size and budgets: the first step
    then replays it. It changes no number; a plan for other chunks is refused.
    """

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of parameters and gradients in forward and backward."""
        if self.fp16 is not None:
            return torch.float16
        return torch.float32 if self.bf16 is None else torch.bfloat16


class _InitializeKeys(Section):
    """What ``patrickstar.initialize`` alone acts on."""

    train_batch_size: Annotated[AtLeast1 | None, HONOURED, Reader.INITIALIZE] = None
    """Samples of a step on all ranks: micro-batch x accumulation x ranks. Of the three sizes one or two may be left
    out.
    """
    train_micro_batch_size_per_gpu: Annotated[AtLeast1 | None, HONOURED, Reader.INITIALIZE] = None
    """Samples of a forward on one rank."""
    gradient_accumulation_steps: Annotated[AtLeast1 | None, HONOURED, Reader.INITIALIZE] = None
    """Backwards of a step."""
    managed_gradient_accumulation: Annotated[Switch, HONOURED, Reader.INITIALIZE] = True
    """Whether the engine counts backwards, and updates at each ``gradient_accumulation_steps``-th ``step()``; False: at
    each ``step()``, with the backwards since the last one. The loss is divided in either case.
    """
    scheduler: Annotated[SchedulerConfig | None, Reader.INITIALIZE] = None
    """A learning-rate schedule, stepped with the optimizer."""
    dataloader_drop_last: Annotated[Switch, HONOURED, Reader.INITIALIZE] = False
    """Whether the loader of ``training_data`` leaves out a last batch that is not full."""
    steps_per_print: Annotated[AtLeast1 | None, BeforeValidator(_steps), HONOURED, Reader.INITIALIZE] = None
    """Steps between two lines of figures; None or infinite: none."""
    wall_clock_breakdown: Annotated[Switch, HONOURED, Reader.INITIALIZE] = False
    """Times of forward, backward and step in these lines."""
    flops_profiler: Annotated[FlopsProfilerConfig, Reader.INITIALIZE] = Field(default_factory=FlopsProfilerConfig)
    """What one step computes."""
    tensorboard: Annotated[TensorBoardConfig, Reader.INITIALIZE] = Field(default_factory=TensorBoardConfig)
    """Event files."""
    wandb: Annotated[WandbConfig, Reader.INITIALIZE] = Field(default_factory=WandbConfig)
    """Weights & Biases."""
    csv_monitor: Annotated[CsvMonitorConfig, Reader.INITIALIZE] = Field(default_factory=CsvMonitorConfig)
    """CSV files."""


class _FurtherKeys(Section):
    """The other keys of DeepSpeed, at top level."""

    zero_optimization: ZeroConfig = Field(default_factory=ZeroConfig)
    """What DeepSpeed shards and offloads."""
    prescale_gradients: Annotated[Switch, _SUM] = False
    """Divide gradients before they are summed."""
    gradient_predivide_factor: Annotated[Positive, _SUM] = 1.0
    """By how much they are divided then."""
    gradient_allreduce_op: Annotated[RankReduction, BeforeValidator(ignoring_case(RankReduction)), HONOURED] = (
        RankReduction.MEAN
    )
    """What becomes of the ranks' gradients: ``"mean"`` or ``"sum"``. The sum is made of the mean in float32, so 16-bit
    gradients overflow no sooner.
    """
    communication_data_type: Annotated[
        FloatType | None,
        no_effect("gradients travel in the compute dtype and are summed in float32; another 16-bit type is refused"),
    ] = None
    """Dtype in which gradients travel."""
    seq_parallel_communication_data_type: Annotated[FloatType, no_effect("there is no sequence parallelism")] = (
        DataType.FP32
    )
    """The same for sequence parallelism."""
    sparse_gradients: Annotated[Switch, no_effect("gradients of embeddings travel in their chunk, whole")] = False
    """Send only the rows of embeddings that were used."""
    disable_allgather: Annotated[Switch, no_effect("collectives move whole chunks")] = False
    """Broadcasts instead of all-gathers."""
    graph_harvesting: Annotated[Switch, refused("there are no CUDA graphs; leave it out")] = False
    """CUDA graphs."""
    sequence_parallel_size: Annotated[
        AtLeast1 | None, refused("a sequence is not cut over ranks; leave it out", only=(None, 1))
    ] = None
    """Ranks that a sequence is cut over."""
    data_parallel_size: Annotated[AtLeast1 | None, no_effect("all ranks are data-parallel")] = None
    """Ranks with samples of their own."""
    zero_allow_untested_optimizer: Annotated[Switch, no_effect("the optimizer is always PatrickStar's Adam")] = False
    """Whether any optimizer may be used."""
    zero_force_ds_cpu_optimizer: Annotated[Switch, no_effect("the optimizer is always PatrickStar's Adam")] = True
    """Whether updates on the host must be DeepSpeed's."""
    data_types: DataTypesConfig = Field(default_factory=DataTypesConfig)
    """Dtypes."""
    torch_autocast: TorchAutocastConfig = Field(default_factory=TorchAutocastConfig)
    """``torch.autocast``."""
    amp: Annotated[Anything, refused_section("Apex is not supported; use bf16 or fp16")] = None
    """NVIDIA Apex."""
    aio: AioConfig = Field(default_factory=AioConfig)
    """Disk."""
    activation_checkpointing: ActivationCheckpointingConfig = Field(default_factory=ActivationCheckpointingConfig)
    """Recomputation."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Checkpoints."""
    tensor_parallel: TensorParallelConfig = Field(default_factory=TensorParallelConfig)
    """Layers that are cut over ranks."""
    compile: CompileConfig = Field(default_factory=CompileConfig)
    """DeepSpeed's compiler."""
    hybrid_engine: HybridEngineConfig = Field(default_factory=HybridEngineConfig)
    """An engine that also generates."""
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    """Pipeline parallelism."""
    memory_breakdown: Annotated[Switch, no_effect("``engine.report()`` and ``profile`` have it")] = False
    """Log memory."""
    dump_state: Annotated[Switch, no_effect("the configuration can be printed: it is ``parse_config(...)``")] = False
    """Print the engine's state."""
    disable_python_gc: Annotated[Switch, no_effect("call ``gc.disable()`` in the script")] = False
    """Switch Python's garbage collector off."""
    vocabulary_size: Annotated[AtLeast0 | None, no_effect("no kernel depends on it")] = None
    """Words, for a warning where they are no multiple of 8."""
    log_level: Annotated[Text | None, no_effect('``logging.getLogger("patrickstar").setLevel(...)`` sets it')] = None
    """The logger's level."""
    use_data_before_expert_parallelism: Annotated[Switch, no_effect("all ranks are data-parallel")] = False
    """Order of the ranks' groups."""
    timers: TimersConfig = Field(default_factory=TimersConfig)
    """Timers."""
    comms_logger: CommsLoggerConfig = Field(default_factory=CommsLoggerConfig)
    """A log of collectives."""
    comet: CometConfig = Field(default_factory=CometConfig)
    """Comet."""
    progressive_layer_drop: ProgressiveLayerDropConfig = Field(default_factory=ProgressiveLayerDropConfig)
    """Layers that are dropped at random."""
    eigenvalue: EigenvalueConfig = Field(default_factory=EigenvalueConfig)
    """Curvature."""
    elasticity: ElasticityConfig = Field(default_factory=ElasticityConfig)
    """Changing numbers of GPUs."""
    autotuning: Annotated[
        Anything, refused_section("nothing has to be tuned; python -m patrickstar.plan shows what will happen")
    ] = None
    """A search for the fastest configuration."""
    data_efficiency: Annotated[Anything, refused_section("samplers are the script's; leave it out")] = None
    """Curricula and dropped tokens."""
    curriculum_learning: Annotated[Anything, refused_section("samplers are the script's; leave it out")] = None
    """Sequences that grow."""
    compression_training: Annotated[Anything, refused_section("models are trained as they are; leave it out")] = None
    """Quantized and pruned training."""
    quantize_training: Annotated[Anything, refused_section("models are trained as they are; leave it out")] = None
    """Quantized training."""
    weight_quantization: Annotated[Anything, refused_section("models are trained as they are; leave it out")] = None
    """Quantized parameters."""
    sparse_attention: Annotated[Anything, refused_section("attention is the model's; choose it there")] = None
    """Sparse attention."""
    nebula: Annotated[Anything, refused_section("checkpoints are PatrickStar's; use save_checkpoint")] = None
    """Azure's checkpoints."""
    datastates_ckpt: Annotated[Anything, refused_section("checkpoints are PatrickStar's; use save_checkpoint")] = None
    """Checkpoints beside training."""
    expert_parallel: Annotated[Anything, refused_section("experts are not spread over ranks; leave it out")] = None
    """Experts on ranks of their own."""


class Config(_FurtherKeys, _InitializeKeys, _EngineKeys):
    """The whole configuration of an engine."""
