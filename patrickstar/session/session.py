"""One engine's live state: the core, the ranks, the parts that are in the user's module, and the order of a step.

The engine and the optimizer are thin faces of it. It ends with :class:`~patrickstar.engine.closing.Closing`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.config import Config, make_loss_scaler
from patrickstar.engine.calls import Calls, OwnCalls
from patrickstar.engine.closing import Closing
from patrickstar.engine.core_setup import Vacated, build_core, current_plan
from patrickstar.engine.divided_matrices import Matrices
from patrickstar.engine.interrupts import deferred_signals
from patrickstar.engine.joint_backward import run_backward
from patrickstar.engine.kept_plan import Inputs, NoKeptPlan, adopt_plan
from patrickstar.engine.losses import check_loss, has_forwards_in_backward, no_gradients_came
from patrickstar.engine.notebook import running_statement
from patrickstar.engine.one_thread import OneThread
from patrickstar.engine.open_session import Owner, note_open_session
from patrickstar.engine.optimizer_step import OptimizerLink, OptimizerStep, StepOutcome
from patrickstar.engine.run_log import NoRunLog
from patrickstar.engine.session_parts import build_parts
from patrickstar.engine.step_stage import Stage, StepCourse
from patrickstar.engine.wholeness import State, Wholeness
from patrickstar.machine.budgets import Budgets
from patrickstar.module.adoption import AdoptedParams
from patrickstar.module.compiled.dynamo import Compiler, check_no_compiled_autograd, outside_of_graphs
from patrickstar.module.materialize import DeferredInit
from patrickstar.module.observer import Observer
from patrickstar.module.preprocess import SortedParams, plan_params
from patrickstar.optimizer.core_options import CoreOptions
from patrickstar.planning.step_plan import Plan
from patrickstar.profiling import ChunkLayers
from patrickstar.ranks.chunk_ranks import ChunkRanks
from patrickstar.ranks.mesh import MeshRanks
from patrickstar.sequence.survey import Survey


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
        deferred: fills what ``module`` has on the meta device.

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
        deferred: DeferredInit | None,
    ):
        """Nothing of ``module`` is changed yet: ``params`` take the parameters, :meth:`complete` follows. Whatever
        fails from here on, ``closing.abandon`` makes the module an ordinary one again.
        """
        self.module = module
        self.config = config
        self.mesh = mesh
        self.ranks = mesh.everybody
        self.chunk_ranks = chunk_ranks
        self.matrices = matrices
        self.device = self.ranks.context.device
        self.scaler = make_loss_scaler(config)
        self.outcome = StepOutcome()
        self.course = StepCourse()
        self.survey = Survey()
        """Findings about the module, made before it was rewritten."""
        self.whole = Wholeness()
        self.thread = OneThread()
        self.closing = Closing(self)
        self._step = OptimizerStep(self)
        self.optimizer = OptimizerLink()
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
        self._open_core(budgets, None, deferred)
        self.retained_gradients: set[int] = set()
        """Ids of parameters whose gradients are kept after a step."""
        self.kept_plan = NoKeptPlan()
        self.calls: Calls = OwnCalls()
        """How ranks share calls of the module."""
        self.owner = Owner(running_statement())
        self.run_log: NoRunLog = NoRunLog()
        """Lines of the log about forwards, backwards and steps."""
        note_open_session(self)

    def _open_core(
        self,
        budgets: Budgets,
        chunk_numel: int | None,
        deferred: DeferredInit | None,
        kept_memory: _C.KeptRegions | None = None,
    ) -> None:
        core = self._core = build_core(
            self.module,
            self.plan_of_params,
            self.config,
            self.ranks.context,
            self.chunk_ranks,
            budgets,
            chunk_numel,
            kept_memory,
        )
        teardown = self.closing.teardown
        teardown.callback(self.matrices.close)
        teardown.callback(core.segments.close)
        teardown.callback(core.runtime.close)
        self.layout, self.runtime, self.chunk_numel = core.layout, core.runtime, core.chunk_numel
        self.observer = Observer(self.runtime)
        self.params = AdoptedParams(
            self.plan_of_params, self.layout, self.runtime, self.observer, self.device, deferred
        )
        """The module's parameters, to be moved into chunks."""
        teardown.callback(self.params.release)

    def complete(self, saved_plan: Plan | None) -> None:
        """When all parameters are in chunks: from now on the module is used in place.

        Args:
            saved_plan: the one to begin with, the same on all ranks; None: that of an earlier run like this one, if it
                was kept.
        """
        parts = build_parts(self, self.closing.teardown, self._core.largest_module_bytes)
        self.managed, self.states, self.compiled, self.calls = parts.managed, parts.states, parts.compiled, parts.calls
        self.gradients, self.gradient_reads, self.backwards = parts.gradients, parts.gradient_reads, parts.backwards
        self.kept_plan, self.layer_activations = parts.kept_plan, parts.layer_activations
        self._parts = parts
        if saved_plan is not None:
            adopt_plan(self.runtime, saved_plan)

    # Other ranks.

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
        self.kept_plan.close()
        self.plan_of_params = self.params_now()
        memory = set_aside()
        former = self.params.vacate()
        segments = self._core.segments.keep()
        self.closing.teardown.close()
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
        self._open_core(budgets, chunk_numel, None, vacated.memory)
        vacated.segments.close()
        expect()
        self.params.take_over(vacated.params, fill)
        self.complete(None)
        self.course.end()
        self.optimizer.tell_groups()
        self.run_log = self.run_log if self.ranks.context.rank == 0 else NoRunLog()
        self.run_log.change_ranks()

    # Parameters and calls.

    def has_param(self, param: nn.Parameter) -> bool:
        """True for the parameters of the module that this engine has."""
        return param in self._own_params

    @property
    def chunk_layers(self) -> ChunkLayers:
        """Which layers of the module lie in which chunk."""
        params = self.plan_of_params.chunked
        chunks = (self.layout.chunk(chunk)["params"] for chunk in range(self.layout.num_chunks))
        return ChunkLayers([[params[param].name for param in chunk] for chunk in chunks])

    @contextlib.contextmanager
    def guard(self, call: str) -> Iterator[None]:
        """Around a call in which one thread of each rank takes part
        (:meth:`patrickstar.ranks.distributed.RankGroups.guard`).
        """
        call = f"{call} of step {self.num_steps + 1}"
        with self.thread.hold(call), self.ranks.guard(call):
            yield

    @property
    def closed(self) -> bool:
        """True after the end."""
        return self.closing.is_over

    def check_open(self) -> None:
        """Raises StateError when it is closed, or in a fork of the process that opened it."""
        if self.runtime.closed or self.closed:
            raise _C.StateError(
                "this engine is closed; its module is an ordinary one again, build a new engine to train on"
            )

    def check_whole(self) -> None:
        """Raises StateError when it is closed, or when its values are not all of one step."""
        self.check_open()
        self.whole.check()

    # Forward and backward.

    @property
    def stage(self) -> Stage:
        """The last call of the step that came through."""
        return self.course.stage

    def compile(self, module: nn.Module, compiler: Compiler) -> None:
        """Compiles ``module``, of those inside, from its next call on."""
        self.check_open()
        if self._parts.forwards.is_running:
            raise _C.StateError("compile() was called within a forward or a backward; call it between them")
        self.compiled.compile(module, compiler)

    @outside_of_graphs
    def forward(self, call: Callable[[], Any], inputs: Inputs | None = None) -> Any:
        """Runs ``call``, one forward of the module; again with an emptier device where memory ran out, for which ranks
        that replay a plan leave it until the step is over. ``inputs``: what the module is called with, where that is
        known.
        """
        self.check_whole()
        if not torch.is_grad_enabled():  # a model from from_pretrained is in evaluation mode, and may be trained so
            with deferred_signals() as signals, self.guard("evaluation forward"):
                return self._parts.forwards.run(call, signals, _C.Tracking.UNTRACKED)
        with deferred_signals() as signals:
            self.gradient_reads.forget()
            self._parts.trained.follow(lambda: self.guard("forward"))
            with self.guard("forward"):
                self._parts.buffers.run()
                self.kept_plan.begin_forward(inputs)
                result = self._parts.forwards.run(call, signals, _C.Tracking.TRAINING)
                self.course.note(Stage.FORWARDED)
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
            self._parts.trained.follow(lambda: self.guard("unfreezing"))

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
        if comes_first and not self.backwards.gave_gradients():
            self.backwards.forget()
            self.course.end()
            raise no_gradients_came()
        self.run_log.note_backward(loss)

    def keep_backward(self, scale: float) -> None:
        """Gradients of a backward, which were scaled by ``scale``, are there for the step."""
        self.gradients.keep(scale)
        self.course.note(Stage.BACKWARDED)

    # The step.

    @property
    def loss_scale(self) -> float:
        """Factor of the next backward's loss; 1 without float16."""
        return self.scaler.scale if self.scaler is not None else 1.0

    def grad_norm(self) -> float:
        """Global L2 norm of the gradients since the last step, before clipping; NaN when one is not finite.

        Raises:
            StateError: there are none.
        """
        self.check_open()
        if not self.runtime.gradients_pending():
            raise _C.StateError("the norm of gradients was asked for, but there are none; call backward first")
        with deferred_signals(), self.guard("the norm of all gradients"):
            return self.gradients.norm()

    def step(self, param_groups: list[dict[str, Any]], options: list[CoreOptions]) -> None:
        """One optimizer step: managed parameters with ``param_groups``, chunks with the same as ``options``
        ([Note: a step that fails]). A signal that comes meanwhile is delivered when the step is over.
        """
        self.check_open()
        self.whole.check_step()
        with deferred_signals(), self.guard("step"):
            self._step.run(param_groups, options)

    def end_step(self, lr: float) -> None:
        """An optimizer's step is over, or skipped; ``lr`` is that of its first group."""
        self.num_steps += 1
        self.gradients.end_step()
        self.course.end()
        for end in self._parts.ends_of_step:
            end()
        self.run_log.end_step(lr)

    def give_up_step(self) -> None:
        """Gradients of a step that has failed are dropped, and its values stay mixed, until a checkpoint is loaded."""
        self._step.give_up()
        self.backwards.forget()
        self.course.end()

    def accept_mixed_state(self) -> None:
        """Values are taken as they are, whatever they are of."""
        self.check_open()
        if self.whole.state is not State.WHOLE:
            with deferred_signals(), self.thread.hold("accept_mixed_state"):
                self.give_up_step()
                self.whole.mend()

    def zero_grad(self) -> None:
        """Forgets all gradients since the last step."""
        self.check_whole()
        with deferred_signals(), self.thread.hold("zero_grad"):
            self._parts.trained.drop_left_gradients()
            self.runtime.clear_gradients()
            self.backwards.forget()
            self.course.forget_gradients()
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
