"""Builds an engine's core: the layout of chunks, the C++ runtime, and the allocator's mode."""

from __future__ import annotations

import dataclasses
import logging

from torch import nn

from patrickstar import _C
from patrickstar.config import Config
from patrickstar.machine.allocator import ExpandableSegments
from patrickstar.machine.budgets import Budgets
from patrickstar.machine.engine_options import make_engine_options
from patrickstar.machine.state_scheme import StateScheme, choose_layout, state_scheme
from patrickstar.module.adoption import FormerHandle
from patrickstar.module.layouts import ChunkSize, choose_chunk_size, make_layout, owned_params, working_sets
from patrickstar.module.preprocess import ChunkedSpec, SortedParams
from patrickstar.planning.predicted_step import Prediction, StepTimes
from patrickstar.planning.simulation import played_instructions
from patrickstar.planning.step_plan import Plan, SavedCalls, plan_of
from patrickstar.profiling import PlayedInstruction
from patrickstar.ranks.chunk_ranks import ChunkRanks
from patrickstar.ranks.context import DistributedContext
from patrickstar.ranks.distributed import RankGroups
from patrickstar.sizes import show_size

logger = logging.getLogger("patrickstar")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Core:
    """The C++ core of a session, and what it was built with."""

    layout: _C.Layout
    runtime: _C.Runtime
    segments: ExpandableSegments
    """The allocator's mode; closed after the runtime."""
    chunk_numel: int
    """Chunk size of the layout in elements."""
    largest_module_bytes: int
    """Device bytes of the largest module's chunks and their gradients."""


@dataclasses.dataclass(frozen=True)
class AllEvicted:
    """State that a session keeps between two cores."""

    params: list[FormerHandle]
    """Former handles of parameters in chunks, by id."""
    memory: _C.KeptRegions
    """Host memory of the former core for the next one; returned to the system with the last reference."""
    segments: ExpandableSegments
    """The allocator's mode until the next core takes it, so that PyTorch keeps its cache."""


def build_core(
    module: nn.Module,
    params: SortedParams,
    config: Config,
    context: DistributedContext,
    chunk_ranks: ChunkRanks,
    budgets: Budgets,
    chunk_numel: int | None = None,
    kept_memory: _C.KeptRegions | None = None,
) -> Core:
    """A core for ``module``, without values. No communication with other ranks.

    Args:
        module: the user's.
        params: where each parameter of ``module`` goes.
        config: checked.
        context: of this rank.
        chunk_ranks: the ranks that share its chunks.
        budgets: of memory.
        chunk_numel: chunk size in elements; None: chosen for the budgets.
        kept_memory: of a former core.

    Raises:
        MemoryBudgetError: the model cannot fit the budgets.
        DiskError: the disk has no room for states that rest there, or fails.
    """
    size = _choose_chunk_size(module, params, config, budgets)
    if chunk_numel is not None:
        size = dataclasses.replace(size, numel=chunk_numel)
    segments = ExpandableSegments(context.device, budgets.device_bytes)
    local = (context.local_rank, context.local_world_size)
    try:
        options = make_engine_options(config, context.device, budgets, segments.rounding_bytes, local)
        layout = _make_layout(params, size.numel, chunk_ranks, config, budgets, options, is_new=chunk_numel is None)
        options.param_shapes = [_shape_in_memory(spec) for spec in params.chunked]
        options.ample_limit_bytes, options.ample_extra_bytes = size.ample_bytes, size.ample_extra_bytes
        collectives = _C.Collectives(
            chunk_ranks.gather,
            chunk_ranks.scatter,
            chunk_ranks.control,
            chunk_ranks.part_gather,
            chunk_ranks.part_scatter,
        )
        names = [spec.name for spec in params.chunked]
        owned = owned_params(params, module)
        runtime = _C.Runtime(layout, names, owned, options, collectives, kept_memory)
    except BaseException:
        segments.close()
        raise
    return Core(
        layout=layout,
        runtime=runtime,
        segments=segments,
        chunk_numel=size.numel,
        largest_module_bytes=_C.working_set_bytes(layout, owned),
    )


def _shape_in_memory(spec: ChunkedSpec) -> list[int]:
    """The shape of a parameter's memory, slowest dimension first."""
    if spec.part is not None:
        return list(spec.shape)
    return [spec.shape[index] for index in sorted(range(len(spec.shape)), key=spec.param.stride, reverse=True)]


def _make_layout(
    params: SortedParams,
    chunk_numel: int,
    chunk_ranks: ChunkRanks,
    config: Config,
    budgets: Budgets,
    options: _C.EngineOptions,
    *,
    is_new: bool,
) -> _C.Layout:
    """``is_new``: False if a former core's values arrive as they are stored, which fixes the state scheme."""

    def make(scheme: StateScheme) -> _C.Layout:
        return make_layout(params, chunk_numel, chunk_ranks.size, chunk_ranks.rank, scheme)

    if not is_new or config.disk_memory.path is not None:
        return make(state_scheme(config.optimizer))
    start = _C.possible_start(options.update_start, options.residency.backwards, True)
    return choose_layout(
        make,
        config.optimizer,
        updates_begin_early=start == _C.UpdateStart.SPECULATIVE,
        device_bytes=budgets.device_bytes if config.optimizer.params.use_hybrid_adam else 0,
        host_bytes=budgets.host_bytes,
    )


def _choose_chunk_size(module: nn.Module, params: SortedParams, config: Config, budgets: Budgets) -> ChunkSize:
    default_numel = config.default_chunk_size
    size = choose_chunk_size(params, working_sets(params, module), default_numel, budgets.device_bytes)
    if size.numel != default_numel:
        logger.debug(
            "chunk size: %d elements instead of %d, for a device budget of %s",
            size.numel,
            default_numel,
            show_size(budgets.device_bytes),
        )
    return size


def load_plan(config: Config, ranks: RankGroups) -> Plan | None:
    """The plan that the configuration names, the same on all ranks, or None.

    Raises:
        ValueError: the plan cannot be read.
        DisagreementError: ranks have different plans.
    """
    plan = None
    try:
        if config.plan is not None:
            plan = Plan.load(config.plan)
    except OSError as error:
        raise ValueError(f"plan is {config.plan!r}, which cannot be read: {error}") from error
    ranks.check_agreement("the plan to begin with", "none" if plan is None else plan.digest)
    return plan


def current_plan(runtime: _C.Runtime, layout: _C.Layout, saved_calls: SavedCalls | None = None) -> Plan:
    """The plan of the next step, in which checkpointed calls save ``saved_calls``.

    Raises:
        StateError: no step was made yet.
    """
    timeline = runtime.timeline()
    if not timeline:
        raise _C.StateError("there is no plan before the first step, which observes what a step uses; step once")
    on_device = [
        runtime.is_on_device(chunk, layout.chunk(chunk)["leading_state"]) for chunk in range(layout.num_chunks)
    ]
    times, predicted = runtime.step_times(), runtime.predicted_step()
    plan = plan_of(
        layout,
        timeline,
        on_device,
        runtime.plan_problem(),
        runtime.plan(),
        StepTimes.of_core(times) if times is not None else None,
        Prediction(**predicted) if predicted is not None else None,
        [runtime.resting_tier(chunk) == _C.Tier.DISK for chunk in range(layout.num_chunks)],
    )
    return dataclasses.replace(plan, saved_calls=saved_calls)


def current_program(runtime: _C.Runtime, layout: _C.Layout) -> list[PlayedInstruction] | None:
    """The program of the next step; None: no step was measured."""
    plan = current_plan(runtime, layout)
    return None if plan.times is None else played_instructions(plan)
