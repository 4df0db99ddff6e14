"""Builds the parts of a session once its parameters are in chunks: hooks, forwards, backwards, gradients, profiler."""

from __future__ import annotations

import dataclasses

import torch

from patrickstar.activations.offloaders import ActivationOffloader, activation_offloader
from patrickstar.activations.remedies import ActivationRemedies, change_activations
from patrickstar.config import rule_of
from patrickstar.experts.hit_rows import HitRows
from patrickstar.module.adoption import MovedRest
from patrickstar.module.compiled.units import CompiledUnits
from patrickstar.module.converted_module import ConvertedModule
from patrickstar.module.first_rank_values import share_rest
from patrickstar.module.fp8_experts import exclusion_of_experts
from patrickstar.module.fp8_layers import Fp8Layers
from patrickstar.module.hooks import ModuleHooks
from patrickstar.module.managed import ManagedParams
from patrickstar.module.param_states import ParamStates
from patrickstar.parallel.axes import make_calls
from patrickstar.parallel.calls import Calls
from patrickstar.profiling import make_profiler
from patrickstar.session.backwards import Backwards
from patrickstar.session.core_setup import current_program
from patrickstar.session.error_texts import explain_lack_of_memory
from patrickstar.session.forward_attempt import RepeatableForwards
from patrickstar.session.forwards import Forwards, InputsInPlace
from patrickstar.session.gradient_reads import GradientReads
from patrickstar.session.kept_plan import make_kept_plan
from patrickstar.session.parts import Parts
from patrickstar.session.quiet_log import PressureLog
from patrickstar.session.rank_sync import AgreedOptions, BufferSync
from patrickstar.session.recompute_choice import NoRecomputeChoice, make_recompute_choice
from patrickstar.session.session import Session
from patrickstar.session.step_gradients import StepGradients
from patrickstar.session.step_loop import StepLoop
from patrickstar.session.teardown import Teardown
from patrickstar.session.trained_params import TrainedParams


def build_parts(session: Session, undo: Teardown, largest_module_bytes: int) -> Parts:
    """Builds all parts, in the order in which they change the module. Collective over all ranks.

    Args:
        session: with a core, and all parameters in chunks.
        undo: receives the callbacks that remove the parts from the module.
        largest_module_bytes: device bytes of the largest module's chunks and their gradients.
    """
    runtime, ranks, config = session.runtime, session.ranks, session.config
    running = _make_running(session, undo, largest_module_bytes)
    converted = _convert(session, undo, running)
    reads = _make_reads(session, running, converted)
    profiler = make_profiler(
        runtime,
        config.profile,
        session.chunk_layers,
        lambda: current_program(runtime, session.layout),
        ranks.context.rank,
        len(ranks.members),
    )
    if profiler is not None:
        undo.callback(profiler.close)
    kept_plan = make_kept_plan(
        session.module,
        session.plan_of_params,
        config,
        ranks,
        runtime,
        session.layout,
        running.choice,
        lambda: converted.compiled.names,
    )
    ends_of_step = [converted.end_step, converted.trained.end_step, PressureLog(runtime).end_step, kept_plan.end_step]
    if profiler is not None:
        ends_of_step.append(profiler.end_step)
    return Parts(
        buffers=running.buffers,
        managed=running.managed,
        calls=running.calls,
        forwards=running.forwards,
        gradients=converted.gradients,
        states=converted.states,
        compiled=converted.compiled,
        trained=converted.trained,
        gradient_reads=reads,
        agreed_options=AgreedOptions(ranks),
        backwards=Backwards(
            runtime,
            session.observer,
            running.managed,
            converted.trained,
            converted.gradients,
            reads,
            running.activations,
            profiler,
        ),
        kept_plan=kept_plan,
        checkpoint_calls=running.activations.calls,
        recompute_choice=running.choice,
        fp8=running.fp8,
        ends_of_step=ends_of_step,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Running:
    """The parts that run forwards."""

    buffers: BufferSync
    managed: ManagedParams
    calls: Calls
    activations: ActivationOffloader
    choice: NoRecomputeChoice
    forwards: Forwards
    fp8: Fp8Layers | None


def _make_running(session: Session, undo: Teardown, largest_module_bytes: int) -> _Running:
    module, plan, config = session.module, session.plan_of_params, session.config
    runtime, observer, ranks, device = session.runtime, session.observer, session.ranks, session.device
    rest = MovedRest(module, plan, config.compute_dtype, device)
    undo.callback(rest.restore)
    share_rest(ranks, module, plan)
    repeatable = RepeatableForwards(module, plan.managed, observer, device, len(ranks.members))
    buffers = BufferSync(ranks, module)
    managed = ManagedParams(module, plan.managed, config.compute_dtype, device)
    undo.callback(managed.remove)
    remedies = ActivationRemedies(module, config)
    changed = change_activations(module, config.activations, len(ranks.members))
    undo.callback(changed.close)
    fp8 = None if config.fp8 is None else Fp8Layers(module, config.fp8, exclusion_of_experts(device))
    if fp8 is not None:
        undo.callback(fp8.restore)
    meet, num_steps = runtime.meet_ranks, lambda: session.num_steps
    calls = make_calls(module, config, session.mesh, session.matrices, meet, num_steps, session.survey)
    undo.callback(calls.close)
    activations = activation_offloader(module, config.activations, runtime, device, largest_module_bytes)
    undo.callback(activations.finish)

    choice = make_recompute_choice(module, config, runtime, session.layout, activations.calls, ranks, device)

    def explain(error: torch.OutOfMemoryError, once: str) -> None:
        explain_lack_of_memory(error, module, runtime.report(), remedies.texts(), once)

    return _Running(
        buffers=buffers,
        managed=managed,
        calls=calls,
        activations=activations,
        choice=choice,
        forwards=Forwards(
            runtime,
            observer,
            session.thread,
            repeatable,
            calls,
            activations,
            choice.give_up,
            explain,
            InputsInPlace(device, config.compute_dtype),
        ),
        fp8=fp8,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Converted:
    """The converted module, and its gradients and states."""

    gradients: StepGradients
    states: ParamStates
    hooks: ModuleHooks
    compiled: CompiledUnits
    trained: TrainedParams

    def end_step(self) -> None:
        """Ends the hooks' learning after the first step, which shows the parameters that each module uses."""
        if self.hooks.is_learning:
            self.hooks.finish_learning(self.trained.got_gradient() | self.trained.untrained_at_first)


def _convert(session: Session, undo: Teardown, running: _Running) -> _Converted:
    module, plan, config = session.module, session.plan_of_params, session.config
    runtime, observer, matrices, managed = session.runtime, session.observer, session.matrices, running.managed
    gradients = StepGradients(
        runtime,
        managed,
        session.chunk_ranks,
        config,
        left_out=matrices.left_out(plan),
        total=matrices.total,
        loss_scale=lambda: session.loss_scale,
    )
    states = ParamStates(
        runtime, observer, managed, session.guard, gradients.chunk_factor, rule_of(config.optimizer.type).states
    )
    hit_rows = HitRows(runtime, module)
    undo.callback(hit_rows.close)
    hooks = ModuleHooks(module, observer, hit_rows.conditional_hook)
    undo.callback(hooks.remove)
    compiled = CompiledUnits(module, hooks, observer)
    undo.callback(compiled.restore)
    loop = StepLoop(session)
    converted = ConvertedModule(
        module,
        call=lambda run, args, kwargs: running.forwards.call(run, args, kwargs, loop.forward),
        note_caller=compiled.note_caller,
        zero_grad=loop.zero_grad,
        compile=loop.compile,
        read_value=states.user_value,
        load_exactly=observer.overwritten.exactly,
    )
    undo.callback(converted.restore)
    trained = TrainedParams(
        plan, session.layout, runtime, managed, session.ranks, lambda: session.optimizer.read_groups()
    )
    undo.callback(trained.remove)
    trained.attach()
    return _Converted(gradients=gradients, states=states, hooks=hooks, compiled=compiled, trained=trained)


def _make_reads(session: Session, running: _Running, converted: _Converted) -> GradientReads:
    def prepare() -> float:
        session.grad_norm()
        return converted.gradients.scale / converted.gradients.asked_factor()

    return GradientReads(
        session.module,
        session.observer,
        converted.states,
        running.managed,
        prepare,
        lambda: running.forwards.is_running,
        converted.trained.got_gradient,
        session.config.optimizer.speculation,
        session.retained_gradients,
    )
