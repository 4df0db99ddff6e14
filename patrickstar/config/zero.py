"""``zero_optimization`` of DeepSpeed. Here every state is sharded over the ranks and only what does not fit leaves the
GPU, so most of its keys have nothing left to say.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from patrickstar.config.fates import Fate, OtherSpelling, mapped, no_effect, refused, refused_section
from patrickstar.config.values import (
    Anything,
    AtLeast0,
    FilePath,
    Fraction,
    Integer,
    Names,
    Section,
    Switch,
)

_PLANNED = no_effect("the plan decides what moves when")
_NO_DISK = no_effect("there is no tier on disk")
_PINNED = no_effect("host memory is pinned whenever there is a GPU")
_WHOLE_CHUNKS = no_effect("collectives move whole chunks, in place and beside compute")
_ALL_SHARDED = no_effect("every chunk has one shard on each rank")
_OBSERVED = no_effect("uses of parameters are observed, whatever the modules are")


def _device(what: str) -> Fate:
    return no_effect(
        f"{what} that fit stay on the GPU, the others are in host memory: ``device_memory`` and ``host_memory`` say "
        "how much there is of either",
        only=("none", "cpu"),
        otherwise='there is no tier on disk; give "cpu", and host_memory for how much of it may be taken',
    )


class OffloadParamConfig(Section):
    """``zero_optimization.offload_param``."""

    device: Annotated[Literal["none", "cpu", "nvme"], _device("Parameters")] = "none"
    """Where parameters go."""
    nvme_path: Annotated[FilePath | None, _NO_DISK] = None
    """Folder for parameters on disk."""
    buffer_count: Annotated[AtLeast0, _NO_DISK] = 5
    """Buffers for parameters from disk."""
    buffer_size: Annotated[AtLeast0, _NO_DISK] = 100_000_000
    """Elements of each of them."""
    max_in_cpu: Annotated[AtLeast0, _NO_DISK] = 1_000_000_000
    """Elements that stay in host memory beside the disk."""
    pin_memory: Annotated[Switch, _PINNED] = True
    """Pinned host memory."""


class OffloadOptimizerConfig(Section):
    """``zero_optimization.offload_optimizer``."""

    device: Annotated[Literal["none", "cpu", "nvme"], _device("States")] = "none"
    """Where optimizer states go."""
    nvme_path: Annotated[FilePath | None, _NO_DISK] = None
    """Folder for states on disk."""
    buffer_count: Annotated[AtLeast0, _NO_DISK] = 4
    """Buffers for states from disk."""
    pin_memory: Annotated[Switch, _PINNED] = True
    """Pinned host memory."""
    pipeline_read: Annotated[Switch, _NO_DISK] = False
    """Read states from disk ahead of their update."""
    pipeline_write: Annotated[Switch, _NO_DISK] = False
    """Write states to disk beside the next update."""
    fast_init: Annotated[Switch, _NO_DISK] = False
    """A faster first write of states to disk."""
    ratio: Annotated[Fraction, no_effect("as many states as fit stay on the GPU and are updated there")] = 1.0
    """Share of the states that is updated on the host."""
    super_offload: Annotated[
        Switch, no_effect("updates on the host start during backward by ``optimizer.speculation``, exactly")
    ] = False
    """Updates on the host during backward."""
    cpuadam_cores_perc: Annotated[Fraction, no_effect("``host_threads.num_threads`` says how many threads update")] = (
        0.8
    )
    """Share of the cores that update, with ``super_offload``."""


class LeafModuleConfig(Section):
    """``zero_optimization.leaf_module``: modules that DeepSpeed fetches as a whole."""

    classes: Annotated[Names, _OBSERVED] = (
        "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    )
    """By class."""
    names: Annotated[Names, _OBSERVED] = ()
    """By name."""
    name_suffixes: Annotated[Names, _OBSERVED] = ()
    """By the end of the name."""


class ZeroConfig(Section):
    """``zero_optimization``; a bare ``true`` or ``false`` is stage 1 or 0."""

    @model_validator(mode="before")
    @classmethod
    def _stage_of_a_switch(cls, values: Any) -> Any:
        return {"stage": int(values)} if isinstance(values, bool) else values

    stage: Annotated[
        Integer,
        Field(ge=0, le=3),
        no_effect("everything is sharded over the ranks, and what fits stays on the GPU: no stage needs less memory"),
    ] = 0
    """What DeepSpeed shards: 1 states, 2 gradients too, 3 parameters too."""
    offload_param: OffloadParamConfig = Field(default_factory=OffloadParamConfig)
    """Parameters in host memory."""
    offload_optimizer: OffloadOptimizerConfig = Field(default_factory=OffloadOptimizerConfig)
    """Optimizer states in host memory."""
    sub_group_size: Annotated[
        AtLeast0,
        mapped("default_chunk_size", "both are elements that are updated at a time: the smaller counts, at least 1024"),
    ] = 1_000_000_000
    """Elements that are updated at a time."""
    contiguous_gradients: Annotated[Switch, no_effect("gradients always lie together in their chunk")] = True
    """Gradients in one buffer."""
    overlap_comm: Annotated[Switch | None, _WHOLE_CHUNKS] = None
    """Collectives beside backward."""
    reduce_scatter: Annotated[Switch, _WHOLE_CHUNKS] = True
    """Reduce-scatter instead of all-reduce."""
    reduce_bucket_size: Annotated[AtLeast0, _WHOLE_CHUNKS] = 500_000_000
    """Elements that are reduced at a time."""
    use_multi_rank_bucket_allreduce: Annotated[Switch, _WHOLE_CHUNKS] = True
    """One all-reduce for several ranks' shares."""
    allgather_partitions: Annotated[Switch, _WHOLE_CHUNKS] = True
    """All-gather instead of broadcasts."""
    allgather_bucket_size: Annotated[AtLeast0, _WHOLE_CHUNKS] = 500_000_000
    """Elements that are gathered at a time."""
    stage3_prefetch_bucket_size: Annotated[AtLeast0, OtherSpelling("prefetch_bucket_size"), _PLANNED] = 50_000_000
    """Elements that are fetched ahead."""
    stage3_param_persistence_threshold: Annotated[AtLeast0, OtherSpelling("param_persistence_threshold"), _PLANNED] = (
        100_000
    )
    """Smaller parameters stay on the GPU."""
    stage3_model_persistence_threshold: Annotated[AtLeast0, OtherSpelling("model_persistence_threshold"), _PLANNED] = (
        sys.maxsize
    )
    """As many elements of them at most."""
    stage3_max_live_parameters: Annotated[AtLeast0, OtherSpelling("max_live_parameters"), _PLANNED] = 1_000_000_000
    """Elements on the GPU at most; here ``device_memory`` bounds them."""
    stage3_max_reuse_distance: Annotated[AtLeast0, OtherSpelling("max_reuse_distance"), _PLANNED] = 1_000_000_000
    """Parameters that are used again so soon are not released."""
    stage3_gather_16bit_weights_on_model_save: Annotated[
        Switch,
        OtherSpelling("stage3_gather_fp16_weights_on_model_save"),
        OtherSpelling("gather_16bit_weights_on_model_save"),
        no_effect("``save_16bit_model`` always saves, shard by shard"),
    ] = False
    """Whether ``save_16bit_model`` may gather."""
    stage3_module_granularity_threshold: Annotated[
        AtLeast0, OtherSpelling("module_granularity_threshold"), _PLANNED
    ] = 0
    """Modules of less are fetched as a whole."""
    stage3_use_all_reduce_for_fetch_params: Annotated[
        Switch, OtherSpelling("use_all_reduce_for_fetch_params"), _WHOLE_CHUNKS
    ] = False
    """Fetch by all-reduce."""
    stage3_allgather_sequential: Annotated[Switch, OtherSpelling("allgather_sequential"), _WHOLE_CHUNKS] = False
    """Gather parameter by parameter."""
    round_robin_gradients: Annotated[Switch, _ALL_SHARDED] = False
    """Spread copies of gradients over the ranks."""
    parameter_alignment: Annotated[Switch, no_effect("parameters are aligned within their chunk")] = False
    """Parameters at aligned addresses."""
    compute_grad_norm: Annotated[Switch, no_effect("the norm comes with the gradients, at no cost")] = True
    """Whether steps of stage 1 and 2 compute the gradients' norm."""
    ignore_unused_parameters: Annotated[
        Switch, no_effect("a parameter without a gradient is left alone, as ``torch.optim`` does")
    ] = True
    """Whether parameters without a gradient are no error."""
    load_from_fp32_weights: Annotated[Switch, no_effect("checkpoints hold the float32 masters")] = True
    """Masters from float32 values of a checkpoint."""
    elastic_checkpoint: Annotated[Switch, no_effect("checkpoints load on any number of ranks")] = False
    """Checkpoints for other numbers of ranks."""
    pipeline_loading_checkpoint: Annotated[Switch, no_effect("checkpoints are read in pieces")] = False
    """Load a checkpoint piece by piece."""
    legacy_stage1: Annotated[Switch, _ALL_SHARDED] = False
    """An older stage 1."""
    zero_hpz_partition_size: Annotated[AtLeast0, _ALL_SHARDED] = 1
    """Ranks that hold a second copy among them."""
    mics_shard_size: Annotated[Integer, _ALL_SHARDED] = -1
    """Ranks that hold all shards among them."""
    mics_hierarchical_params_gather: Annotated[Switch, _ALL_SHARDED] = False
    """Gather within nodes first."""
    zero_quantized_weights: Annotated[Switch, refused("quantized values change the numbers; leave it out")] = False
    """Gather int8 values."""
    zero_quantized_nontrainable_weights: Annotated[
        Switch, refused("quantized values change the numbers; leave it out, frozen parameters take 2 bytes each")
    ] = False
    """Keep frozen parameters as int8 values."""
    zero_quantized_gradients: Annotated[Switch, refused("quantized gradients change the numbers; leave it out")] = False
    """Reduce int4 or int8 gradients."""
    zeropp_loco_param: Annotated[
        Anything, refused("it belongs to quantized gradients, which change the numbers; leave it out", only=(None,))
    ] = None
    """Error feedback of quantized gradients."""
    zenflow: Annotated[
        Anything,
        refused_section(
            "it updates with gradients of earlier steps, which changes the numbers; leave it out: updates on the host "
            "start during backward by optimizer.speculation, exactly"
        ),
    ] = None
    """The update of most values is put off."""
    memory_efficient_linear: Annotated[Switch, no_effect("``nn.Linear`` is used as it is")] = True
    """A linear layer that saves no parameter for backward."""
    override_module_apply: Annotated[Switch, no_effect("no method of modules is replaced")] = True
    """``nn.Module.apply`` gathers parameters."""
    leaf_module: LeafModuleConfig = Field(default_factory=LeafModuleConfig)
    """Modules that are fetched as a whole."""
    log_trace_cache_warnings: Annotated[Switch, no_effect("departures from the plan are counted")] = False
    """Warn where the order of uses changes."""
    enable_sanity_checks: Annotated[Switch, no_effect("checks are always on")] = False
    """Checks for debugging."""
    save_muon_momentum_buffer_in_memory: Annotated[Switch, _NO_DISK] = False
    """Muon's momentum stays in memory beside a tier on disk."""
    cpu_offload: Annotated[
        Switch | None, mapped("zero_optimization.offload_optimizer.device", '``True`` is ``"cpu"``')
    ] = None
    """An older spelling."""
    cpu_offload_param: Annotated[
        Switch | None, mapped("zero_optimization.offload_param.device", '``True`` is ``"cpu"``')
    ] = None
    """An older spelling."""
    cpu_offload_use_pin_memory: Annotated[Switch | None, _PINNED] = None
    """An older spelling."""


class AioConfig(Section):
    """``aio``: DeepSpeed's reads from and writes to disk."""

    block_size: Annotated[AtLeast0, _NO_DISK] = 1_048_576
    """Bytes of a request."""
    queue_depth: Annotated[AtLeast0, _NO_DISK] = 8
    """Requests at a time."""
    intra_op_parallelism: Annotated[AtLeast0, OtherSpelling("thread_count"), _NO_DISK] = 1
    """Threads of a request."""
    single_submit: Annotated[Switch, _NO_DISK] = False
    """One request at a time."""
    overlap_events: Annotated[Switch, _NO_DISK] = True
    """Requests beside each other."""
    use_gds: Annotated[Switch, _NO_DISK] = False
    """GPUDirect Storage."""
