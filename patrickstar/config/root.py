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
    """Keep ``nn.Embedding`` weights in host memory and look them up there."""
    client: ClientConfig = Field(default_factory=ClientConfig)
    """Shares of memory that chunks may take, and options of the first PatrickStar."""
    device_memory: Annotated[Memory | None, HONOURED] = None
    """Device budget in bytes, or a string such as ``"24GiB"``; activations included. None: by ratio (unlimited on the
    simulated device).
    """
    host_memory: Annotated[Memory | None, HONOURED] = None
    """Host budget for chunks, in bytes or as a string; None: by ratio."""
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
    steps_per_print: Annotated[AtLeast1 | None, BeforeValidator(_steps), HONOURED, Reader.INITIALIZE] = None
    """Number of steps between two printed lines of figures; None or infinite: none is printed."""
    wall_clock_breakdown: Annotated[Switch, HONOURED, Reader.INITIALIZE] = False
    """Whether printed lines have the times of forward, backward and step."""
    flops_profiler: Annotated[FlopsProfilerConfig, Reader.INITIALIZE] = Field(default_factory=FlopsProfilerConfig)
    """A count of the floating point operations of one step."""
    tensorboard: Annotated[TensorBoardConfig, Reader.INITIALIZE] = Field(default_factory=TensorBoardConfig)
    """Figures written to TensorBoard's event files."""
    wandb: Annotated[WandbConfig, Reader.INITIALIZE] = Field(default_factory=WandbConfig)
    """Figures reported to Weights & Biases."""
    csv_monitor: Annotated[CsvMonitorConfig, Reader.INITIALIZE] = Field(default_factory=CsvMonitorConfig)
    """Figures written to a CSV file."""


class _FurtherKeys(Section):
    """The other keys of DeepSpeed, at top level."""

    zero_optimization: ZeroConfig = Field(default_factory=ZeroConfig)
    """DeepSpeed's ZeRO: which states are sharded over the ranks, and which are offloaded."""
    prescale_gradients: Annotated[Switch, _SUM] = False
    """Whether gradients are divided by the number of ranks before they are summed, instead of afterwards."""
    gradient_predivide_factor: Annotated[Positive, _SUM] = 1.0
    """Number that gradients are divided by before they are summed, with the rest of the division afterwards."""
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
    """Dtype of gradients in the collectives that reduce them; None: the compute dtype."""
    seq_parallel_communication_data_type: Annotated[FloatType, no_effect("there is no sequence parallelism")] = (
        DataType.FP32
    )
    """Dtype of gradients in the collectives of sequence parallelism."""
    sparse_gradients: Annotated[Switch, no_effect("gradients of embeddings travel in their chunk, whole")] = False
    """Whether ranks exchange only those rows of ``nn.Embedding`` gradients that a batch has used."""
    disable_allgather: Annotated[Switch, no_effect("collectives move whole chunks")] = False
    """Whether updated parameters are broadcast by each rank instead of all-gathered."""
    graph_harvesting: Annotated[Switch, refused("there are no CUDA graphs; leave it out")] = False
    """Whether short sequences of kernels are captured into CUDA graphs."""
    sequence_parallel_size: Annotated[
        AtLeast1 | None, refused("a sequence is not cut over ranks; leave it out", only=(None, 1))
    ] = None
    """Number of ranks that each sequence is divided over (sequence parallelism)."""
    data_parallel_size: Annotated[AtLeast1 | None, no_effect("all ranks are data-parallel")] = None
    """Number of ranks that have different samples, where sequences are divided too."""
    zero_allow_untested_optimizer: Annotated[Switch, no_effect("the optimizer is always PatrickStar's Adam")] = False
    """Whether ZeRO accepts optimizers that DeepSpeed has not tested with it."""
    zero_force_ds_cpu_optimizer: Annotated[Switch, no_effect("the optimizer is always PatrickStar's Adam")] = True
    """Whether offloaded states must be updated by DeepSpeed's CPU optimizer."""
    data_types: DataTypesConfig = Field(default_factory=DataTypesConfig)
    """Dtypes of parameters, buffers and accumulated gradients, where they differ from the compute dtype."""
    torch_autocast: TorchAutocastConfig = Field(default_factory=TorchAutocastConfig)
    """Mixed precision by ``torch.autocast`` in the forward."""
    amp: Annotated[Anything, refused_section("Apex is not supported; use bf16 or fp16")] = None
    """Options of ``amp.initialize``: mixed precision by NVIDIA's Apex."""
    aio: AioConfig = Field(default_factory=AioConfig)
    """Asynchronous reads from and writes to NVMe disks."""
    activation_checkpointing: ActivationCheckpointingConfig = Field(default_factory=ActivationCheckpointingConfig)
    """Options of DeepSpeed's activation checkpointing (activations computed again in backward)."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """How checkpoints of the training state are saved and loaded."""
    tensor_parallel: TensorParallelConfig = Field(default_factory=TensorParallelConfig)
    """Tensor parallelism: layers whose parameters are divided over ranks (AutoTP)."""
    compile: CompileConfig = Field(default_factory=CompileConfig)
    """``torch.compile``, and DeepSpeed's passes over compiled graphs (DeepCompile)."""
    hybrid_engine: HybridEngineConfig = Field(default_factory=HybridEngineConfig)
    """An engine that trains and generates text in one loop, for RLHF."""
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    """Pipeline parallelism: the model's layers divided into stages on different ranks."""
    memory_breakdown: Annotated[Switch, no_effect("``engine.report()`` and ``profile`` have it")] = False
    """Whether memory use is logged before and after forward, backward and step."""
    dump_state: Annotated[Switch, no_effect("the configuration can be printed: it is ``parse_config(...)``")] = False
    """Whether the attributes of DeepSpeed's engine are printed at the start."""
    disable_python_gc: Annotated[Switch, no_effect("call ``gc.disable()`` in the script")] = False
    """Whether Python's garbage collector is switched off."""
    vocabulary_size: Annotated[AtLeast0 | None, no_effect("no kernel depends on it")] = None
    """Number of words in the vocabulary; DeepSpeed warns where it is no multiple of 8."""
    log_level: Annotated[Text | None, no_effect('``logging.getLogger("patrickstar").setLevel(...)`` sets it')] = None
    """Least level of the messages that DeepSpeed's logger shows."""
    use_data_before_expert_parallelism: Annotated[Switch, no_effect("all ranks are data-parallel")] = False
    """Whether ranks are ordered data-parallel before expert-parallel; else the other way round."""
    timers: TimersConfig = Field(default_factory=TimersConfig)
    """How throughput, in samples per second, is measured."""
    comms_logger: CommsLoggerConfig = Field(default_factory=CommsLoggerConfig)
    """A log of collectives, with their times and sizes."""
    comet: CometConfig = Field(default_factory=CometConfig)
    """Figures reported to Comet."""
    progressive_layer_drop: ProgressiveLayerDropConfig = Field(default_factory=ProgressiveLayerDropConfig)
    """Progressive layer dropping: layers are skipped at random, more of them as training goes on."""
    eigenvalue: EigenvalueConfig = Field(default_factory=EigenvalueConfig)
    """Estimates of the largest eigenvalue of each layer's Hessian, for quantized training."""
    elasticity: ElasticityConfig = Field(default_factory=ElasticityConfig)
    """A batch size that suits many numbers of GPUs, so that their number can change between runs."""
    autotuning: Annotated[
        Anything, refused_section("nothing has to be tuned; python -m patrickstar.plan shows what will happen")
    ] = None
    """DeepSpeed's search for the fastest configuration."""
    data_efficiency: Annotated[Anything, refused_section("samplers are the script's; leave it out")] = None
    """Curriculum learning and dropping of tokens (random-LTD), with DeepSpeed's samplers."""
    curriculum_learning: Annotated[Anything, refused_section("samplers are the script's; leave it out")] = None
    """An older form of curriculum learning: sequences that become longer in training."""
    compression_training: Annotated[Anything, refused_section("models are trained as they are; leave it out")] = None
    """Training with quantization, pruning or fewer layers."""
    quantize_training: Annotated[Anything, refused_section("models are trained as they are; leave it out")] = None
    """Quantization-aware training (MoQ), with fewer bits as training goes on."""
    weight_quantization: Annotated[Anything, refused_section("models are trained as they are; leave it out")] = None
    """Group-wise quantization of parameters, for inference."""
    sparse_attention: Annotated[Anything, refused_section("attention is the model's; choose it there")] = None
    """DeepSpeed's block-sparse attention, and its pattern."""
    nebula: Annotated[Anything, refused_section("checkpoints are PatrickStar's; use save_checkpoint")] = None
    """Asynchronous checkpoints by Azure's Nebula service."""
    datastates_ckpt: Annotated[Anything, refused_section("checkpoints are PatrickStar's; use save_checkpoint")] = None
    """Checkpoints that DataStates writes while training goes on."""
    expert_parallel: Annotated[Anything, refused_section("experts are not spread over ranks; leave it out")] = None
    """Expert parallelism: experts of a mixture divided over ranks (AutoEP)."""


class Config(_FurtherKeys, _InitializeKeys, _EngineKeys):
    """The whole configuration of an engine."""
