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
    """The section ``zero_optimization.offload_param``: parameters in host memory or on disk."""

    device: Annotated[Literal["none", "cpu", "nvme"], _device("Parameters")] = "none"
    """Where parameters are kept: ``"none"`` (the GPU), ``"cpu"`` or ``"nvme"`` (disk)."""
    nvme_path: Annotated[FilePath | None, _NO_DISK] = None
    """The folder for parameters on an NVMe disk."""
    buffer_count: Annotated[AtLeast0, _NO_DISK] = 5
    """Number of buffers for parameters that are read from disk."""
    buffer_size: Annotated[AtLeast0, _NO_DISK] = 100_000_000
    """Number of elements of each buffer for parameters from disk."""
    max_in_cpu: Annotated[AtLeast0, _NO_DISK] = 1_000_000_000
    """Number of elements of parameters that stay in host memory when others go to disk."""
    pin_memory: Annotated[Switch, _PINNED] = True
    """Whether the host memory is pinned (page-locked), for faster transfers to and from the GPU."""


class OffloadOptimizerConfig(Section):
    """The section ``zero_optimization.offload_optimizer``: optimizer states in host memory or on disk."""

    device: Annotated[Literal["none", "cpu", "nvme"], _device("States")] = "none"
    """Where optimizer states are kept: ``"none"`` (the GPU), ``"cpu"`` or ``"nvme"`` (disk)."""
    nvme_path: Annotated[FilePath | None, _NO_DISK] = None
    """The folder for optimizer states on an NVMe disk."""
    buffer_count: Annotated[AtLeast0, _NO_DISK] = 4
    """Number of buffers for optimizer states that are read from disk."""
    pin_memory: Annotated[Switch, _PINNED] = True
    """Whether the host memory is pinned (page-locked), for faster transfers to and from the GPU."""
    pipeline_read: Annotated[Switch, _NO_DISK] = False
    """Whether the next states are read from disk while present ones are updated."""
    pipeline_write: Annotated[Switch, _NO_DISK] = False
    """Whether updated states are written to disk while the next ones are updated."""
    fast_init: Annotated[Switch, _NO_DISK] = False
    """Whether states are written to disk at the start in a faster way."""
    ratio: Annotated[Fraction, no_effect("as many states as fit stay on the GPU and are updated there")] = 1.0
    """Share of the optimizer states that is updated on the host, 0 to 1."""
    super_offload: Annotated[
        Switch, no_effect("updates on the host start during backward by ``optimizer.speculation``, exactly")
    ] = False
    """Whether states on the host are updated during backward (DeepSpeed's SuperOffload)."""
    cpuadam_cores_perc: Annotated[Fraction, no_effect("``host_threads.num_threads`` says how many threads update")] = (
        0.8
    )
    """Share of the CPU's cores that update states, 0 to 1, with ``super_offload``."""


class LeafModuleConfig(Section):
    """The section ``zero_optimization.leaf_module``: modules that DeepSpeed fetches as a whole."""

    classes: Annotated[Names, _OBSERVED] = (
        "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    )
    """Names of the classes of modules that are fetched as a whole."""
    names: Annotated[Names, _OBSERVED] = ()
    """Names, in the model, of modules that are fetched as a whole."""
    name_suffixes: Annotated[Names, _OBSERVED] = ()
    """Ends of the names of modules that are fetched as a whole."""


class ZeroConfig(Section):
    """The section ``zero_optimization``; a bare ``true`` or ``false`` is stage 1 or 0."""

    @model_validator(mode="before")
    @classmethod
    def _stage_of_a_switch(cls, values: Any) -> Any:
        return {"stage": int(values)} if isinstance(values, bool) else values

    stage: Annotated[
        Integer,
        Field(ge=0, le=3),
        no_effect("everything is sharded over the ranks, and what fits stays on the GPU: no stage needs less memory"),
    ] = 0
    """What DeepSpeed shards over the ranks: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too."""
    offload_param: OffloadParamConfig = Field(default_factory=OffloadParamConfig)
    """Parameters kept in host memory or on disk."""
    offload_optimizer: OffloadOptimizerConfig = Field(default_factory=OffloadOptimizerConfig)
    """Optimizer states kept in host memory or on disk."""
    sub_group_size: Annotated[
        AtLeast0,
        mapped("default_chunk_size", "both are elements that are updated at a time: the smaller counts, at least 1024"),
    ] = 1_000_000_000
    """Number of elements of parameters that are updated at a time."""
    contiguous_gradients: Annotated[Switch, no_effect("gradients always lie together in their chunk")] = True
    """Whether gradients are copied into one contiguous buffer as backward makes them."""
    overlap_comm: Annotated[Switch | None, _WHOLE_CHUNKS] = None
    """Whether reductions of gradients overlap backward; None: with stage 3 only."""
    reduce_scatter: Annotated[Switch, _WHOLE_CHUNKS] = True
    """Whether gradients are averaged by reduce-scatter instead of all-reduce."""
    reduce_bucket_size: Annotated[AtLeast0, _WHOLE_CHUNKS] = 500_000_000
    """Number of elements of gradients that are reduced at a time."""
    use_multi_rank_bucket_allreduce: Annotated[Switch, _WHOLE_CHUNKS] = True
    """Whether the shares of several ranks are reduced by one all-reduce instead of a reduction each."""
    allgather_partitions: Annotated[Switch, _WHOLE_CHUNKS] = True
    """Whether updated parameters are all-gathered instead of broadcast by each rank."""
    allgather_bucket_size: Annotated[AtLeast0, _WHOLE_CHUNKS] = 500_000_000
    """Number of elements of parameters that are gathered at a time."""
    stage3_prefetch_bucket_size: Annotated[AtLeast0, OtherSpelling("prefetch_bucket_size"), _PLANNED] = 50_000_000
    """Largest number of elements of parameters that are fetched ahead of use."""
    stage3_param_persistence_threshold: Annotated[AtLeast0, OtherSpelling("param_persistence_threshold"), _PLANNED] = (
        100_000
    )
    """Number of elements below which a parameter stays on the GPU, whole."""
    stage3_model_persistence_threshold: Annotated[AtLeast0, OtherSpelling("model_persistence_threshold"), _PLANNED] = (
        sys.maxsize
    )
    """Largest number of elements of such small parameters that stay on the GPU."""
    stage3_max_live_parameters: Annotated[AtLeast0, OtherSpelling("max_live_parameters"), _PLANNED] = 1_000_000_000
    """Largest number of elements of gathered parameters on a GPU; here ``device_memory`` bounds them."""
    stage3_max_reuse_distance: Annotated[AtLeast0, OtherSpelling("max_reuse_distance"), _PLANNED] = 1_000_000_000
    """Number of elements used in between up to which a parameter is kept for its next use."""
    stage3_gather_16bit_weights_on_model_save: Annotated[
        Switch,
        OtherSpelling("stage3_gather_fp16_weights_on_model_save"),
        OtherSpelling("gather_16bit_weights_on_model_save"),
        no_effect("``save_16bit_model`` always saves, shard by shard"),
    ] = False
    """Whether ``save_16bit_model`` gathers sharded parameters, so that it can save them."""
    stage3_module_granularity_threshold: Annotated[
        AtLeast0, OtherSpelling("module_granularity_threshold"), _PLANNED
    ] = 0
    """Elements / (1 + number of submodules) below which a module is fetched as a whole; 0: none is."""
    stage3_use_all_reduce_for_fetch_params: Annotated[
        Switch, OtherSpelling("use_all_reduce_for_fetch_params"), _WHOLE_CHUNKS
    ] = False
    """Whether parameters are fetched by all-reduce instead of all-gather."""
    stage3_allgather_sequential: Annotated[Switch, OtherSpelling("allgather_sequential"), _WHOLE_CHUNKS] = False
    """Whether parameters are all-gathered one by one instead of in buckets."""
    round_robin_gradients: Annotated[Switch, _ALL_SHARDED] = False
    """Whether the ranks share the work of copying gradients to host memory (stages 1 and 2)."""
    parameter_alignment: Annotated[Switch, no_effect("parameters are aligned within their chunk")] = False
    """Whether parameters begin at aligned addresses."""
    compute_grad_norm: Annotated[Switch, no_effect("the norm comes with the gradients, at no cost")] = True
    """Whether steps of stage 1 and 2 compute the gradients' norm."""
    ignore_unused_parameters: Annotated[
        Switch, no_effect("a parameter without a gradient is left alone, as ``torch.optim`` does")
    ] = True
    """Whether parameters without a gradient are ignored; else they are an error (stage 2)."""
    load_from_fp32_weights: Annotated[Switch, no_effect("checkpoints hold the float32 masters")] = True
    """Whether float32 masters are loaded from a checkpoint's float32 values instead of its 16-bit ones."""
    elastic_checkpoint: Annotated[Switch, no_effect("checkpoints load on any number of ranks")] = False
    """Whether checkpoints are saved for other numbers of ranks (an older form)."""
    pipeline_loading_checkpoint: Annotated[Switch, no_effect("checkpoints are read in pieces")] = False
    """Whether a checkpoint is loaded piece by piece (stage 3)."""
    legacy_stage1: Annotated[Switch, _ALL_SHARDED] = False
    """Whether DeepSpeed's older implementation of stage 1 is used."""
    zero_hpz_partition_size: Annotated[AtLeast0, _ALL_SHARDED] = 1
    """Number of ranks that a second copy of the parameters is sharded over (ZeRO++)."""
    mics_shard_size: Annotated[Integer, _ALL_SHARDED] = -1
    """Number of ranks that one copy of all states is sharded over (MiCS); -1: all ranks."""
    mics_hierarchical_params_gather: Annotated[Switch, _ALL_SHARDED] = False
    """Whether parameters are gathered within nodes first, then between them (MiCS)."""
    zero_quantized_weights: Annotated[Switch, refused("quantized values change the numbers; leave it out")] = False
    """Whether parameters are gathered as int8 values (ZeRO++)."""
    zero_quantized_nontrainable_weights: Annotated[
        Switch, refused("quantized values change the numbers; leave it out, frozen parameters take 2 bytes each")
    ] = False
    """Whether frozen parameters are kept and gathered as int8 values."""
    zero_quantized_gradients: Annotated[Switch, refused("quantized gradients change the numbers; leave it out")] = False
    """Whether gradients are reduced as int4 or int8 values (ZeRO++)."""
    zeropp_loco_param: Annotated[
        Anything, refused("it belongs to quantized gradients, which change the numbers; leave it out", only=(None,))
    ] = None
    """Options of the error feedback of quantized gradients (LoCo): ``err_beta`` and ``reset_T``."""
    zenflow: Annotated[
        Anything,
        refused_section(
            "it updates with gradients of earlier steps, which changes the numbers; leave it out: updates on the host "
            "start during backward by optimizer.speculation, exactly"
        ),
    ] = None
    """DeepSpeed's ZenFlow: the most important values are updated at once, the others later."""
    memory_efficient_linear: Annotated[Switch, no_effect("``nn.Linear`` is used as it is")] = True
    """Whether ``nn.Linear`` is replaced by one that saves no parameter for backward (stage 3)."""
    override_module_apply: Annotated[Switch, no_effect("no method of modules is replaced")] = True
    """Whether ``nn.Module.apply`` gathers parameters for the function it calls (stage 3)."""
    leaf_module: LeafModuleConfig = Field(default_factory=LeafModuleConfig)
    """Modules that are fetched as a whole."""
    log_trace_cache_warnings: Annotated[Switch, no_effect("departures from the plan are counted")] = False
    """Whether a warning is logged where the order in which modules are used changes."""
    enable_sanity_checks: Annotated[Switch, no_effect("checks are always on")] = False
    """Whether DeepSpeed's internal checks are done, for debugging."""
    save_muon_momentum_buffer_in_memory: Annotated[Switch, _NO_DISK] = False
    """Whether Muon's momentum stays in memory when other states go to disk."""
    cpu_offload: Annotated[
        Switch | None, mapped("zero_optimization.offload_optimizer.device", '``True`` is ``"cpu"``')
    ] = None
    """An older spelling of ``offload_optimizer`` with ``device`` ``"cpu"``."""
    cpu_offload_param: Annotated[
        Switch | None, mapped("zero_optimization.offload_param.device", '``True`` is ``"cpu"``')
    ] = None
    """An older spelling of ``offload_param`` with ``device`` ``"cpu"``."""
    cpu_offload_use_pin_memory: Annotated[Switch | None, _PINNED] = None
    """An older spelling of ``pin_memory`` in ``offload_param`` and ``offload_optimizer``."""


class AioConfig(Section):
    """The section ``aio``: DeepSpeed's asynchronous reads from and writes to disk."""

    block_size: Annotated[AtLeast0, _NO_DISK] = 1_048_576
    """Size of each block that is read or written, in bytes."""
    queue_depth: Annotated[AtLeast0, _NO_DISK] = 8
    """Largest number of blocks in the queue of reads and writes."""
    intra_op_parallelism: Annotated[AtLeast0, OtherSpelling("thread_count"), _NO_DISK] = 1
    """Number of threads that share one read or write."""
    single_submit: Annotated[Switch, _NO_DISK] = False
    """Whether requests are submitted one by one instead of many together."""
    overlap_events: Annotated[Switch, _NO_DISK] = True
    """Whether requests are submitted without waiting for earlier ones."""
    use_gds: Annotated[Switch, _NO_DISK] = False
    """Whether files are read into and written from GPU memory by NVIDIA's GPUDirect Storage."""
