"""Chooses plans with the simulator (csrc/plan/simulator.h), and simulates given plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from patrickstar import _C
from patrickstar.planning.cluster import Cluster, HostTraffic
from patrickstar.planning.machines import Machine
from patrickstar.planning.predicted_step import Prediction, StepTimes
from patrickstar.planning.step_plan import Plan, PlannedChunk, plan_of, planned_chunks
from patrickstar.planning.timeline import TimedTimeline
from patrickstar.planning.update_costs import UpdateRates
from patrickstar.profiling import PlayedInstruction

# Rounds of choosing a plan and measuring its use of host memory.
_ROUNDS = 4


def predict(
    plan: Plan,
    compute_seconds: Sequence[float],
    rates: _C.Rates,
    *,
    num_speculated_chunks: int | None = None,
) -> Prediction:
    """Returns the steady step of ``plan``.

    Args:
        plan: from an engine (``engine.plan()``), from a file, or made here.
        compute_seconds: by access of ``plan.timeline``: device work until the next access, without waits.
        rates: the machine's.
        num_speculated_chunks: number of leading chunks updated during backward if their states are on the host
            (csrc/engine/speculation.h); None: all. Other updates start when the norm is known.

    Raises:
        ValueError: sizes differ or a rate is not positive.
    """
    count = len(plan.chunks) if num_speculated_chunks is None else num_speculated_chunks
    ahead = [_C.Ahead.EVERYTHING if index < count else _C.Ahead.NOTHING for index in range(len(plan.chunks))]
    start = _C.UpdateStart.SPECULATIVE
    updates = [
        _C.earliest_recipe(chunk.trainable, _C.DType.__members__[chunk.dtype], chunk.tier, start, part)
        for chunk, part in zip(plan.chunks, ahead, strict=True)
    ]
    return _simulated(plan, compute_seconds, rates, updates)


def _simulated(
    plan: Plan,
    compute_seconds: Sequence[float],
    rates: _C.Rates,
    updates: Sequence[_C.Recipe],
    activations: Sequence[Sequence[int]] = (),
) -> Prediction:
    return Prediction(**_C.simulate(*_step_arguments(plan, compute_seconds, rates, updates, activations)))


def _step_arguments(
    plan: Plan,
    compute_seconds: Sequence[float],
    rates: _C.Rates,
    updates: Sequence[_C.Recipe],
    activations: Sequence[Sequence[int]],
) -> tuple[_C.PlanProblem, dict[str, Any], _C.Rates, _C.StepShape]:
    """Returns the arguments of ``_C.simulate`` and ``_C.play_program``."""
    shape = _C.StepShape(
        compute_seconds=compute_seconds,
        updates=updates,
        numels=[chunk.shard_numel for chunk in plan.chunks],
        num_ranks=plan.num_ranks,
        activations=activations,
        disk_bytes=[chunk.disk_bytes for chunk in plan.chunks],
        dequantized_bytes=_dequantized_bytes(lambda: plan.chunks, rates),
        chunk_ranks=[chunk.numel // chunk.shard_numel for chunk in plan.chunks],
    )
    return _C.PlanProblem(plan.timeline, **plan.problem), plan.as_core(), rates, shape


def played_instructions(plan: Plan) -> list[PlayedInstruction]:
    """Returns the program of ``plan`` with each instruction's predicted time.

    Raises:
        ValueError: the plan has no times: none were measured or estimated.
    """
    if plan.times is None:
        raise ValueError(
            "the plan has no times: a step is measured on a GPU only, some ten steps after the first; "
            "patrickstar plan estimates them"
        )
    arguments = _step_arguments(plan, **plan.times.as_core())
    return [PlayedInstruction(**fields) for fields in _C.play_program(*arguments)]


def shared_host_plan(
    choose: Callable[[_C.Rates], Plan],
    machine: Machine,
    cluster: Cluster,
    chunks: Sequence[PlannedChunk],
    updates: UpdateRates,
) -> Plan:
    """Returns the plan of ``choose`` at each GPU's rates when all GPUs of a node run the same step. Rates depend on the
    host memory bandwidth that the step uses, so a few rounds are made.
    """
    updated = sum(c.shard_numel for c in chunks if c.trainable and not c.states_on_device)
    traffic = HostTraffic()
    for _ in range(1 if cluster.gpus_per_node == 1 else _ROUNDS):
        plan = choose(cluster.rates(machine, traffic, updates))
        step = plan.prediction
        assert step is not None
        per_second = 1e-9 / step.seconds
        traffic = HostTraffic(
            upload_gbps=step.uploaded_bytes * per_second,
            download_gbps=step.downloaded_bytes * per_second,
            adam_gbps=updated * updates.host_bytes * per_second,
        )
    if cluster.gpus_per_node == 1:
        return plan
    moved = step.uploaded_bytes + step.downloaded_bytes + updated * updates.host_bytes
    busy = moved / (cluster.host_gbps(machine) * 1e9)
    return dataclasses.replace(plan, prediction=dataclasses.replace(step, host_memory_seconds=busy))


def choose_step(
    layout: _C.Layout,
    timed: TimedTimeline,
    on_device: Sequence[bool],
    budget: _C.DeviceBudget,
    updates: Sequence[_C.Recipe],
    start: _C.UpdateStart,
    rates: _C.Rates,
) -> dict[str, Any]:
    """Returns the core's choice of plan, as an engine makes it from measured times (csrc/plan/plan_choice.h)."""
    shape = _C.StepShape(
        compute_seconds=timed.seconds,
        updates=updates,
        activations=[copies.as_core() for copies in timed.copies],
        dequantized_bytes=_dequantized_bytes(lambda: planned_chunks(layout, on_device), rates),
    )
    return _C.choose_step(layout, timed.accesses, on_device, budget, rates, shape, start)


def choose_plan(
    layout: _C.Layout,
    timed: TimedTimeline,
    on_device: Sequence[bool],
    on_disk: Sequence[bool],
    budget: _C.DeviceBudget,
    updates: Sequence[_C.Recipe],
    start: _C.UpdateStart,
    rates: _C.Rates,
) -> Plan:
    """Returns the plan of :func:`choose_step`."""
    choice = choose_step(layout, timed, on_device, budget, updates, start, rates)
    times = {
        "rates": rates,
        "compute_seconds": timed.seconds,
        "updates": choice["updates"],
        "activations": [copies.as_core() for copies in timed.copies],
    }
    return plan_of(
        layout,
        timed.accesses,
        on_device,
        choice["problem"],
        choice["plan"],
        StepTimes.of_core(times),
        Prediction(**choice["predicted"]),
        on_disk,
    )


def accumulated(plan: Plan, accumulation: int) -> Prediction:
    """Returns the step of ``plan`` preceded by ``accumulation`` - 1 backward passes without updates. Their transfers
    and operations equal the last one's. Host time for accumulating is not counted.
    """
    last, times = plan.prediction, plan.times
    assert last is not None and times is not None
    if accumulation == 1:
        return last
    core = times.as_core()
    core["rates"].synchronize_seconds = 0.0
    never = [_C.Recipe.NEVER] * len(plan.chunks)
    other = _simulated(plan, core["compute_seconds"], core["rates"], never, core["activations"])
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Prediction):
        one, more = getattr(last, field.name), getattr(other, field.name)
        if field.name == "stall_seconds":
            values[field.name] = {cause: seconds + (accumulation - 1) * more[cause] for cause, seconds in one.items()}
        elif field.name == "peak_bytes":
            values[field.name] = max(one, more)
        else:
            values[field.name] = one + (accumulation - 1) * more
    return Prediction(**values)


def _dequantized_bytes(chunks: Callable[[], Sequence[PlannedChunk]], rates: _C.Rates) -> list[int]:
    """By chunk; empty if the accesses' times include dequantisation, as an engine's measurements do."""
    return [chunk.dequantized_bytes for chunk in chunks()] if rates.device_memory_gbps > 0 else []
