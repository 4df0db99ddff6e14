"""The first step of an engine as a measurement, by which its recomputation is chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

from patrickstar import _C
from patrickstar.activations.call_measurement import CallMeasurement
from patrickstar.config import OptimizerType
from patrickstar.planning.machines import H200, Machine
from patrickstar.planning.measuring import engine_threads, measure_host_adam_gparams
from patrickstar.planning.recomputation import MeasuredStep, steady_seconds
from patrickstar.planning.timeline import TimedTimeline
from patrickstar.planning.update_costs import costs_of_chunks

_NUMEL = 64 * 2**20
"""Parameters of the update whose rate is measured: 1 GB, more than caches hold. An update of 256 MB is up to twice as
fast as those of a step (docs/log.md).
"""

_BESIDE_A_STEP = 0.8
"""Rate of updates during a step, relative to updates alone: transfers use the host's memory too. 8.03 B: 6.2 of 7.75e9
parameters per second (benchmark/results/h200-first-steps.txt).
"""


def measured_step(
    runtime: _C.Runtime,
    layout: _C.Layout,
    rule: OptimizerType,
    measurement: CallMeasurement,
    scale: _C.ExpectedScale,
) -> MeasuredStep | None:
    """The step so far, without one-time costs, with rates of updates measured now; None: nothing was recorded.

    ``scale``: that updates of later steps assume.
    """
    so_far = runtime.step_so_far()
    if so_far is None:
        return None
    accesses, times, stalls = so_far
    rates = times["rates"]
    chunks = [layout.chunk(index) for index in range(layout.num_chunks)]
    updates = _measured_host().update_rates(costs_of_chunks(chunks, rule))
    rates.host_adam_params_per_second = _BESIDE_A_STEP * updates.host_params_per_second
    rates.param_pass, rates.states_pass = H200.passes(scale, layout)
    rates.device_adam_params_per_second = updates.device_params_per_second
    calls = measurement.finish(stalls)
    numels = [_numel_read(access, chunks) for access in accesses]
    seconds = steady_seconds(times["compute_seconds"], calls, numels)
    return MeasuredStep(timed=TimedTimeline(accesses, seconds, 0, calls=calls), rates=rates)


def _measured_host() -> Machine:
    """Rates of host updates here. Those of the device are an H200's; they are a small part of a step."""
    threads = engine_threads().num_threads
    return dataclasses.replace(H200, host_adam_gparams=measure_host_adam_gparams(_NUMEL), host_threads=threads)


def _numel_read(access: dict[str, Any], chunks: list[dict[str, Any]]) -> int:
    """Elements of the chunks whose parameters an access reads."""
    read = {chunk for chunk, kind, mode in access["uses"] if (kind, mode) == (_C.ArrayKind.PARAM, _C.ArrayUseMode.READ)}
    return sum(chunks[chunk]["numel"] for chunk in read)
