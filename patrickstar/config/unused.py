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
    """The section ``activation_checkpointing``: options of DeepSpeed's own ``checkpoint`` function."""

    partition_activations: Annotated[Switch, no_effect("no rank computes the activations of another one")] = False
    """Whether each saved activation is divided over the model-parallel ranks."""
    number_checkpoints: Annotated[AtLeast0 | None, _OWN_CHECKPOINTING] = None
    """Number of activation checkpoints, for the size of the buffer of ``contiguous_memory_optimization``."""
    contiguous_memory_optimization: Annotated[Switch, _OWN_CHECKPOINTING] = False
    """Whether divided activations are copied into one contiguous buffer."""
    cpu_checkpointing: Annotated[
        Switch,
        no_effect(
            "chunks leave the GPU to make room for activations; ``torch.autograd.graph.save_on_cpu`` moves these too"
        ),
    ] = False
    """Whether saved activations are kept in host memory."""
    synchronize_checkpoint_boundary: Annotated[Switch, _OWN_CHECKPOINTING] = False
    """Whether the host waits for the GPU at each activation checkpoint."""
    profile: Annotated[Switch, no_effect("the section ``profile`` has times")] = False
    """Whether forward and backward of each activation checkpoint are timed."""


class DataTypesConfig(Section):
    """The section ``data_types``: dtypes other than the compute dtype."""

    grad_accum_dtype: Annotated[
        FloatType | None, no_effect("gradients are summed in float32, which loses nothing that a 16-bit sum keeps")
    ] = None
    """Dtype in which gradients are accumulated."""
    param_dtype: Annotated[
        FloatType | None, no_effect("``bf16`` and ``fp16`` say it; another one than theirs is refused")
    ] = None
    """Dtype of parameters; None: the compute dtype."""
    buffer_dtype: Annotated[
        Text | None, refused("buffers keep their dtype; leave it out, and cast them in the model", only=(None,))
    ] = None
    """Dtype that buffers are cast to; None: they keep theirs."""
    keep_in_fp32_modules: Annotated[Names, no_effect("buffers keep their dtype")] = ()
    """Names of the buffers that stay float32, or ``"auto"``."""


class TorchAutocastConfig(Section):
    """The section ``torch_autocast``: mixed precision by ``torch.autocast``."""

    enabled: Annotated[
        Switch, refused("parameters are in the compute dtype already; use bf16 or fp16, or torch.autocast in the loop")
    ] = False
    """Whether the forward is run in ``torch.autocast``."""
    dtype: Annotated[Text | None, _OFF] = None
    """Dtype of ``torch.autocast``, such as ``"bfloat16"``."""
    lower_precision_safe_modules: Annotated[Names | None, _OFF] = None
    """Classes of modules whose gradients may be reduced in that dtype."""


class CheckpointWriterConfig(Section):
    """The section ``checkpoint.writer``: how DeepSpeed writes the files of a checkpoint."""

    type: Annotated[Text, _OWN_FILES] = "FAST"
    """Which writer is used: ``"FAST"``, ``"PYTHON"`` or ``"MOCK"`` (writes nothing)."""
    io_buffer_size: Annotated[AtLeast0, _OWN_FILES] = 67_108_864
    """Size of the writer's buffer in host memory, in bytes."""
    io_buffer_double: Annotated[Switch, _OWN_FILES] = True
    """Whether the buffer is double: one half is filled while the other is written."""
    io_multiplier: Annotated[AtLeast0, _OWN_FILES] = 1
    """Factor that the number of parallel writers is multiplied by."""
    data_parallel: Annotated[Text | None, _OWN_FILES] = None
    """Which ranks write: all (``"REPLICA"``), one for each ``"SOCKET"`` or ``"MACHINE"``, or the first (None)."""
    show_statistics: Annotated[Switch, _OWN_FILES] = False
    """Whether the writer's figures, such as its speed, are printed."""
    decoupled: Annotated[Switch, _OWN_FILES] = False
    """Whether files are written by another process, while training goes on."""


class ParallelWriteConfig(Section):
    """The section ``checkpoint.parallel_write``: which ranks write a checkpoint at the same time."""

    pipeline_stage: Annotated[Switch, _ONE_PIPELINE_STAGE] = False
    """Whether all pipeline stages write their layers at the same time."""


class CheckpointConfig(Section):
    """The section ``checkpoint``: how checkpoints of the training state are saved and loaded."""

    tag_validation: Annotated[
        Literal["WARN", "IGNORE", "FAIL"],
        BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value),
        no_effect("ranks that name different checkpoints end with an error"),
    ] = "WARN"
    """What happens when ranks give different tags: ``"Ignore"``, ``"Warn"`` or ``"Fail"``, in any case."""
    load_universal: Annotated[Switch, no_effect("every checkpoint loads on any number of ranks")] = False
    """Whether a universal checkpoint is loaded: one that was converted for other numbers of ranks."""
    use_node_local_storage: Annotated[
        Switch, refused("a checkpoint is one folder that all ranks reach; give save_checkpoint such a folder")
    ] = False
    """Whether each node keeps its parts of a checkpoint in storage of its own, without a shared file system."""
    checkpoint_serialization: Annotated[Switch, _OWN_FILES] = True
    """Whether ``torch.save`` writes its zip format; False: the older one."""
    parallel_write: ParallelWriteConfig = Field(default_factory=ParallelWriteConfig)
    """Which ranks write a checkpoint at the same time."""
    writer: CheckpointWriterConfig = Field(default_factory=CheckpointWriterConfig)
    """Which writer makes the files, and its options."""


class InnerTensorParallelConfig(Section):
    """The section ``tensor_parallel.tp``: sizes and groups of DeepSpeed's tensor parallelism."""

    tp_size: Annotated[AtLeast1, refused(_NO_TENSOR_PARALLELISM, only=(1,))] = 1
    """Number of ranks that each layer is divided over."""
    tp_grain_size: Annotated[AtLeast1, _OFF] = 1
    """Number that the sizes of a layer's parts are multiples of."""
    mpu: Annotated[Anything, refused(_NO_TENSOR_PARALLELISM, only=(None,))] = None
    """An object that knows the ranks' groups for model and data parallelism."""
    tp_group: Annotated[Anything, refused(_NO_TENSOR_PARALLELISM, only=(None,))] = None
    """The group of ranks that a layer is divided over."""


class TensorParallelConfig(Section):
    """The section ``tensor_parallel``: DeepSpeed's automatic tensor parallelism."""

    autotp_size: Annotated[AtLeast0, refused(_NO_TENSOR_PARALLELISM, only=(0, 1))] = 0
    """Number of ranks that each layer is divided over; 0: tensor parallelism is off."""
    dtype: Annotated[Anything, _OFF] = "float16"
    """Dtype that the parameters of the model are converted to."""
    tp_overlap_comm: Annotated[Switch, _OFF] = False
    """Whether all-reduces of tensor parallelism overlap compute."""
    tp: InnerTensorParallelConfig = Field(default_factory=InnerTensorParallelConfig)
    """Sizes and groups of tensor parallelism."""
    injection_policy_tuple: Annotated[Anything, _OFF] = None
    """Names of the layers that DeepSpeed replaces by divided ones."""
    partition_config: Annotated[Anything, _OFF] = None
    """Rules, by patterns of parameter names, that say how each layer is divided."""
    preset_model: Annotated[Text | None, _OFF] = None
    """Name of a built-in set of such rules, such as ``"llama"`` or ``"mixtral"``."""
    keep_module_on_host: Annotated[Switch, _OFF] = False
    """Whether loaded checkpoints stay in host memory instead of going to the GPU at once."""
    kernel_inject: Annotated[Switch, OtherSpelling("replace_with_kernel_inject"), _OFF] = False
    """Whether layers are replaced by DeepSpeed's kernels for inference."""
    vocab_parallel_lm_head: Annotated[Switch | None, _OFF] = None
    """Whether the output layer of a language model is divided over ranks by words of the vocabulary."""
    vocab_parallel_ce_backend: Annotated[Text, _OFF] = "torch"
    """What computes the cross entropy of that divided output layer."""


class CompileConfig(Section):
    """The section ``compile``: ``torch.compile`` and DeepSpeed's passes over compiled graphs (DeepCompile)."""

    deepcompile: Annotated[
        Switch, refused("there are no compiler passes; leave it out: transfers are planned from the first step")
    ] = False
    """Whether DeepSpeed's passes change compiled graphs."""
    enabled: Annotated[Switch, no_effect("``engine.compile`` compiles, with what it is given")] = False
    """Whether ``torch.compile`` compiles the module (an older key of DeepSpeed)."""
    disable: Annotated[Switch, no_effect("``engine.compile`` compiles, with what it is given")] = False
    """Whether compilation is switched off (an older key of DeepSpeed)."""
    backend: Annotated[Text, no_effect("``engine.compile`` compiles, with what it is given")] = "inductor"
    """Name of the backend of ``torch.compile``."""
    kwargs: Annotated[Anything, no_effect("``engine.compile`` compiles, with what it is given")] = None
    """Further arguments of ``torch.compile``."""
    autoep_non_moe: Annotated[Switch, _NO_COMPILER] = False
    """Whether what surrounds expert layers is compiled, with expert parallelism."""
    free_activation: Annotated[Switch, _NO_COMPILER] = False
    """Whether activations are freed as early as possible."""
    free_activation_threshold: Annotated[AtLeast0, _NO_COMPILER] = 10_485_760
    """Least size, in bytes, of the activations that are freed early."""
    offload_activation: Annotated[Switch, _NO_COMPILER] = False
    """Whether activations that backward needs are moved to host memory."""
    offload_activation_pin_memory: Annotated[Switch, _NO_COMPILER] = True
    """Whether the host memory for activations is pinned (page-locked)."""
    offload_opt_states: Annotated[Switch, _NO_COMPILER] = False
    """Whether optimizer states are moved to host memory during forward and backward."""
    offload_parameters: Annotated[Switch, _NO_COMPILER] = False
    """Whether parameters are moved to host memory."""
    double_buffer: Annotated[Switch, _NO_COMPILER] = True
    """Whether there are two buffers for reductions: one is filled while the other is reduced."""
    symmetric_memory: Annotated[Switch, _NO_COMPILER] = False
    """Whether collectives use PyTorch's symmetric memory."""
    debug_log: Annotated[Switch, _NO_COMPILER] = False
    """Whether compiled graphs are written to files, for debugging."""
    sync_before_reduce: Annotated[Switch, _NO_COMPILER] = False
    """Whether compiled code waits for the device before each reduction of gradients, for debugging."""
    sync_after_reduce: Annotated[Switch, _NO_COMPILER] = False
    """Whether compiled code waits for the device after each reduction of gradients, for debugging."""
    sync_before_allgather: Annotated[Switch, _NO_COMPILER] = False
    """Whether compiled code waits for the device before each all-gather of parameters, for debugging."""
    sync_after_allgather: Annotated[Switch, _NO_COMPILER] = False
    """Whether compiled code waits for the device after each all-gather of parameters, for debugging."""
    keep_int_input_tensors: Annotated[Switch, _NO_COMPILER] = True
    """Whether stored integer inputs of a graph keep their values instead of dummy ones."""
    keep_all_input_tensors: Annotated[Switch, _NO_COMPILER] = False
    """Whether all stored inputs of a graph keep their values instead of dummy ones."""
    passes: Annotated[Names | None, _NO_COMPILER] = None
    """Names of the passes over graphs, such as ``"z1"`` or ``"z3"``; None: chosen by DeepSpeed."""


class HybridEngineConfig(Section):
    """The section ``hybrid_engine``: one engine for training and for generation with DeepSpeed's inference kernels."""

    enabled: Annotated[
        Switch, refused("there is no second engine for inference; leave it out and call generate() on the module")
    ] = False
    """Whether layers are replaced by inference kernels for ``generate``."""
    max_out_tokens: Annotated[AtLeast1, _OFF] = 512
    """Largest number of tokens of a generated sequence, its prompt included."""
    inference_tp_size: Annotated[AtLeast1, _OFF] = 1
    """Number of ranks that each layer is divided over in generation."""
    release_inference_cache: Annotated[Switch, _OFF] = False
    """Whether the cache of keys and values is freed after each generation."""
    pin_parameters: Annotated[Switch, _OFF] = True
    """Whether the parameters of all layers are gathered before generation (stage 3); else layer by layer."""
    tp_gather_partition_size: Annotated[AtLeast1, _OFF] = 8
    """Number of layers that are gathered at a time, with ``inference_tp_size`` above 1."""
    enable_cuda_graph: Annotated[Switch, _OFF] = False
    """Whether generation is captured into CUDA graphs."""


class PipelineConfig(Section):
    """The section ``pipeline``: options of DeepSpeed's ``PipelineModule``."""

    stages: Annotated[Anything, _ONE_PIPELINE_STAGE] = "auto"
    """Number of pipeline stages, or ``"auto"``."""
    partition: Annotated[Text, _ONE_PIPELINE_STAGE] = "best"
    """Method by which layers are divided into stages."""
    seed_layers: Annotated[Switch, _ONE_PIPELINE_STAGE] = False
    """Whether each layer is initialised with a seed of its own."""
    activation_checkpoint_interval: Annotated[AtLeast0, _ONE_PIPELINE_STAGE] = 0
    """Number of layers that each activation checkpoint covers; 0: no activation checkpointing."""
    pipe_partitioned: Annotated[Switch, _ONE_PIPELINE_STAGE] = True
    """Whether activations sent between stages are divided over the model-parallel ranks."""
    grad_partitioned: Annotated[Switch, _ONE_PIPELINE_STAGE] = True
    """Whether gradients sent between stages are divided over the model-parallel ranks."""


class ProgressiveLayerDropConfig(Section):
    """The section ``progressive_layer_drop``: layers that are skipped at random in training."""

    enabled: Annotated[Switch, refused("the engine drops no layers; leave it out, and do it in the model")] = False
    """Whether layers are skipped at random."""
    theta: Annotated[Number, _OFF] = 1.0
    """Share of layers that are kept in the long run, which the kept share falls to from 1."""
    gamma: Annotated[Number, _OFF] = 0.001
    """Rate, per step, at which the kept share falls to ``theta``."""


class EigenvalueConfig(Section):
    """The section ``eigenvalue``: the largest eigenvalue of each layer's Hessian, estimated by power iteration."""

    enabled: Annotated[Switch, refused("it belongs to quantized training, which is not supported; leave it out")] = (
        False
    )
    """Whether eigenvalues are estimated."""
    verbose: Annotated[Switch, _OFF] = False
    """Whether the estimates are printed."""
    max_iter: Annotated[AtLeast1, _OFF] = 100
    """Largest number of power iterations for one estimate."""
    tol: Annotated[NonNegative, _OFF] = 0.01
    """Relative change of an estimate below which its iterations end."""
    stability: Annotated[NonNegative, _OFF] = 1e-6
    """Number that is added to the norm that vectors are divided by."""
    gas_boundary_resolution: Annotated[AtLeast1, _OFF] = 1
    """Number of optimizer steps between two estimates."""
    layer_name: Annotated[Text, _OFF] = "bert.encoder.layer"
    """Dotted name of the list of layers in the model."""
    layer_num: Annotated[AtLeast0, _OFF] = 0
    """Number of layers in that list."""


class ElasticityConfig(Section):
    """The section ``elasticity``: a batch size that suits many numbers of GPUs."""

    enabled: Annotated[
        Switch, refused("the number of ranks is fixed for a run; leave it out: a checkpoint resumes on any number")
    ] = False
    """Whether DeepSpeed chooses the batch size so that many numbers of GPUs can train with it."""
    max_train_batch_size: Annotated[AtLeast1, _OFF] = 2000
    """Largest train batch size that may be chosen."""
    micro_batch_sizes: Annotated[Anything, _OFF] = (2, 4, 6)
    """List of the micro-batch sizes that may be chosen, in samples of one GPU."""
    min_gpus: Annotated[AtLeast1, _OFF] = 1
    """Least number of GPUs that the batch size has to suit."""
    max_gpus: Annotated[AtLeast1, _OFF] = 10000
    """Largest number of GPUs that the batch size has to suit."""
    num_gpus_per_node: Annotated[AtLeast1, _OFF] = 1
    """Number of GPUs in each node."""
    model_parallel_size: Annotated[AtLeast1, _OFF] = 1
    """Number of ranks that each layer is divided over."""
    min_time: Annotated[Integer, _OFF] = 0
    """Least number of minutes between two changes of the number of GPUs; 0: not known."""
    prefer_larger_batch: Annotated[Switch, _OFF] = True
    """Whether the largest of equally suitable batch sizes is chosen; else the smallest."""
    ignore_non_elastic_batch_info: Annotated[Switch, _OFF] = False
    """Whether batch sizes at top level are ignored; else they are an error."""
    version: Annotated[Number, _OFF] = 0.2
    """Version of DeepSpeed's rules for elasticity."""
