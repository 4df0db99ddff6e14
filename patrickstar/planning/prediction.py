"""What a step costs: placement and plan as an engine would choose them, then the simulator (csrc/plan/simulator.h)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from patrickstar import _C
from patrickstar.config import Speculation
from patrickstar.planning.cluster import Cluster, HostTraffic
from patrickstar.planning.machines import ADAM_HOST_BYTES, Machine
from patrickstar.planning.predicted_step import Prediction, StepTimes
from patrickstar.planning.step_plan import Plan, PlannedChunk, plan_of, planned_chunks
from patrickstar.planning.timeline import TimedTimeline, itemsize, make_timeline
from patrickstar.planning.uses import StepUses

# Of choosing a plan and learning what it takes of the host's memory.
_ROUNDS = 4
_ONE_GPU = Cluster()


def predict(
    plan: Plan,
    compute_seconds: Sequence[float],
    rates: _C.Rates,
    *,
    num_speculated_chunks: int | None = None,
) -> Prediction:
    """The steady step that ``plan`` gives.

    Args:
        plan: of an engine (``engine.plan()``), of a file, or made here.
        compute_seconds: by moment of ``plan.timeline``: the device's work until the next moment, without waiting.
        rates: of the machine.
        num_speculated_chunks: how many chunks, from the first on, are updated during backward if their states are on
            the host (csrc/engine/speculation.h); None: all. The others' updates start when the norm is known.

    Raises:
        ValueError: sizes do not agree or a rate is not positive.
    """
    problem = plan.problem
    step = _C.simulate(
        plan.timeline,
        problem["costs"],
        plan.as_core(),
        rates,
        compute_seconds=list(compute_seconds),
        updates=_updates(plan.chunks, num_speculated_chunks),
        numels=[chunk.shard_numel for chunk in plan.chunks],
        num_ranks=plan.num_ranks,
        **{key: value for key, value in problem.items() if key not in ("costs", "prefetch_bytes")},
    )
    return Prediction(**step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What an engine is given, on each rank."""

    device_bytes: int
    """Budget of device memory in bytes, the configuration's ``device_memory``."""
    host_bytes: int
    """Budget of host memory in bytes, the configuration's ``host_memory``."""
    margin_use_ratio: float = 0.95
    """Share of the device memory left after compute copies and the tide that optimizer states may take
    (``client.mem_tracer.margin_use_ratio``).
    """
    hybrid_adam: bool = True
    """Whether optimizer states may live on the device (``optimizer.params.use_hybrid_adam``)."""
    speculation: Speculation = Speculation.AUTO
    """Whether updates on the host start during backward (``optimizer.speculation``)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What becomes of one chunk size."""

    chunk_numel: int
    """Elements in a chunk of this size."""
    plan: Plan
    """What an engine with such chunks would move when."""
    num_device_state_chunks: int
    """Chunks with optimizer states on the device."""
    num_speculated_chunks: int
    """Chunks whose updates start during backward."""
    host_bytes: int
    """Parameters and optimizer states on the host, of one rank."""
    host_peak_bytes: int
    """The most that one rank's engine maps of the host: also new values of updates ahead of the step, gradients on
    their way, and places of states that move to the device after the first step.
    """
    least_device_bytes: int
    """The least ``device_memory`` that works with all states on the host."""
    least_host_bytes: int
    """The least ``host_memory`` that works with all states on the host."""
    waste_bytes: int
    """The most that the chunks which a moment needs hold beside the parameters that it needs."""
    step: Prediction
    """While clipping does not act."""
    clipped_step: Prediction
    """While clipping acts in every step: updates on the host start when the norm is known."""


def predict_case(
    uses: StepUses, layout: _C.Layout, machine: Machine, setting: Setting, cluster: Cluster = _ONE_GPU
) -> Case:
    """What an engine on CUDA does with this layout: see csrc/engine/residency.cpp. ``layout`` is for the ranks of
    ``cluster``; budgets, steps and bytes are one rank's.

    Raises:
        MemoryBudgetError: it does not fit; the message says by how much.
        ValueError: the layout is for another number of ranks.
    """
    if layout.num_ranks != cluster.num_ranks:
        raise ValueError(f"the layout is for {layout.num_ranks} ranks, the cluster has {cluster.num_ranks} GPUs")
    chunks = [layout.chunk(index) for index in range(layout.num_chunks)]
    homes = [chunk["home_bytes"] for chunk in chunks]
    _, least_host_bytes = _C.initial_placement(layout, _C.UNLIMITED, 0)
    budget = _C.DeviceBudget()
    budget.limit_bytes = int(setting.device_bytes * (1 - _C.CUDA_SLACK_RATIO))
    budget.margin_use_ratio = setting.margin_use_ratio
    budget.keeps_gradients = setting.speculation is not Speculation.COMMIT
    if setting.speculation is Speculation.AUTO:
        budget.host_limit_bytes = setting.host_bytes
    nowhere = [False] * len(chunks)
    all_on_host = make_timeline(uses, layout, nowhere).moments
    least_limit = _C.make_plan(all_on_host, **_C.pose_problem(layout, all_on_host, nowhere, budget))[
        "least_limit_bytes"
    ]
    least = int(least_limit / (1 - _C.CUDA_SLACK_RATIO)) + 1
    if least > setting.device_bytes:
        raise _C.MemoryBudgetError(
            f"gpu-mem is {setting.device_bytes} bytes, but activations and the largest moment's chunks take {least}; "
            "give at least that, or a smaller batch, a shorter length or --checkpointing"
        )
    first_on_device, on_device = _place(layout, all_on_host, budget, setting)
    timed = _slowed(make_timeline(uses, layout, on_device), cluster.slowdown(machine))
    host_bytes = sum(home for home, at in zip(homes, on_device, strict=True) if not at)
    room = setting.host_bytes - host_bytes - _C.reserved_gradient_bytes(layout)
    planned = planned_chunks(layout, on_device)
    first_late = {Speculation.COMMIT: len(chunks), Speculation.NEVER: 0}.get(
        setting.speculation, _first_without_room(planned, [_grad_bytes(chunk) for chunk in chunks], room)
    )
    plan, clipped_plan = (
        _shared_host_plan(
            functools.partial(_choose_plan, layout, timed, on_device, budget, num_early), machine, cluster, planned
        )
        for num_early in (first_late, 0)
    )
    if plan.least_limit_bytes > budget.limit_bytes:
        raise _C.MemoryBudgetError(
            f"cpu-mem is {setting.host_bytes} bytes, which leaves so many optimizer states to the GPU that a step "
            f"needs {plan.least_limit_bytes} bytes there; raise cpu-mem to {least_host_bytes}, or gpu-mem"
        )
    return Case(
        chunk_numel=layout.chunk_numel,
        plan=plan,
        num_device_state_chunks=sum(on_device),
        num_speculated_chunks=sum(c.trainable and not c.states_on_device for c in planned[:first_late]),
        host_bytes=host_bytes,
        host_peak_bytes=_C.host_peak_bytes(
            layout,
            first_on_device,
            on_device,
            setting.host_bytes,
            updates_ahead=setting.speculation in (Speculation.AUTO, Speculation.ALWAYS),
        ),
        least_device_bytes=least,
        least_host_bytes=least_host_bytes,
        waste_bytes=timed.waste_bytes,
        step=plan.prediction,
        clipped_step=clipped_plan.prediction,
    )


def _slowed(timed: TimedTimeline, slowdown: float) -> TimedTimeline:
    return dataclasses.replace(timed, seconds=[seconds * slowdown for seconds in timed.seconds])


def _shared_host_plan(
    choose: Callable[[_C.Rates], Plan], machine: Machine, cluster: Cluster, chunks: Sequence[PlannedChunk]
) -> Plan:
    """What ``choose`` makes of the rates that are left when all GPUs of a node do the same: how fast transfers and
    updates are depends on how much of the host's memory bandwidth they take, and that on the step. A few rounds settle
    it.
    """
    updated = sum(c.shard_numel for c in chunks if c.trainable and not c.states_on_device)
    traffic = HostTraffic()
    for _ in range(1 if cluster.gpus_per_node == 1 else _ROUNDS):
        plan = choose(cluster.rates(machine, traffic))
        step = plan.prediction
        assert step is not None
        per_second = 1e-9 / step.seconds
        traffic = HostTraffic(
            upload_gbps=step.uploaded_bytes * per_second,
            download_gbps=step.downloaded_bytes * per_second,
            adam_gbps=updated * ADAM_HOST_BYTES * per_second,
        )
    if cluster.gpus_per_node == 1:
        return plan
    moved = step.uploaded_bytes + step.downloaded_bytes + updated * ADAM_HOST_BYTES
    busy = moved / (cluster.host_gbps(machine) * 1e9)
    return dataclasses.replace(plan, prediction=dataclasses.replace(step, host_memory_seconds=busy))


def _choose_plan(
    layout: _C.Layout,
    timed: TimedTimeline,
    on_device: Sequence[bool],
    budget: _C.DeviceBudget,
    num_early: int,
    rates: _C.Rates,
) -> Plan:
    """The plan that an engine chooses once it has measured these times (csrc/plan/plan_choice.h), with ``num_early``
    chunks, from the first on, updated during backward.
    """
    problem = _C.pose_problem(layout, timed.moments, on_device, budget)
    chunks = planned_chunks(layout, on_device)
    updates = _updates(chunks, num_early)
    choice = _C.choose_plan(
        timed.moments,
        rates=rates,
        compute_seconds=timed.seconds,
        updates=updates,
        numels=[chunk.shard_numel for chunk in chunks],
        num_ranks=layout.num_ranks,
        **problem,
    )
    return plan_of(
        layout,
        timed.moments,
        on_device,
        {**problem, "prefetch_bytes": choice["prefetch_bytes"]},
        choice["plan"],
        StepTimes.of_core({"rates": rates, "compute_seconds": timed.seconds, "updates": updates}),
        Prediction(**choice["predicted"]),
    )


def _updates(chunks: Sequence[PlannedChunk], num_early: int | None) -> list[_C.UpdateAt]:
    """By chunk; those from the first on whose states are on the host are updated during backward. None: all."""
    limit = len(chunks) if num_early is None else num_early
    updates = []
    for index, chunk in enumerate(chunks):
        if not chunk.trainable:
            updates.append(_C.UpdateAt.NEVER)
        elif chunk.states_on_device:
            updates.append(_C.UpdateAt.DEVICE_AFTER_NORM)
        else:
            updates.append(_C.UpdateAt.HOST_AT_RETIRE if index < limit else _C.UpdateAt.HOST_AFTER_NORM)
    return updates


def _place(
    layout: _C.Layout,
    moments: list[dict[str, Any]],
    budget: _C.DeviceBudget,
    setting: Setting,
) -> tuple[list[bool], list[bool]]:
    """By chunk, whether its states are on the device: at first those that the host cannot hold, then those of the
    margin as well.
    """
    chunks = [layout.chunk(index) for index in range(layout.num_chunks)]
    room = budget.limit_bytes - 2 * max(_grad_bytes(chunk) for chunk in chunks)
    first, host_bytes = _C.initial_placement(layout, setting.host_bytes, room)
    if host_bytes > setting.host_bytes:
        need = sum(chunk["home_bytes"] for chunk in chunks)
        raise _C.MemoryBudgetError(
            f"parameters and optimizer states need {need} bytes, of which the GPU has room for {room} before "
            f"activations; the others take {host_bytes} on the host, and cpu-mem is {setting.host_bytes}; raise "
            f"cpu-mem to at least {host_bytes}, or gpu-mem"
        )
    count = _C.num_device_state_chunks(layout, moments, budget) if setting.hybrid_adam else 0
    return first, [at or (i < count and layout.chunk(i)["trainable"]) for i, at in enumerate(first)]


def _first_without_room(chunks: Sequence[PlannedChunk], values: Sequence[int], room: int) -> int:
    """The first chunk whose new parameters (``values``: bytes of each) find no host memory: those before it are updated
    during backward (csrc/engine/speculation.cpp). That states may follow in a pass of their own is not modelled.
    """
    for index, (chunk, num_bytes) in enumerate(zip(chunks, values, strict=True)):
        room -= num_bytes if chunk.trainable and not chunk.states_on_device else 0
        if room < 0:
            return index
    return len(chunks)


def _grad_bytes(chunk: Mapping) -> int:
    return chunk["shard_numel"] * itemsize(chunk)
