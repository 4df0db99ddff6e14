"""Use of the plan cache: a session starts with the plan of an earlier run like it, and saves its own."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import patrickstar
from patrickstar import _C
from patrickstar.config import Config
from patrickstar.machine.host_memory import usable_bytes
from patrickstar.module.checkpointed_layers import is_checkpointing
from patrickstar.module.preprocess import SortedParams
from patrickstar.planning.plan_cache import PlanCache, cache_folder, key_of
from patrickstar.planning.step_plan import VERSION, Plan
from patrickstar.ranks.distributed import RankGroups
from patrickstar.session.core_setup import current_plan
from patrickstar.session.recompute_choice import NoRecomputeChoice, shape_of

logger = logging.getLogger("patrickstar")

_MOST_STEPS = 32  # a run saves no plan after so many
_MOST_FORWARDS = 1024  # recorded per step
_CONFIG_KEYS = {
    "activations": True,
    "client": {"mem_tracer"},
    "delays": True,
    "device_memory": True,
    "gradient_accumulation_steps": True,
    "host_memory": True,
    "host_threads": True,
    "optimizer": {"speculation": True, "states": True, "params": {"use_hybrid_adam"}},
    "sequence_parallel": True,
    "tensor_parallel": {"rows", "columns", "mode"},
    "use_cpu_embedding": True,
}
"""Keys of the configuration that a plan depends on. Budgets count as configured: measured ones differ from run to run,
and every plan is made for the present budgets.
"""

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a forward."""


def adopt_plan(runtime: _C.Runtime, choice: NoRecomputeChoice, plan: Plan) -> None:
    """Makes the first step of ``runtime`` replay ``plan``; calls save what it says. Collective over all ranks."""
    choice.adopt(plan)
    runtime.adopt_timeline(plan.timeline, plan.times.as_core() if plan.times is not None else None)


class NoKeptPlan:
    """No plan is read or saved."""

    def begin_forward(self, inputs: Inputs | None) -> None:
        """Called before each training forward."""

    def end_step(self) -> None:
        """Called after each step."""

    def close(self) -> None:
        """Called before the runtime closes."""


class KeptPlan(NoKeptPlan):
    """Reads and saves a plan in the cache.

    Runs are alike if model, layout, configured budgets, machine, versions and the shapes of the step's inputs agree. So
    the lookup waits for the first training forward. The first rank sends its plan to the others. A plan that does not
    fit the step costs time and changes no number: the step fetches on demand, and activations beyond the plan evict
    chunks.

    Args:
        cache: of this rank; None: nothing is read or saved, but the first rank's plan is adopted.
        facts: about this run, but the shapes of its inputs and compiled modules.
        compiled: gives the names of compiled modules, which save other activations.
        ranks: that train together.
        runtime: before its first step.
        layout: its chunks.
        choice: of recomputation.
    """

    def __init__(
        self,
        cache: PlanCache | None,
        facts: dict[str, Any],
        compiled: Callable[[], list[str]],
        ranks: RankGroups,
        runtime: _C.Runtime,
        layout: _C.Layout,
        choice: NoRecomputeChoice,
    ):
        self._cache = cache if ranks.context.rank == ranks.members[0] else None
        self._facts = facts
        self._compiled = compiled
        self._ranks = ranks
        self._runtime = runtime
        self._layout = layout
        self._choice = choice
        self._key = ""  # none before the first training forward
        self._kept: Plan | None = None  # the plan in the cache
        self._num_plans_when_kept = -1
        self._is_over = False
        self._num_steps = 0
        self._shapes: list[Any] = []  # the running step's forwards
        self._last_shapes: list[Any] = []
        self._first_shapes: Any = None
        self._num_plans = -1  # made until the end of the last step

    def begin_forward(self, inputs: Inputs | None) -> None:
        """Adopts a kept plan before the first training forward. Within a collective call.

        Args:
            inputs: of the module's call; None: unknown.
        """
        if self._is_over or len(self._shapes) == _MOST_FORWARDS:
            return
        shapes = None if inputs is None else [_shape(leaf) for leaf in tree_leaves(inputs)]
        self._shapes.append(shapes)
        if self._key:
            return
        self._first_shapes = shapes
        self._key = key_of({**self._facts, "inputs": shapes, "compiled": self._compiled()})
        plan = self._common_plan()
        if plan is not None:
            adopt_plan(self._runtime, self._choice, plan)
            self._note_kept(plan)
            logger.debug("the first step replays the plan of an earlier run like this one")
        self._is_over = self._cache is None

    def _common_plan(self) -> Plan | None:
        """The first rank's plan, on all ranks."""
        plan = self._find() if self._cache is not None else None
        if len(self._ranks.members) == 1:
            return plan
        text = "" if plan is None else plan.to_json()
        text = self._ranks.control.exchange(text.encode(), "the plan to begin with")[0].decode()
        return Plan.from_json(text, "the first rank's plan") if text else None

    def _find(self) -> Plan | None:
        assert self._cache is not None
        plan = self._cache.load(self._key)
        if plan is None:
            return None
        try:
            plan.check_layout(self._layout, "a kept plan")
        except ValueError as error:  # a foreign file
            logger.debug("a kept plan is not used: %s", error)
            return None
        return plan

    def end_step(self) -> None:
        """Saves the plan once it has settled: two equal steps in a row, of which the second made no new plan."""
        if self._is_over:
            return
        self._num_steps += 1
        num_plans = self._count_plans()
        is_settled = self._is_usual(self._shapes) and self._shapes == self._last_shapes and num_plans == self._num_plans
        self._last_shapes, self._shapes, self._num_plans = self._shapes, [], num_plans
        if is_settled:
            self._keep()
        self._is_over = self._num_steps >= _MOST_STEPS

    def close(self) -> None:
        """Saves the next plan of a run that was too short to settle."""
        if not self._is_over and self._is_usual(self._last_shapes):
            self._keep()

    def _is_usual(self, shapes: list[Any]) -> bool:
        """True if the step's first forward has the shapes in the key."""
        return shapes[:1] == [self._first_shapes]

    def _keep(self) -> None:
        if self._cache is None or self._count_plans() == self._num_plans_when_kept or not self._runtime.timeline():
            return
        plan = current_plan(self._runtime, self._layout, self._choice.saved_calls())
        if plan.steps and plan != self._kept:
            self._cache.save(self._key, plan)
        self._note_kept(plan)

    def _note_kept(self, plan: Plan) -> None:
        self._kept = plan
        self._num_plans_when_kept = self._count_plans()

    def _count_plans(self) -> int:
        return self._runtime.report()["num_plans"]


def make_kept_plan(
    module: nn.Module,
    params: SortedParams,
    config: Config,
    ranks: RankGroups,
    runtime: _C.Runtime,
    layout: _C.Layout,
    choice: NoRecomputeChoice,
    compiled: Callable[[], list[str]],
) -> NoKeptPlan:
    """The kept plan of a new session, with arguments of :class:`KeptPlan`. Nothing is looked up if the configuration
    names a plan, or keeps none on one rank.
    """
    folder = cache_folder(config.plan_cache)
    if config.plan is not None or (folder is None and len(ranks.members) == 1):
        return NoKeptPlan()
    cache = PlanCache(folder) if folder is not None else None
    facts = run_facts(module, params, config, ranks, layout)
    return KeptPlan(cache, facts, compiled, ranks, runtime, layout, choice)


def run_facts(
    module: nn.Module, params: SortedParams, config: Config, ranks: RankGroups, layout: _C.Layout
) -> dict[str, Any]:
    """Facts that must agree between two runs that share a plan, in JSON's types."""
    chunks = [layout.chunk(index) for index in range(layout.num_chunks)]
    return {
        "versions": [patrickstar.__version__, torch.__version__, VERSION],
        "modules": [
            [name, type(child).__qualname__, is_checkpointing(child)] for name, child in module.named_modules()
        ],
        "chunked": [
            [spec.name, list(spec.param.shape), str(spec.compute_dtype), spec.trained] for spec in params.chunked
        ],
        "managed": [
            [spec.name, list(spec.param.shape), str(spec.param.dtype), spec.on_host, spec.trained]
            for spec in params.managed
        ],
        "chunks": [
            [chunk["numel"], chunk["dtype"].name, chunk["trainable"], chunk["quantization"].name] for chunk in chunks
        ],
        "config": config.model_dump(mode="json", include=_CONFIG_KEYS),
        "machine": _machine_facts(ranks.context.device),
        "ranks": [len(ranks.members), ranks.context.local_world_size],
    }


def _machine_facts(device: torch.device) -> list[Any]:
    """Device and host. Host memory counts to the next power of two: a virtual machine's grows as it is touched."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        on_device = [properties.name, properties.total_memory]
    else:
        on_device = ["simulated", 0]
    cpus = len(os.sched_getaffinity(0))
    return [*on_device, platform.machine(), cpus, usable_bytes().bit_length()]


def _shape(leaf: Any) -> Any:
    return [list(shape_of(leaf)), str(leaf.dtype)] if isinstance(leaf, torch.Tensor) else type(leaf).__name__
