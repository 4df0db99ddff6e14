"""``Session``: the live state of one engine, shared by everything that acts on it.

Modules that act on a session: ``lifecycle.py`` (opening, change of ranks), ``step_loop.py`` (forward, backward, step)
and ``closing.py`` (its end).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

from patrickstar import _C
from patrickstar.config import Config, make_loss_scaler
from patrickstar.module.adoption import AdoptedParams
from patrickstar.module.observer import Observer
from patrickstar.module.preprocess import SortedParams, plan_params
from patrickstar.parallel.calls import Calls, OwnCalls
from patrickstar.parallel.sharded_matrices import Matrices
from patrickstar.planning.step_plan import Plan
from patrickstar.profiling import ChunkLayers
from patrickstar.ranks.chunk_ranks import ChunkRanks
from patrickstar.ranks.mesh import MeshRanks
from patrickstar.sequence.survey import Survey
from patrickstar.session.background_save import BackgroundSave
from patrickstar.session.core_setup import AllEvicted, Core, current_plan
from patrickstar.session.device_loan import DeviceLoan
from patrickstar.session.interrupts import deferred_signals
from patrickstar.session.kept_plan import NoKeptPlan
from patrickstar.session.one_thread import OneThread
from patrickstar.session.parts import Parts
from patrickstar.session.quiet_log import NoRunLog
from patrickstar.session.step_state import Decision, OptimizerLink, StepCourse, StepOutcome, StepStage
from patrickstar.session.teardown import Teardown
from patrickstar.session.wholeness import Wholeness


@dataclasses.dataclass
class Owner:
    """The holder of a session, for calls that close it or change its ranks."""

    face: Callable[[], Any] | None = None
    """A weak reference to the engine made of the session; None before the engine is made."""
    keeps_ranks: str | None = None
    """Why the ranks cannot change and what to do instead, if the host that made the engine says so."""
    after_backward: Callable[[], None] | None = None
    """Called after each backward, outside of all guards; may raise."""


class LostRanks(enum.Enum):
    """Ends of a change of ranks in which another rank is lost."""

    END = "it ends, with an error"
    GO_ON = "it may go on from copies or a checkpoint, with the ranks that are left (resize/recovery.py)"


class Session:
    """State of one engine. The constructor changes nothing of ``module``; ``lifecycle.make_session`` adds the core.

    Attributes:
        params: the module's parameters in chunks.
        core, layout, runtime, observer, chunk_numel: replaced when the ranks change (:meth:`set_core`).
        parts: what runs in the module; likewise replaced (:meth:`set_parts`).
        teardown: undoes the core and the changes of the module. Empty between two cores.
        closed: whether the session has ended, or an irreversible end has begun.
        evicted: what is kept between two cores; None while there is a core.
        lost_ranks: what happens to this rank when another one is lost in a change of ranks.
        survey: findings about the module, made before it was rewritten.
        unfinished: the decision of a failed step that the next call finishes.
        num_steps: optimizer steps so far, including skipped ones.
        retained_gradients: ids of parameters whose gradients are kept after a step.
    """

    params: AdoptedParams
    core: Core
    layout: _C.Layout
    runtime: _C.Runtime
    observer: Observer
    chunk_numel: int
    parts: Parts

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        mesh: MeshRanks,
        chunk_ranks: ChunkRanks,
        matrices: Matrices,
        in_groups: Collection[nn.Parameter],
    ):
        self.module = module
        self.config = config
        self.set_ranks(mesh, chunk_ranks, matrices)
        self.device = self.ranks.context.device
        self.scaler = make_loss_scaler(config)
        self.outcome = StepOutcome()
        self.course = StepCourse()
        self.survey = Survey()
        self.whole = Wholeness()
        self.loan = DeviceLoan()
        self.thread = OneThread()
        self.saves = BackgroundSave()
        self.teardown = Teardown()
        self.closed = False
        self.evicted: AllEvicted | None = None
        self.lost_ranks = LostRanks.END
        self.unfinished: Decision | None = None
        self.optimizer = OptimizerLink()
        self.num_steps = 0
        self.plan_of_params = plan_params(
            module,
            config.compute_dtype,
            use_cpu_embedding=config.use_cpu_embedding,
            in_groups=in_groups,
            quantization=config.quantization,
        )
        self.num_parameters = matrices.num_elements(module.parameters())
        self._own_params = self.plan_of_params.all
        self.retained_gradients: set[int] = set()
        self.kept_plan = NoKeptPlan()
        self.calls: Calls = OwnCalls()
        self.owner = Owner()
        self.run_log: NoRunLog = NoRunLog()

    def set_ranks(self, mesh: MeshRanks, chunk_ranks: ChunkRanks, matrices: Matrices) -> None:
        """Sets the ranks that train together, the ranks that share chunks with this one, and the matrices' sharding."""
        self.mesh, self.ranks = mesh, mesh.world_group
        self.chunk_ranks, self.matrices = chunk_ranks, matrices

    def set_core(self, core: Core, params: AdoptedParams, observer: Observer) -> None:
        """Sets the core and the parameters that move into its chunks."""
        self.core, self.params, self.observer = core, params, observer
        self.layout, self.runtime, self.chunk_numel = core.layout, core.runtime, core.chunk_numel

    def set_parts(self, parts: Parts) -> None:
        """Sets the parts that run in the module."""
        self.parts = parts
        self.managed, self.states, self.compiled, self.calls = parts.managed, parts.states, parts.compiled, parts.calls
        self.gradients, self.gradient_reads, self.backwards = parts.gradients, parts.gradient_reads, parts.backwards
        self.kept_plan, self.checkpoint_calls = parts.kept_plan, parts.checkpoint_calls

    @property
    def stage(self) -> StepStage:
        """The last finished call of the running step."""
        return self.course.stage

    @property
    def loss_scale(self) -> float:
        """Factor of the next backward's loss; 1 without float16."""
        return self.scaler.scale if self.scaler is not None else 1.0

    @property
    def chunk_layers(self) -> ChunkLayers:
        """The module's layers by chunk."""
        params = self.plan_of_params.chunked
        chunks = (self.layout.chunk(chunk)["params"] for chunk in range(self.layout.num_chunks))
        return ChunkLayers([[params[param].name for param in chunk] for chunk in chunks])

    def has_param(self, param: nn.Parameter) -> bool:
        """True if ``param`` belongs to this engine's module."""
        return param in self._own_params

    def params_now(self) -> SortedParams:
        """The module's parameters with the present choice of trained ones (``TrainedParams``)."""
        if self.evicted is not None:
            return self.plan_of_params
        chunked = [
            dataclasses.replace(spec, trained=spec.param._patrickstar.trainable) for spec in self.plan_of_params.chunked
        ]
        return dataclasses.replace(self.plan_of_params, chunked=chunked, managed=self.managed.params)

    @contextlib.contextmanager
    def guard(self, call: str) -> Iterator[None]:
        """Wraps a call in which one thread of each rank takes part (``RankGroups.guard``)."""
        call = f"{call} of step {self.num_steps + 1}"
        with self.thread.hold(call), self.ranks.guard(call):
            yield

    def check_open(self) -> None:
        """Raises StateError if the session is closed, or in a fork of the process that opened it."""
        if self.runtime.closed or self.closed:
            raise _C.StateError(
                "this engine is closed; its module is an ordinary one again, build a new engine to train on"
            )

    def check_whole(self) -> None:
        """Raises StateError if the session is closed, or if its values come from different steps."""
        self.check_open()
        self.whole.check()

    def check_ready(self) -> None:
        """:meth:`check_whole`. Raises StateError also while the device's memory is lent."""
        self.check_whole()
        self.loan.check()

    def train_unfrozen(self) -> None:
        """Starts training parameters that require grad and are in a group by now (``TrainedParams.follow``).

        The next training forward would do the same. Collective over all ranks.

        Raises:
            MemoryBudgetError: no room for their states; nothing is changed.
            DisagreementError: ranks found different parameters; nothing is changed.
        """
        self.check_open()
        self.loan.check()
        with deferred_signals():
            self.parts.trained.follow(lambda: self.guard("unfreezing"))

    def grad_norm(self) -> float:
        """Global L2 norm of the gradients since the last step, before clipping; NaN if one is not finite.

        Raises:
            StateError: no gradients.
        """
        self.check_open()
        self.loan.check()
        if not self.runtime.gradients_pending():
            raise _C.StateError(
                "there are no gradients since the last step or zero_grad: call backward first, and read, set and clip "
                "gradients between it and the step"
            )
        with deferred_signals(), self.guard("the norm of all gradients"):
            return self.gradients.norm()

    def measure_gradient_parts(self) -> None:
        """See ``Engine.measure_gradient_parts``."""
        self.check_open()
        section = self.config
        is_whole = self.chunk_ranks.size == len(self.ranks.members) and self.matrices.names is None
        if not is_whole or max(section.sequence_parallel.size, section.expert_parallel.size) > 1:
            raise _C.StateError(
                "the gradient noise scale is not measured where ranks share samples or experts (tensor_parallel, "
                "sequence_parallel, expert_parallel); leave them out, or train with one batch"
            )
        self.runtime.measure_parts()

    def report(self) -> dict[str, Any]:
        """All figures of this engine in one flat dict."""
        self.check_open()
        return {
            "num_parameters": self.num_parameters,
            **self.runtime.report(),
            "loss_scale": self.loss_scale,
            "grad_norm": self.outcome.grad_norm,
            "isa": _C.optim.isa(),
            **({} if self.parts.fp8 is None else self.parts.fp8.report()),
        }

    def plan(self) -> Plan:
        """The plan of the next step."""
        self.check_open()
        return current_plan(self.runtime, self.layout, self.parts.recompute_choice.saved_calls())
