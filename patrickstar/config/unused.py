"""Sections of DeepSpeed for parts that PatrickStar has not, or has in another form. A key that would switch one of them
on is refused; the keys beside it then have no effect.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from patrickstar.config.fates import OtherSpelling, no_effect, refused
from patrickstar.config.values import (
    Anything,
    AtLeast0,
    AtLeast1,
    FloatType,
    Integer,
    Names,
    NonNegative,
    Number,
    Section,
    Switch,
    Text,
)

_OWN_CHECKPOINTING = no_effect("``torch.utils.checkpoint`` and the model's own flag decide what is computed again")
_OFF = no_effect("it belongs to a part that is off, and refused when it is on")
_ONE_PIPELINE_STAGE = no_effect("there are no pipeline stages")
_OWN_FILES = no_effect("checkpoints are written in pieces, beside each other, by all ranks")
_NO_COMPILER = no_effect("it belongs to deepcompile, which is refused")
_NO_TENSOR_PARALLELISM = "a layer is not cut over ranks; leave it out: memory is what chunks save, over all ranks"


class ActivationCheckpointingConfig(Section):
    """``activation_checkpointing``: options of DeepSpeed's own ``checkpoint`` function."""

    partition_activations: Annotated[Switch, no_effect("no rank computes the activations of another one")] = False
    """Cut saved activations over model-parallel ranks."""
    number_checkpoints: Annotated[AtLeast0 | None, _OWN_CHECKPOINTING] = None
    """How many there are."""
    contiguous_memory_optimization: Annotated[Switch, _OWN_CHECKPOINTING] = False
    """Saved activations in one buffer."""
    cpu_checkpointing: Annotated[
        Switch,
        no_effect(
            "chunks leave the GPU to make room for activations; ``torch.autograd.graph.save_on_cpu`` moves these too"
        ),
    ] = False
    """Saved activations in host memory."""
    synchronize_checkpoint_boundary: Annotated[Switch, _OWN_CHECKPOINTING] = False
    """Wait for the GPU at each of them."""
    profile: Annotated[Switch, no_effect("the section ``profile`` has times")] = False
    """Time each of them."""


class DataTypesConfig(Section):
    """``data_types``."""

    grad_accum_dtype: Annotated[
        FloatType | None, no_effect("gradients are summed in float32, which loses nothing that a 16-bit sum keeps")
    ] = None
    """Dtype in which gradients are accumulated."""
    param_dtype: Annotated[
        FloatType | None, no_effect("``bf16`` and ``fp16`` say it; another one than theirs is refused")
    ] = None
    """Dtype of parameters."""
    buffer_dtype: Annotated[
        Text | None, refused("buffers keep their dtype; leave it out, and cast them in the model", only=(None,))
    ] = None
    """Dtype of buffers."""
    keep_in_fp32_modules: Annotated[Names, no_effect("buffers keep their dtype")] = ()
    """Buffers that stay float32, or ``"auto"``."""


class TorchAutocastConfig(Section):
    """``torch_autocast``."""

    enabled: Annotated[
        Switch, refused("parameters are in the compute dtype already; use bf16 or fp16, or torch.autocast in the loop")
    ] = False
    """Run the forward in ``torch.autocast``."""
    dtype: Annotated[Text | None, _OFF] = None
    """Its dtype."""
    lower_precision_safe_modules: Annotated[Names | None, _OFF] = None
    """Modules whose gradients may be reduced in it."""


class CheckpointWriterConfig(Section):
    """``checkpoint.writer``."""

    type: Annotated[Text, _OWN_FILES] = "FAST"
    """Which writer."""
    io_buffer_size: Annotated[AtLeast0, _OWN_FILES] = 67_108_864
    """Bytes of its buffer."""
    io_buffer_double: Annotated[Switch, _OWN_FILES] = True
    """Two of them."""
    io_multiplier: Annotated[AtLeast0, _OWN_FILES] = 1
    """Writers of a process."""
    data_parallel: Annotated[Text | None, _OWN_FILES] = None
    """Which ranks write."""
    show_statistics: Annotated[Switch, _OWN_FILES] = False
    """Print its speed."""
    decoupled: Annotated[Switch, _OWN_FILES] = False
    """Write beside training."""


class ParallelWriteConfig(Section):
    """``checkpoint.parallel_write``."""

    pipeline_stage: Annotated[Switch, _ONE_PIPELINE_STAGE] = False
    """All stages write."""


class CheckpointConfig(Section):
    """``checkpoint``."""

    tag_validation: Annotated[
        Literal["WARN", "IGNORE", "FAIL"],
        BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value),
        no_effect("ranks that name different checkpoints end with an error"),
    ] = "WARN"
    """What happens when ranks give different tags: ``"Ignore"``, ``"Warn"`` or ``"Fail"``, in any case."""
    load_universal: Annotated[Switch, no_effect("every checkpoint loads on any number of ranks")] = False
    """Load a checkpoint that was converted for other numbers of ranks."""
    use_node_local_storage: Annotated[
        Switch, refused("a checkpoint is one folder that all ranks reach; give save_checkpoint such a folder")
    ] = False
    """Each node has its part of a checkpoint."""
    checkpoint_serialization: Annotated[Switch, _OWN_FILES] = True
    """How tensors are written."""
    parallel_write: ParallelWriteConfig = Field(default_factory=ParallelWriteConfig)
    """Who writes."""
    writer: CheckpointWriterConfig = Field(default_factory=CheckpointWriterConfig)
    """A faster writer."""


class InnerTensorParallelConfig(Section):
    """``tensor_parallel.tp``."""

    tp_size: Annotated[AtLeast1, refused(_NO_TENSOR_PARALLELISM, only=(1,))] = 1
    """Ranks that a layer is cut over."""
    tp_grain_size: Annotated[AtLeast1, _OFF] = 1
    """Size that cuts are multiples of."""
    mpu: Annotated[Anything, refused(_NO_TENSOR_PARALLELISM, only=(None,))] = None
    """An object that knows the groups of ranks."""
    tp_group: Annotated[Anything, refused(_NO_TENSOR_PARALLELISM, only=(None,))] = None
    """The group of ranks."""


class TensorParallelConfig(Section):
    """``tensor_parallel``."""

    autotp_size: Annotated[AtLeast0, refused(_NO_TENSOR_PARALLELISM, only=(0, 1))] = 0
    """Ranks that a layer is cut over; 0: off."""
    dtype: Annotated[Anything, _OFF] = "float16"
    """Dtype of parameters."""
    tp_overlap_comm: Annotated[Switch, _OFF] = False
    """Collectives beside compute."""
    tp: InnerTensorParallelConfig = Field(default_factory=InnerTensorParallelConfig)
    """Sizes and groups."""
    injection_policy_tuple: Annotated[Anything, _OFF] = None
    """Layers to replace."""
    partition_config: Annotated[Anything, _OFF] = None
    """How layers are cut."""
    preset_model: Annotated[Text | None, _OFF] = None
    """How layers are cut, by the model's name."""
    keep_module_on_host: Annotated[Switch, _OFF] = False
    """Load a checkpoint into host memory first."""
    kernel_inject: Annotated[Switch, OtherSpelling("replace_with_kernel_inject"), _OFF] = False
    """Kernels for inference."""
    vocab_parallel_lm_head: Annotated[Switch | None, _OFF] = None
    """Cut the last layer by words."""
    vocab_parallel_ce_backend: Annotated[Text, _OFF] = "torch"
    """Who computes its loss."""


class CompileConfig(Section):
    """``compile``."""

    deepcompile: Annotated[
        Switch, refused("there are no compiler passes; leave it out: transfers are planned from the first step")
    ] = False
    """DeepSpeed's passes over compiled graphs."""
    enabled: Annotated[Switch, no_effect("``engine.compile`` compiles, with what it is given")] = False
    """An older spelling: ``torch.compile`` of the module."""
    disable: Annotated[Switch, no_effect("``engine.compile`` compiles, with what it is given")] = False
    """An older spelling: no ``torch.compile``."""
    backend: Annotated[Text, no_effect("``engine.compile`` compiles, with what it is given")] = "inductor"
    """Of ``torch.compile``."""
    kwargs: Annotated[Anything, no_effect("``engine.compile`` compiles, with what it is given")] = None
    """Of ``torch.compile``."""
    autoep_non_moe: Annotated[Switch, _NO_COMPILER] = False
    """Compile what surrounds expert layers."""
    free_activation: Annotated[Switch, _NO_COMPILER] = False
    """Free activations early."""
    free_activation_threshold: Annotated[AtLeast0, _NO_COMPILER] = 10_485_760
    """Bytes of those that are freed."""
    offload_activation: Annotated[Switch, _NO_COMPILER] = False
    """Activations in host memory."""
    offload_activation_pin_memory: Annotated[Switch, _NO_COMPILER] = True
    """In pinned memory."""
    offload_opt_states: Annotated[Switch, _NO_COMPILER] = False
    """Optimizer states in host memory."""
    offload_parameters: Annotated[Switch, _NO_COMPILER] = False
    """Parameters in host memory."""
    double_buffer: Annotated[Switch, _NO_COMPILER] = True
    """Two buffers for collectives."""
    symmetric_memory: Annotated[Switch, _NO_COMPILER] = False
    """Collectives by symmetric memory."""
    debug_log: Annotated[Switch, _NO_COMPILER] = False
    """Write graphs."""
    sync_before_reduce: Annotated[Switch, _NO_COMPILER] = False
    """Wait there."""
    sync_after_reduce: Annotated[Switch, _NO_COMPILER] = False
    """Wait there."""
    sync_before_allgather: Annotated[Switch, _NO_COMPILER] = False
    """Wait there."""
    sync_after_allgather: Annotated[Switch, _NO_COMPILER] = False
    """Wait there."""
    keep_int_input_tensors: Annotated[Switch, _NO_COMPILER] = True
    """Keep values of integer inputs."""
    keep_all_input_tensors: Annotated[Switch, _NO_COMPILER] = False
    """Keep values of all inputs."""
    passes: Annotated[Names | None, _NO_COMPILER] = None
    """Which passes."""


class HybridEngineConfig(Section):
    """``hybrid_engine``."""

    enabled: Annotated[
        Switch, refused("there is no second engine for inference; leave it out and call generate() on the module")
    ] = False
    """Replace layers for ``generate``."""
    max_out_tokens: Annotated[AtLeast1, _OFF] = 512
    """Longest output."""
    inference_tp_size: Annotated[AtLeast1, _OFF] = 1
    """Ranks that a layer is cut over."""
    release_inference_cache: Annotated[Switch, _OFF] = False
    """Free the cache of keys and values."""
    pin_parameters: Annotated[Switch, _OFF] = True
    """Pinned parameters."""
    tp_gather_partition_size: Annotated[AtLeast1, _OFF] = 8
    """Layers that are gathered at a time."""
    enable_cuda_graph: Annotated[Switch, _OFF] = False
    """CUDA graphs."""


class PipelineConfig(Section):
    """``pipeline``: options of DeepSpeed's ``PipelineModule``."""

    stages: Annotated[Anything, _ONE_PIPELINE_STAGE] = "auto"
    """How many."""
    partition: Annotated[Text, _ONE_PIPELINE_STAGE] = "best"
    """How layers are divided."""
    seed_layers: Annotated[Switch, _ONE_PIPELINE_STAGE] = False
    """A seed for each layer."""
    activation_checkpoint_interval: Annotated[AtLeast0, _ONE_PIPELINE_STAGE] = 0
    """Layers between two saved activations."""
    pipe_partitioned: Annotated[Switch, _ONE_PIPELINE_STAGE] = True
    """Cut what stages send."""
    grad_partitioned: Annotated[Switch, _ONE_PIPELINE_STAGE] = True
    """Cut what they send back."""


class ProgressiveLayerDropConfig(Section):
    """``progressive_layer_drop``."""

    enabled: Annotated[Switch, refused("the engine drops no layers; leave it out, and do it in the model")] = False
    """Drop layers at random."""
    theta: Annotated[Number, _OFF] = 1.0
    """Least share that is kept."""
    gamma: Annotated[Number, _OFF] = 0.001
    """How fast it falls."""


class EigenvalueConfig(Section):
    """``eigenvalue``."""

    enabled: Annotated[Switch, refused("it belongs to quantized training, which is not supported; leave it out")] = (
        False
    )
    """Estimate curvature."""
    verbose: Annotated[Switch, _OFF] = False
    """Print it."""
    max_iter: Annotated[AtLeast1, _OFF] = 100
    """Iterations."""
    tol: Annotated[NonNegative, _OFF] = 0.01
    """Tolerance."""
    stability: Annotated[NonNegative, _OFF] = 1e-6
    """Added to the denominator."""
    gas_boundary_resolution: Annotated[AtLeast1, _OFF] = 1
    """Steps between two estimates."""
    layer_name: Annotated[Text, _OFF] = "bert.encoder.layer"
    """Which layers."""
    layer_num: Annotated[AtLeast0, _OFF] = 0
    """How many."""


class ElasticityConfig(Section):
    """``elasticity``."""

    enabled: Annotated[
        Switch, refused("the number of ranks is fixed for a run; leave it out: a checkpoint resumes on any number")
    ] = False
    """Batch sizes for many numbers of GPUs."""
    max_train_batch_size: Annotated[AtLeast1, _OFF] = 2000
    """Largest batch."""
    micro_batch_sizes: Annotated[Anything, _OFF] = (2, 4, 6)
    """Micro-batches to choose from."""
    min_gpus: Annotated[AtLeast1, _OFF] = 1
    """Fewest GPUs."""
    max_gpus: Annotated[AtLeast1, _OFF] = 10000
    """Most GPUs."""
    num_gpus_per_node: Annotated[AtLeast1, _OFF] = 1
    """GPUs of a node."""
    model_parallel_size: Annotated[AtLeast1, _OFF] = 1
    """Ranks that a layer is cut over."""
    min_time: Annotated[Integer, _OFF] = 0
    """Minutes between two changes."""
    prefer_larger_batch: Annotated[Switch, _OFF] = True
    """Which batch is chosen."""
    ignore_non_elastic_batch_info: Annotated[Switch, _OFF] = False
    """Ignore the batch sizes at top level."""
    version: Annotated[Number, _OFF] = 0.2
    """Version of the rules."""
