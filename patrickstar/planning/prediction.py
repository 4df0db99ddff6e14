"""What a step costs: placement and plan as an engine would choose them, then the simulator (csrc/plan/simulator.h)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from patrickstar import _C
from patrickstar.config import Speculation
from patrickstar.planning.machines import Machine
from patrickstar.planning.step_plan import Plan, make_step_plan
from patrickstar.planning.timeline import itemsize, make_timeline
from patrickstar.planning.uses import StepUses

# As csrc/runtime: what PyTorch's allocator needs to round and to fragment (runtime.cpp), what states may take of the
# device before the tide is known (residency.cpp), gradients on their way that speculation leaves room for
# (optimizer_step.cpp).
_CUDA_SLACK = 0.04
_INITIAL_DEVICE_SHARE = 0.9
_RESERVED_GRADIENTS = 4

_WHAT_HELPS = {
    "compute": "a faster GPU; transfers and updates are hidden",
    "upload": "more device memory or a larger batch (more work per uploaded byte)",
    "download": "more device memory or a larger batch (more work per downloaded byte)",
    "host_adam": "more device memory (states on the GPU), more or faster cores, or a larger batch",
    "memory": "more device memory, or smaller chunks: fetches wait for memory that is still in use",
    "host_update": "more host memory (updates start in backward) or more device memory",
    "launch": "a larger batch: the step is too short for its synchronisation",
}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step in the steady state."""

    seconds: float
    """Of the step."""
    compute_seconds: float
    """Forward and backward on the GPU, when nothing waits."""
    device_adam_seconds: float
    """Updates on the GPU."""
    upload_seconds: float
    """The upload queue is busy."""
    download_seconds: float
    """The download queue is busy."""
    host_adam_seconds: float
    """The host updates."""
    stall_seconds: dict[str, float]
    """What the GPU waited for: ``upload``, ``memory``, ``host_update``, ``launch``."""
    uploaded_bytes: int
    """Per step."""
    downloaded_bytes: int
    """Per step."""
    peak_bytes: int
    """Of the device."""

    @property
    def roofline(self) -> dict[str, float]:
        """Seconds that each resource is busy: no step is shorter than the longest."""
        return {
            "compute": self.compute_seconds + self.device_adam_seconds,
            "upload": self.upload_seconds,
            "download": self.download_seconds,
            "host_adam": self.host_adam_seconds,
        }

    @property
    def bound(self) -> str:
        """What bounds the step: the longest of the roofline, or where none fills 90 % of the step, what the GPU waits
        for most.
        """
        name = max(self.roofline, key=lambda key: self.roofline[key])
        if self.roofline[name] >= 0.9 * self.seconds:
            return name
        return max(self.stall_seconds, key=lambda key: self.stall_seconds[key])

    @property
    def what_helps(self) -> str:
        """What would make the step shorter."""
        return _WHAT_HELPS[self.bound]

    def roofline_line(self) -> str:
        """The roofline in one line."""
        parts = ", ".join(f"{name.replace('_', ' ')} {seconds:.3f} s" for name, seconds in self.roofline.items())
        return f"roofline: {parts}; {self.bound.replace('_', ' ')} bounds the step of {self.seconds:.3f} s"


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
            the host (csrc/runtime/speculation.h); None: all. The others' updates start when the norm is known.

    Raises:
        ValueError: sizes do not agree or a rate is not positive.
    """
    limit = len(plan.chunks) if num_speculated_chunks is None else num_speculated_chunks
    updates = []
    for index, chunk in enumerate(plan.chunks):
        if not chunk.trainable:
            updates.append(_C.UpdateAt.NEVER)
        elif chunk.states_on_device:
            updates.append(_C.UpdateAt.DEVICE_AFTER_NORM)
        else:
            updates.append(_C.UpdateAt.HOST_AT_RETIRE if index < limit else _C.UpdateAt.HOST_AFTER_NORM)
    problem = plan.problem
    step = _C.simulate(
        plan.timeline,
        problem["costs"],
        plan.as_core(),
        rates,
        compute_seconds=list(compute_seconds),
        updates=updates,
        numels=[chunk.numel for chunk in plan.chunks],
        **{key: value for key, value in problem.items() if key not in ("costs", "prefetch_bytes")},
    )
    return Prediction(**step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What an engine is given."""

    device_bytes: int
    """``device_memory``."""
    host_bytes: int
    """``host_memory``."""
    margin_use_ratio: float = 0.8
    """``client.mem_tracer.margin_use_ratio``."""
    hybrid_adam: bool = True
    """``optimizer.params.use_hybrid_adam``."""
    speculation: Speculation = Speculation.AUTO
    """``optimizer.speculation``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What becomes of one chunk size."""

    chunk_numel: int
    """Elements."""
    plan: Plan
    """Its plan."""
    num_device_state_chunks: int
    """Chunks with optimizer states on the device."""
    num_speculated_chunks: int
    """Chunks whose updates start during backward."""
    host_bytes: int
    """Parameters and optimizer states on the host."""
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


def predict_case(uses: StepUses, layout: _C.Layout, machine: Machine, setting: Setting) -> Case:
    """What an engine on CUDA does with this layout: see csrc/runtime/residency.cpp.

    Raises:
        MemoryBudgetError: it does not fit; the message says by how much.
    """
    chunks = [layout.chunk(index) for index in range(layout.num_chunks)]
    homes = [_home_bytes(chunk) for chunk in chunks]
    largest_grad = max(_grad_bytes(chunk) for chunk in chunks)
    budget = _C.DeviceBudget()
    budget.limit_bytes = int(setting.device_bytes * (1 - _CUDA_SLACK))
    budget.margin_use_ratio = setting.margin_use_ratio
    nowhere = [False] * len(chunks)
    all_on_host = make_timeline(uses, layout, nowhere).moments
    least_limit = _C.make_plan(all_on_host, **_C.pose_problem(layout, all_on_host, nowhere, budget))[
        "least_limit_bytes"
    ]
    least = int(least_limit / (1 - _CUDA_SLACK)) + 1
    if least > setting.device_bytes:
        raise _C.MemoryBudgetError(
            f"gpu-mem is {setting.device_bytes} bytes, but activations and the largest moment's chunks take {least}; "
            "give at least that, or a smaller batch, a shorter length or --checkpointing"
        )
    on_device = _place(layout, all_on_host, largest_grad, budget, setting)
    timed = make_timeline(uses, layout, on_device)
    plan = make_step_plan(layout, timed.moments, on_device, _C.pose_problem(layout, timed.moments, on_device, budget))
    if plan.least_limit_bytes > budget.limit_bytes:
        raise _C.MemoryBudgetError(
            f"cpu-mem is {setting.host_bytes} bytes, which leaves so many optimizer states to the GPU that a step "
            f"needs {plan.least_limit_bytes} bytes there; raise cpu-mem to {sum(homes) + largest_grad}, or gpu-mem"
        )
    host_bytes = sum(home for home, at in zip(homes, on_device, strict=True) if not at)
    room = setting.host_bytes - host_bytes - _RESERVED_GRADIENTS * largest_grad
    first_late = {Speculation.COMMIT: len(chunks), Speculation.NEVER: 0}.get(
        setting.speculation, _first_without_room(plan, homes, room)
    )
    return Case(
        chunk_numel=layout.chunk_numel,
        plan=plan,
        num_device_state_chunks=sum(on_device),
        num_speculated_chunks=sum(c.trainable and not c.states_on_device for c in plan.chunks[:first_late]),
        host_bytes=host_bytes,
        least_device_bytes=least,
        least_host_bytes=sum(homes) + largest_grad,
        waste_bytes=timed.waste_bytes,
        step=predict(plan, timed.seconds, machine.rates(), num_speculated_chunks=first_late),
        clipped_step=predict(plan, timed.seconds, machine.rates(), num_speculated_chunks=0),
    )


def _place(
    layout: _C.Layout,
    moments: list[dict[str, Any]],
    largest_grad: int,
    budget: _C.DeviceBudget,
    setting: Setting,
) -> list[bool]:
    """By chunk, whether its states are on the device: those that the host cannot hold, then those of the margin."""
    room = int(setting.device_bytes * _INITIAL_DEVICE_SHARE)
    on_device = _C.initial_placement(layout, setting.host_bytes - largest_grad, room)
    count = _C.num_device_state_chunks(layout, moments, budget) if setting.hybrid_adam else 0
    return [at or (i < count and layout.chunk(i)["trainable"]) for i, at in enumerate(on_device)]


def _first_without_room(plan: Plan, homes: Sequence[int], room: int) -> int:
    """The first chunk whose new values find no host memory: those before it are updated during backward
    (csrc/runtime/speculation.cpp).
    """
    for index, (chunk, home) in enumerate(zip(plan.chunks, homes, strict=True)):
        room -= home if chunk.trainable and not chunk.states_on_device else 0
        if room < 0:
            return index
    return len(plan.chunks)


def _grad_bytes(chunk: Mapping) -> int:
    return chunk["numel"] * itemsize(chunk)


def _home_bytes(chunk: Mapping) -> int:
    return chunk["numel"] * (itemsize(chunk) + (12 if chunk["trainable"] else 0))
