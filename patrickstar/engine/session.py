"""One engine's live state: the core, the hooks on the user's module, the loss scaler, and the order of a step.

The engine and the optimizer are thin faces of it. It ends with ``close``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from patrickstar import _C
from patrickstar.config import Config, Speculation, make_loss_scaler, rule_of
from patrickstar.engine.activation_keepers import keeper_of_activations
from patrickstar.engine.activations import ActivationRemedies, change_activations, check_activations
from patrickstar.engine.axes import make_calls
from patrickstar.engine.calls import Calls, OwnCalls
from patrickstar.engine.closing import lack_of_room_to_close
from patrickstar.engine.core_setup import build_core, current_plan
from patrickstar.engine.divided_matrices import Matrices
from patrickstar.engine.error_texts import explain_lack_of_memory, first_sentence
from patrickstar.engine.forward_attempt import ForwardAttempt, RepeatableForwards
from patrickstar.engine.gradient_reads import GradientReads
from patrickstar.engine.interrupts import deferred_signals
from patrickstar.engine.joint_backward import run_backward
from patrickstar.engine.kept_plan import Inputs, NoKeptPlan, adopt_plan, make_kept_plan
from patrickstar.engine.losses import check_loss, has_forwards_in_backward, no_gradients_came
from patrickstar.engine.notebook import running_statement
from patrickstar.engine.one_thread import OneThread
from patrickstar.engine.open_session import note_open_session
from patrickstar.engine.optimizer_step import Decision, OptimizerStep, StepOutcome
from patrickstar.engine.rank_sync import BufferSync
from patrickstar.engine.run_log import NoRunLog
from patrickstar.engine.step_gradients import StepGradients
from patrickstar.engine.teardown import Teardown
from patrickstar.engine.trained_params import TrainedParams
from patrickstar.engine.wholeness import State, Wholeness
from patrickstar.machine.allocator import ExpandableSegments
from patrickstar.machine.budgets import Budgets
from patrickstar.module.adoption import AdoptedParams, FormerHandle, MovedRest
from patrickstar.module.compiled.dynamo import Compiler, check_no_compiled_autograd, outside_of_graphs
from patrickstar.module.compiled.units import CompiledUnits, check_compiled
from patrickstar.module.converted_module import ConvertedModule
from patrickstar.module.first_rank_values import share_rest
from patrickstar.module.hooks import ModuleHooks
from patrickstar.module.managed import ManagedParams
from patrickstar.module.materialize import DeferredInit
from patrickstar.module.observer import Observer
from patrickstar.module.param_states import ParamStates
from patrickstar.module.preprocess import SortedParams, plan_params
from patrickstar.module.quantization import is_quantized
from patrickstar.optimizer.core_options import CoreOptions
from patrickstar.planning.step_plan import Plan
from patrickstar.profiling import ChunkLayers, make_profiler
from patrickstar.ranks.chunk_ranks import ChunkRanks
from patrickstar.ranks.mesh import MeshRanks
from patrickstar.sequence.survey import Survey

logger = logging.getLogger("patrickstar")


_SHARED_FORWARD = (
    "The forward was not run again with an emptier device, as one of a rank's own is: the ranks that share it wait for "
    "each other in the middle of it. More ranks that share matrices (tensor_parallel) or sequences (sequence_parallel) "
    "have less each."
)


class Inside(enum.Enum):
    """The call of a session that runs now."""

    NOTHING = "nothing"
    FORWARD = "a forward"
    BACKWARD = "a backward"


class Stage(enum.Enum):
    """Where in a step the session is."""

    IDLE = "before the first forward of a step"
    FORWARDED = "after a forward, before its backward"
    BACKWARDED = "after a backward, before the step"


@dataclasses.dataclass(frozen=True)
class Vacated:
    """What is left of a session between two cores."""

    params: list[FormerHandle]
    """What parameters in chunks were, by id."""
    memory: _C.KeptRegions
    """Of the host, that the former core had, for the next one; given back to the system when nobody has it."""
    segments: ExpandableSegments
    """The allocator's mode, until the next core has it: what PyTorch's cache holds stays there."""


class Session:
    """See the module's docstring.

    Args:
        module: the user's.
        config: checked.
        mesh: the ranks that train together.
        chunk_ranks: of them, those that share chunks with this one.
        matrices: which part of each matrix ``module`` has.
        budgets: of memory.
        in_groups: the parameters that the optimizer has at first; gradients of others are dropped, and their values
            stay.

    Raises:
        MemoryBudgetError: the model cannot fit the budgets.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        mesh: MeshRanks,
        chunk_ranks: ChunkRanks,
        matrices: Matrices,
        budgets: Budgets,
        in_groups: Collection[nn.Parameter],
    ):
        """Nothing of ``module`` is changed yet: :meth:`adopt` and :meth:`complete` follow. Whatever fails from here on,
        :meth:`abandon` makes the module an ordinary one again.
        """
        check_compiled(module)
        check_activations(module, config.activations)
        if matrices.names is not None and is_quantized(module, config.quantization):
            raise ValueError(
                "quantization is not supported with tensor_parallel: blocks of matrices keep the compute dtype; leave "
                "out one of them"
            )
        self.module = module
        self.config = config
        self.mesh = mesh
        self.ranks = mesh.everybody
        self.chunk_ranks = chunk_ranks
        self.matrices = matrices
        self.device = self.ranks.context.device
        self.scaler = make_loss_scaler(config)
        self.outcome = StepOutcome()
        self.stage = Stage.IDLE
        self.closed = False
        self.survey = Survey()
        """Findings about the module, made before it was rewritten."""
        self.whole = Wholeness()
        self._step = OptimizerStep(self)
        self._thread = OneThread()
        self._thread_of_step = 0  # the one whose forward or backward was the last
        self.expected_options: Callable[[], list[CoreOptions]] = list
        """The options that the next step is expected to use (none: not known)."""
        self.read_groups: Callable[[], list[dict[str, Any]]] = list
        """Gives the optimizer's groups; a host may put another list in their place."""
        self.tell_groups: Callable[[], None] = lambda: None
        """Tells the core, and what stays with PyTorch, which parameter is in which of the optimizer's groups."""
        self.num_steps = 0
        """Optimizer steps so far, skipped ones too."""
        self.plan_of_params = plan_params(
            module,
            config.compute_dtype,
            use_cpu_embedding=config.use_cpu_embedding,
            in_groups=in_groups,
            quantization=config.quantization,
        )
        self.num_parameters = matrices.num_elements(module.parameters())
        self._own_params = self.plan_of_params.all
        self._open_core(budgets, None)
        self._params: AdoptedParams | None = None
        self._inside = Inside.NOTHING
        self._retained_gradients: set[int] = set()
        self._gradient_scale: float | None = None  # that of the gradients since the last step; None: there are none
        self._num_pressure_evictions = 0
        self._kept_plan = NoKeptPlan()
        self.calls: Calls = OwnCalls()
        """How ranks share calls of the module."""
        self.made_by = running_statement()
        """The statement of a notebook's cell."""
        self.keeps_ranks: str | None = None
        """Why its ranks cannot change, and what to do instead, where the host that made it says so."""
        self.face: Callable[[], Any] | None = None
        """Gives the engine that was made of this session, as long as somebody has it; None before it is made."""
        self.run_log: NoRunLog = NoRunLog()
        """What the log says of forwards, backwards and steps."""
        note_open_session(self)

    def _open_core(self, budgets: Budgets, chunk_numel: int | None, kept_memory: _C.KeptRegions | None = None) -> None:
        core = build_core(
            self.module,
            self.plan_of_params,
            self.config,
            self.ranks.context,
            self.chunk_ranks,
            budgets,
            chunk_numel,
            kept_memory,
        )
        self._teardown = Teardown()
        self._teardown.callback(self.matrices.close)
        self._segments = core.segments
        self._teardown.callback(core.segments.close)
        self._teardown.callback(core.runtime.close)
        self.layout, self.runtime, self.chunk_numel = core.layout, core.runtime, core.chunk_numel
        self._largest_module_bytes = core.largest_module_bytes
        self.observer = Observer(self.runtime)

    def params_now(self) -> SortedParams:
        """The module's parameters, with which of them are trained by now ([Note: unfreezing])."""
        chunked = [
            dataclasses.replace(spec, trained=spec.param._patrickstar.trainable) for spec in self.plan_of_params.chunked
        ]
        return dataclasses.replace(self.plan_of_params, chunked=chunked, managed=self.managed.params)

    def vacate(self, set_aside: Callable[[], _C.KeptRegions]) -> Vacated:
        """Closes the core and what depends on the present ranks; the module's parameters have no memory then. For
        :meth:`reopen` with others. All ranks must call it. ``set_aside`` is called last before that, and gives what
        memory of the core the next one may use.
        """
        self._kept_plan.close()
        self.plan_of_params = self.params_now()
        assert self._params is not None  # complete
        memory = set_aside()
        former = self._params.vacate()
        segments = self._segments.keep()
        self._teardown.close()
        self.ranks.close()
        return Vacated(former, memory, segments)

    def reopen(
        self,
        mesh: MeshRanks,
        chunk_ranks: ChunkRanks,
        matrices: Matrices,
        budgets: Budgets,
        chunk_numel: int,
        vacated: Vacated,
        expect: Callable[[], None],
        fill: Callable[[], None],
    ) -> None:
        """After :meth:`vacate`, with other ranks, all of which call it. ``expect`` tells the new core of the step to
        come, so that states have their places before they come, and ``fill`` writes the values of all parameters.
        """
        self.mesh, self.ranks, self.chunk_ranks, self.matrices = mesh, mesh.everybody, chunk_ranks, matrices
        self._open_core(budgets, chunk_numel, vacated.memory)
        vacated.segments.close()
        expect()
        self.adopt(None).take_over(vacated.params, fill)
        self.complete(None)
        self.stage, self._gradient_scale = Stage.IDLE, None
        self.tell_groups()
        self.run_log = self.run_log if self.ranks.context.rank == 0 else NoRunLog()
        self.run_log.change_ranks()

    def check_plan(self, saved: Plan | None) -> None:
        """Raises ValueError when the plan to begin with is for other chunks."""
        if saved is not None:
            saved.check_layout(self.layout, str(self.config.plan))

    def adopt(self, deferred: DeferredInit | None) -> AdoptedParams:
        """The module's parameters, to be moved into chunks."""
        self._params = AdoptedParams(
            self.plan_of_params, self.layout, self.runtime, self.observer, self.device, deferred
        )
        self._teardown.callback(self._params.release)
        return self._params

    def complete(self, saved_plan: Plan | None) -> None:
        """When all parameters are in chunks: from now on the module is used in place.

        Args:
            saved_plan: the one to begin with, the same on all ranks; None: that of an earlier run like this one, if it
                was kept.
        """
        module, plan = self.module, self.plan_of_params
        rest = MovedRest(module, plan, self.config.compute_dtype, self.device)
        self._teardown.callback(rest.restore)
        share_rest(self.ranks, module, plan)
        self._forwards = RepeatableForwards(module, plan.managed, self.observer, self.device, len(self.ranks.members))
        self._buffer_sync = BufferSync(self.ranks, module)
        self.managed = ManagedParams(module, plan.managed, self.config.compute_dtype, self.device)
        self._teardown.callback(self.managed.remove)
        self._remedies = ActivationRemedies(module, self.config)
        changed = change_activations(module, self.config.activations, len(self.ranks.members))
        self._teardown.callback(changed.close)
        self.calls = make_calls(
            module, self.config, self.mesh, self.matrices, self.runtime.meet_ranks, lambda: self.num_steps, self.survey
        )
        self._teardown.callback(self.calls.close)
        self._activations = keeper_of_activations(
            module, self.config.activations, self.runtime, self.device, self._largest_module_bytes
        )
        self._teardown.callback(self._activations.finish)
        self.gradients = StepGradients(
            self.runtime,
            self.managed,
            self.chunk_ranks,
            self.config,
            left_out=self.matrices.left_out(plan),
            total=self.matrices.total,
        )
        self.states = ParamStates(
            self.runtime,
            self.observer,
            self.managed,
            self.guard,
            self.gradients.chunk_factor,
            rule_of(self.config.optimizer.type).states,
        )
        self._hooks = ModuleHooks(module, self.observer)
        self._teardown.callback(self._hooks.remove)
        self.compiled = CompiledUnits(module, self._hooks, self.observer)
        self._teardown.callback(self.compiled.restore)
        self._converted = ConvertedModule(
            module,
            call=self.call,
            note_caller=self.compiled.note_caller,
            zero_grad=self.zero_grad,
            compile=self.compile,
            read_value=self.states.user_value,
            load_exactly=self.observer.overwritten.exactly,
        )
        self._teardown.callback(self._converted.restore)
        self._trained = TrainedParams(
            plan, self.layout, self.runtime, self.managed, self.ranks, lambda: self.param_groups
        )
        self._teardown.callback(self._trained.remove)
        self._trained.attach()
        self.gradient_reads = GradientReads(
            module,
            self.observer,
            self.states,
            self.managed,
            self._prepare_to_read_gradients,
            lambda: self._inside is not Inside.NOTHING,
            self._trained.got_gradient,
            self.config.optimizer.speculation,
            self._retained_gradients,
        )
        self._profiler = make_profiler(
            self.runtime,
            self.config.profile,
            self.chunk_layers,
            self.ranks.context.rank,
            len(self.ranks.members),
        )
        if self._profiler is not None:
            self._teardown.callback(self._profiler.close)
        self._kept_plan = make_kept_plan(module, plan, self.config, self.ranks, self.runtime, self.layout)
        if saved_plan is not None:
            adopt_plan(self.runtime, saved_plan)

    @property
    def quantized(self) -> set[int]:
        """Ids of the parameters that are stored in fewer bits."""
        specs = enumerate(self.plan_of_params.chunked)
        return {index for index, spec in specs if spec.quantization is not _C.QuantType.NONE}

    def has_param(self, param: nn.Parameter) -> bool:
        """Whether it is one of the module's parameters that this engine has."""
        return param in self._own_params

    @property
    def chunk_layers(self) -> ChunkLayers:
        """Which layers of the module lie in which chunk."""
        params = self.plan_of_params.chunked
        chunks = (self.layout.chunk(chunk)["params"] for chunk in range(self.layout.num_chunks))
        return ChunkLayers([[params[param].name for param in chunk] for chunk in chunks])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's, as they are now."""
        return self.read_groups()

    @contextlib.contextmanager
    def guard(self, call: str) -> Iterator[None]:
        """Around a call in which one thread of each rank takes part
        (:meth:`patrickstar.ranks.distributed.RankGroups.guard`).
        """
        call = f"{call} of step {self.num_steps + 1}"
        with self._thread.hold(call), self.ranks.guard(call):
            yield

    # Forward and backward.

    def call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call ``run`` of a module that holds all parameters: a forward, but within one ([Note: calls in place]).

        Tensors in tuples, lists and dicts are moved to the device, floating point ones cast to the compute dtype. That
        is part of the forward: one whose inputs found no room is run again with an emptier device.
        """
        if self._inside is not Inside.NOTHING:
            self._thread.check_inside()
        if self._inside is Inside.FORWARD:
            with self.calls.call(args, kwargs) as call:
                return call.result(run(*call.args, **call.kwargs))

        def forward() -> Any:
            with self.calls.call(args, kwargs) as call:
                mine = (call.args, call.kwargs)
                inputs = tree_map_only(torch.Tensor, self._to_compute, mine, is_leaf=_is_no_plain_container)
                return call.result(run(*inputs[0], **inputs[1]))

        # In a backward it is a recomputation, or a forward that a hook makes ([Note: forwards in backward]).
        return forward() if self._inside is Inside.BACKWARD else self.forward(forward, (args, kwargs))

    def _to_compute(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self.config.compute_dtype
        cast = tensor.is_floating_point() and tensor.dtype != dtype and dtype != torch.float32
        return tensor.to(self.device, dtype if cast else tensor.dtype, non_blocking=True)

    def compile(self, module: nn.Module, compiler: Compiler) -> None:
        """Compiles ``module``, of those inside, from its next call on."""
        self.check_open()
        if self._inside is not Inside.NOTHING:
            raise _C.StateError("compile() was called within a forward or a backward; call it between them")
        self.compiled.compile(module, compiler)

    @outside_of_graphs
    def forward(self, call: Callable[[], Any], inputs: Inputs | None = None) -> Any:
        """Runs ``call``, one forward of the module; again with an emptier device where memory ran out, for which ranks
        that replay a plan leave it until the step is over. ``inputs``: what the module is called with, where that is
        known.
        """
        self.check_whole()
        training = self._is_training()
        kind = "forward" if training else "evaluation forward"
        with deferred_signals() as signals:
            if training:
                self.gradient_reads.forget()
                self._trained.follow(lambda: self.guard(kind))
            with self.guard(kind):
                if training:
                    self._buffer_sync.run()
                    self._kept_plan.begin_forward(inputs)
                attempt = self._forwards.begin()
                result = self._repeat(call, signals, attempt)
                self._forwards.end(attempt)
                if training:
                    self.run_log.note_forward(inputs)
                return result

    def train_unfrozen(self) -> None:
        """Trains parameters that require grad and are in a group by now, which the next training forward would do
        ([Note: unfreezing]). With several ranks all must call it.

        Raises:
            MemoryBudgetError: there is no room for their states; nothing is changed then.
            DisagreementError: ranks came to different ones; nothing is changed then.
        """
        self.check_open()
        with deferred_signals():
            self._trained.follow(lambda: self.guard("unfreezing"))

    def _repeat(self, call: Callable[[], Any], signals: deferred_signals, start: ForwardAttempt) -> Any:
        attempt = _C.Attempt.FIRST
        try:
            if not self.calls.repeats_forwards:
                return self._forward(call, signals, _C.Attempt.ONLY)
            for what in (_C.Vacate.VALUES, _C.Vacate.EVERYTHING):
                try:
                    return self._forward(call, signals, attempt)
                except torch.OutOfMemoryError as error:
                    if obstacle := start.obstacle():
                        self._explain_lack_of_memory(error, obstacle)
                        raise
                    # The error itself is let go of: its traceback keeps the activations alive.
                    logger.warning(
                        "%s; the forward is run again with what can leave the device pushed off", first_sentence(error)
                    )
                start.rewind()
                self._activations.forget()
                self.runtime.undo_forward()
                start.undo_writes()
                self.runtime.vacate_device(what)
                attempt = _C.Attempt.AGAIN
            return self._forward(call, signals, _C.Attempt.LAST)
        except BaseException:
            self.runtime.abort_forward()
            self._forwards.abandon()
            raise

    def _forward(self, call: Callable[[], Any], signals: deferred_signals, attempt: _C.Attempt) -> Any:
        training = self._is_training()
        self.runtime.begin_forward(_C.Tracking.TRAINING if training else _C.Tracking.UNTRACKED, attempt)
        self._inside = Inside.FORWARD
        try:
            with signals.allowed(), self._activations.keeping() if training else contextlib.nullcontext():
                result = call()
            self.runtime.end_forward()
        except BaseException as error:
            if isinstance(error, torch.OutOfMemoryError) and attempt in (_C.Attempt.LAST, _C.Attempt.ONLY):
                self._explain_lack_of_memory(error, _SHARED_FORWARD if attempt == _C.Attempt.ONLY else "")
            self.observer.uses.forget_scopes()
            raise
        finally:
            self._inside = Inside.NOTHING
        if training:
            self._note_stage(Stage.FORWARDED)
        return result

    def _explain_lack_of_memory(self, error: torch.OutOfMemoryError, once: str) -> None:
        explain_lack_of_memory(error, self.module, self.runtime.report(), self._remedies.texts(), once)

    def _is_training(self) -> bool:
        # Not by the module's mode: a model from from_pretrained is in evaluation mode, and may be trained so.
        return torch.is_grad_enabled()

    @outside_of_graphs
    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Scales ``loss`` and runs its backward ([Note: joint backward]); gradients end up in chunks."""
        self.check_whole()
        comes_first = self.stage is not Stage.FORWARDED and has_forwards_in_backward(loss, self.has_param)
        check_loss(loss, has_forward=comes_first or self.stage is not Stage.IDLE)
        check_no_compiled_autograd()
        if comes_first:  # [Note: forwards in backward]
            self.forward(lambda: None)
        run_backward(self, loss, kwargs)
        if comes_first and not (self.runtime.keep_joint_backward() or self.managed.has_gradients):
            self._forget_gradients()
            raise no_gradients_came()
        self.run_log.note_backward(loss)

    @property
    def is_in_step_here(self) -> bool:
        """True between a forward and its step, where this thread made the last call."""
        return self.stage is not Stage.IDLE and self._thread_of_step == threading.get_ident()

    def check_scale(self, scale: float) -> None:
        """Raises StateError when gradients since the last step were scaled by another loss scale."""
        if self._gradient_scale not in (None, scale):
            raise _C.StateError(
                f"gradients were scaled by {self._gradient_scale:g} so far and would be by {scale:g} in this backward "
                "(float16: each engine has a loss scale of its own); step or zero_grad between them, or train in bf16"
            )

    def begin_backward(self, scale: float, expected_options: list[CoreOptions]) -> None:
        """Autograd's gradients are taken from now on, until :meth:`end_backward` or :meth:`abort_backward`. Where it
        raises, nothing has begun.
        """
        if self._profiler is not None:
            self._profiler.begin_backward()
        self.gradients.forget()
        self.gradient_reads.forget()
        self._trained.drop_left_gradients()
        self.managed.keep_gradients()
        if self.config.optimizer.speculation is Speculation.COMMIT:
            self.observer.overwritten.forget()
        try:
            self.runtime.begin_backward(expected_options, self.gradients.chunk_factor / scale)
        except BaseException:
            self.managed.restore_gradients()
            raise
        self._inside = Inside.BACKWARD

    def end_backward(self) -> None:
        """Autograd is done."""
        self.runtime.end_backward()
        self._activations.end_backward()
        self._inside = Inside.NOTHING

    def keep_backward(self, scale: float) -> None:
        """Its gradients, which were scaled by ``scale``, are there for the step."""
        self._gradient_scale = scale
        self._note_stage(Stage.BACKWARDED)

    def abort_backward(self) -> int:
        """Undoes a backward that failed. Chunks that were updated for good stay so; their number is returned."""
        self._inside = Inside.NOTHING
        self.observer.uses.forget_scopes()
        try:
            num_committed = self.runtime.abort_backward()
        finally:
            self._activations.finish()
            self._trained.drop_left_gradients()
            self.managed.restore_gradients()
        if num_committed > 0:
            self.whole.break_up(
                f"a backward failed when {num_committed} chunks had been updated (optimizer.speculation is "
                '"commit"): the model is updated in part'
            )
        return num_committed

    def _note_stage(self, stage: Stage) -> None:
        self.stage, self._thread_of_step = stage, threading.get_ident()

    # The step.

    @property
    def loss_scale(self) -> float:
        """What the loss of the next backward is multiplied by; 1 without float16."""
        return self.scaler.scale if self.scaler is not None else 1.0

    @property
    def gradient_scale(self) -> float:
        """The loss scale of the gradients since the last step: that of the engine whose backward made them."""
        return self.loss_scale if self._gradient_scale is None else self._gradient_scale

    def grad_norm(self) -> float:
        """Global L2 norm of the gradients since the last step, before clipping; NaN when one is not finite.

        Raises:
            StateError: there are none.
        """
        self.check_open()
        if not self.runtime.gradients_pending():
            raise _C.StateError("the norm of gradients was asked for, but there are none; call backward first")
        with deferred_signals(), self.guard("the norm of all gradients"):
            return self.gradients.norm(self.gradient_scale)

    def _prepare_to_read_gradients(self) -> float:
        self.grad_norm()
        return self.gradient_scale

    def step(self, param_groups: list[dict[str, Any]], options: list[CoreOptions]) -> None:
        """One optimizer step: managed parameters with ``param_groups``, chunks with the same as ``options``
        ([Note: a step that fails]). A signal that comes meanwhile is delivered when the step is over.
        """
        self.check_open()
        self.whole.check_step()
        with deferred_signals(), self.guard("step"):
            decision = self._step.run(param_groups, options)
            if decision is not None:
                self._end_step(decision)

    def _end_step(self, decision: Decision) -> None:
        self.outcome = decision.outcome
        if not decision.outcome.applied:
            if self.scaler is None:
                logger.warning("the gradients are not finite: this step is skipped, nothing was updated")
            elif self.scaler.is_at_minimum:
                logger.warning(
                    "gradients overflow at the least loss scale, %g: this step is skipped", decision.loss_scale
                )
        if self.scaler is not None:
            self.scaler.update(overflow=not decision.is_finite)
        self.num_steps += 1
        self._gradient_scale = None
        self.gradients.end_step()
        self.stage = Stage.IDLE
        if self._hooks.is_learning:
            self._hooks.finish_learning(self._trained.got_gradient() | self._trained.untrained_at_first)
        self._log_pressure()
        self._kept_plan.end_step()
        if self._profiler is not None:
            self._profiler.end_step()
        self.run_log.end_step(decision.param_groups[0]["lr"])

    def _forget_gradients(self) -> None:
        self._gradient_scale = None
        self.gradients.end_step()
        self.gradient_reads.forget()
        self.managed.zero_grad()
        self.stage = Stage.IDLE

    def give_up_step(self) -> None:
        """Gradients of a step that has failed are dropped, and its values stay mixed, until a checkpoint is loaded."""
        self._step.give_up()
        self._forget_gradients()

    def accept_mixed_state(self) -> None:
        """Values are taken as they are, whatever they are of."""
        self.check_open()
        if self.whole.state is not State.WHOLE:
            with deferred_signals(), self._thread.hold("accept_mixed_state"):
                self.give_up_step()
                self.whole.mend()

    def _log_pressure(self) -> None:
        count = self.runtime.num_pressure_evictions
        if count > self._num_pressure_evictions:
            logger.log(
                logging.INFO if self._num_pressure_evictions == 0 else logging.DEBUG,  # once is enough to know
                "device memory ran short for activations: %d arrays of chunks made room; the next step is planned anew",
                count - self._num_pressure_evictions,
            )
        self._num_pressure_evictions = count

    def zero_grad(self) -> None:
        """Forgets all gradients since the last step."""
        self.check_whole()
        with deferred_signals(), self._thread.hold("zero_grad"):
            self._trained.drop_left_gradients()
            self.runtime.clear_gradients()
            stage = self.stage
            self._forget_gradients()
            if stage is Stage.FORWARDED:
                self.stage = stage
            self.run_log.note_zero_grad()

    def report(self) -> dict[str, Any]:
        """All figures of this engine in one flat dict."""
        self.check_open()
        return {
            "num_parameters": self.num_parameters,
            **self.runtime.report(),
            "loss_scale": self.loss_scale,
            "grad_norm": self.outcome.grad_norm,
            "isa": _C.optim.isa(),
        }

    def plan(self) -> Plan:
        """The plan of the next step."""
        self.check_open()
        return current_plan(self.runtime, self.layout)

    def close(self) -> None:
        """Turns the module back into an ordinary one (original dtypes and devices) and frees all chunks. Idempotent.

        All of it is done also where a part fails; what failed first is raised at the end.

        Raises:
            MemoryBudgetError: host memory does not hold the module's own parameters; nothing is changed.
        """
        if self.closed:
            return
        self._check_process()
        with deferred_signals(), self._thread.hold("close"):
            try:
                self._kept_plan.close()
                with self.guard("close"):
                    lack = lack_of_room_to_close(self._params, self.runtime.report()["host_bytes"], self.ranks)
                    self.ranks.meet()
            except BaseException as error:
                self.abandon(error)  # the others do not come
                raise
            if lack:
                raise _C.MemoryBudgetError(lack)
            self.closed = True
            try:
                with self.guard("close"):
                    self._teardown.close()
            except BaseException as error:
                self.ranks.leave(error)
                raise
            self.ranks.close()

    def discard(self) -> None:
        """Frees all chunks without giving the module its values back. Idempotent."""
        if self.closed:
            return
        self._check_process()
        if self._params is not None:
            self._params.discard()
        self.close()

    def revert(self) -> None:
        """As :meth:`close`, of an engine that was never used: what was on the meta device is there again."""
        if self._params is not None and not self.closed:
            with self.guard("close"):
                self._params.undo()
        self.close()

    def abandon(self, error: BaseException) -> None:
        """Closes what is there because of ``error``, which goes on: the module is an ordinary one again, with its
        values where this is the only rank. Of several the others are told of ``error`` and not waited for, and
        parameters that were moved into chunks are left without elements. Idempotent. Nothing in a fork of the process.
        """
        if self.closed or self.ranks.is_fork:
            return
        self.closed = True
        with deferred_signals():
            self.ranks.fail(error)
            try:
                if self._params is not None:
                    self._params.discard() if len(self.ranks.members) > 1 else self._params.release()
                self._teardown.close()
            except Exception as other:
                logger.warning("closing the engine after %s failed as well: %s", type(error).__name__, other)
            self.ranks.leave(error)

    def check_open(self) -> None:
        """Raises StateError when it is closed, or in a fork of the process that opened it."""
        if self.runtime.closed or self.closed:
            raise _C.StateError(
                "this engine is closed; its module is an ordinary one again, build a new engine to train on"
            )

    def _check_process(self) -> None:
        _ = self.runtime.closed  # raises in a fork

    def check_whole(self) -> None:
        """Raises StateError when it is closed, or when its values are not all of one step."""
        self.check_open()
        self.whole.check()


def _is_no_plain_container(value: Any) -> bool:
    """Other containers (caches, a model's outputs) pass as the objects they are."""
    return not isinstance(value, (tuple, list, dict))
