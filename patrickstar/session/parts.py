"""``Parts``: what one session runs in the user's module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from patrickstar.activations.checkpoint_calls import CheckpointCalls
from patrickstar.module.compiled.units import CompiledUnits
from patrickstar.module.fp8_layers import Fp8Layers
from patrickstar.module.managed import ManagedParams
from patrickstar.module.param_states import ParamStates
from patrickstar.parallel.calls import Calls
from patrickstar.session.backwards import Backwards
from patrickstar.session.forwards import Forwards
from patrickstar.session.gradient_reads import GradientReads
from patrickstar.session.kept_plan import NoKeptPlan
from patrickstar.session.rank_sync import AgreedOptions, BufferSync
from patrickstar.session.recompute_choice import NoRecomputeChoice
from patrickstar.session.step_gradients import StepGradients
from patrickstar.session.trained_params import TrainedParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of one session, until it closes or its ranks change. Built by ``session_parts.build_parts``."""

    buffers: BufferSync
    managed: ManagedParams
    calls: Calls
    forwards: Forwards
    gradients: StepGradients
    states: ParamStates
    compiled: CompiledUnits
    trained: TrainedParams
    gradient_reads: GradientReads
    agreed_options: AgreedOptions
    backwards: Backwards
    kept_plan: NoKeptPlan
    checkpoint_calls: CheckpointCalls
    recompute_choice: NoRecomputeChoice
    fp8: Fp8Layers | None
    """None: ``fp8`` is off."""
    ends_of_step: list[Callable[[], None]]
    """Called after each step, in this order."""
