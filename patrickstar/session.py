"""One engine's live state: the core, the hooks on the user's module, the loss scaler, and the order of a step.

The engine and the optimizer are thin faces of it. It ends with ``close``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from patrickstar import _C
from patrickstar.chunked_parameter import make_gradient_hook
from patrickstar.config import Config, Speculation, make_loss_scaler
from patrickstar.converted_module import ConvertedModule
from patrickstar.core_setup import build_core, check_no_open_engine, current_plan, load_plan
from patrickstar.distributed import RankGroups
from patrickstar.error_texts import explain_failed_backward, first_sentence
from patrickstar.forward_attempt import ForwardAttempt
from patrickstar.hooks import ModuleHooks
from patrickstar.managed import ManagedParams
from patrickstar.materialize import DeferredInit
from patrickstar.memory import Budgets
from patrickstar.observer import Observer
from patrickstar.open_session import note_open_session
from patrickstar.param_states import ParamStates
from patrickstar.planning.step_plan import Plan
from patrickstar.preprocess import ParamPlan, adopt_params, discard_params, move_rest, plan_params, release_params
from patrickstar.profiling import make_profiler
from patrickstar.rank_sync import BufferSync, check_same_model
from patrickstar.step_gradients import StepGradients

logger = logging.getLogger("patrickstar")


class Stage(enum.Enum):
    """Where in a step the session is."""

    IDLE = "before the first forward of a step"
    FORWARDED = "after a forward, before its backward"
    BACKWARDED = "after a backward, before the step"


@dataclasses.dataclass
class StepOutcome:
    """What the last step did."""

    grad_norm: float = 0.0
    """Global L2 norm of the unscaled gradients before clipping; not finite when the step was skipped."""
    applied: bool = True
    """Whether parameters were updated; so it is taken to be before the first step, and after loading."""


class Session:
    """See the module's docstring.

    Raises:
        MemoryBudgetError: the model cannot fit the budgets.
        StateError: another engine is open in this process.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        ranks: RankGroups,
        budgets: Budgets,
        deferred: DeferredInit | None = None,
    ):
        check_no_open_engine()
        self.module = module
        self.config = config
        self.ranks = ranks
        self.device = device = ranks.context.device
        self.scaler = make_loss_scaler(config)
        self.outcome = StepOutcome()
        self.stage = Stage.IDLE
        self.closed = False
        self.expected_options: Callable[[], list[_C.GroupOptions]] = list
        """The options that the next step is expected to use (none: not known)."""
        self.param_groups: list[dict[str, Any]] = []
        """The optimizer's."""
        self.num_steps = 0
        """Optimizer steps so far, skipped ones too."""
        self._plan = plan_params(module, config.compute_dtype, use_cpu_embedding=config.use_cpu_embedding)
        self.num_parameters = sum(p.numel() for p in module.parameters())
        core = build_core(module, self._plan, config, ranks, budgets)
        self.layout, self.runtime, self._segments = core.layout, core.runtime, core.segments
        self.observer = Observer(self.runtime)
        adopt_params(self._plan, self.layout, self.runtime, self.observer, device, deferred)
        move_rest(module, self._plan, device)
        self._buffers = list(module.buffers())
        self._buffer_sync = BufferSync(ranks, module)
        self.managed = ManagedParams(module, self._plan.managed, config.compute_dtype, device)
        self.states = ParamStates(self.runtime, self.observer, self.managed)
        self.gradients = StepGradients(self.runtime, self.managed, ranks, config)
        self._hooks = ModuleHooks(module, self.observer)
        self._converted = ConvertedModule(module, self.call, self.zero_grad, self.states.user_value)
        trainable = [spec.param for spec in self._plan.chunked if spec.param.requires_grad]
        self._gradient_hooks = [make_gradient_hook(param, self.runtime) for param in trainable]
        self._handles = [
            param.register_post_accumulate_grad_hook(hook)
            for param, hook in zip(trainable, self._gradient_hooks, strict=True)
        ]
        self._frozen = [spec for spec in self._plan.chunked if not spec.param.requires_grad]
        self._profiler = make_profiler(self.runtime, config.profile, ranks.context.rank, len(ranks.members))
        self._num_pressure_evictions = 0
        self._replayed_with_others = False  # in the forward that failed
        self._is_inside = False  # a forward or a backward
        note_open_session(self)

    def join(self) -> None:
        """What ranks do together once each has its share of the model.

        Raises:
            DisagreementError: their models, or the plans they begin with, differ.
            ValueError: the configuration's ``plan`` cannot be read, or is for other chunks.
        """
        check_same_model(self.ranks, self._plan)
        saved = load_plan(self.config, self.layout, self.ranks)
        if saved is not None:
            self.runtime.adopt_timeline(saved.timeline, saved.times.as_core() if saved.times is not None else None)

    # Forward and backward.

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of ``module``, which holds all parameters: a forward, but within one ([Note: calls in place]).

        Tensors in tuples, lists and dicts are moved to the device, floating point ones cast to the compute dtype.
        """
        if self._is_inside:
            return module._call_impl(*args, **kwargs)
        args, kwargs = tree_map_only(torch.Tensor, self._to_compute, (args, kwargs), is_leaf=_is_no_plain_container)
        return self.forward(lambda: module._call_impl(*args, **kwargs))

    def _to_compute(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self.config.compute_dtype
        cast = tensor.is_floating_point() and tensor.dtype != dtype and dtype != torch.float32
        return tensor.to(self.device, dtype if cast else tensor.dtype, non_blocking=True)

    def forward(self, call: Callable[[], Any]) -> Any:
        """Runs ``call``, one forward of the module; again with an emptier device where memory ran out.

        Not on several ranks that replay their plan: the others would not gather once more what this one needs.
        """
        self.check_open()
        with self.ranks.guard("forward"), self._inside():
            if self._is_training():
                self._buffer_sync.run()
            return self._attempt(call)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def _attempt(self, call: Callable[[], Any]) -> Any:
        attempt = ForwardAttempt(self._buffers, self.device)
        for what in (_C.Vacate.VALUES, _C.Vacate.EVERYTHING):
            try:
                with self._forward():
                    return call()
            except torch.OutOfMemoryError as error:
                if not attempt.can_repeat() or self._replayed_with_others:
                    raise
                # The error itself is let go of: its traceback keeps the activations alive.
                logger.warning(
                    "%s; the forward is run again with what can leave the device pushed off", first_sentence(error)
                )
            attempt.rewind()
            self.runtime.vacate_device(what)
        with self._forward():
            return call()

    @contextlib.contextmanager
    def _forward(self) -> Iterator[None]:
        for spec in self._frozen:
            if spec.param.requires_grad:
                raise _C.StateError(
                    f"{spec.name} was frozen when the engine was built and now requires grad; build the engine with "
                    "it trainable and set requires_grad to False afterwards"
                )
        training = self._is_training()
        self.runtime.begin_forward(_C.Tracking.TRAINING if training else _C.Tracking.UNTRACKED)
        try:
            yield
            self.runtime.end_forward()
        except BaseException:
            self._replayed_with_others = self.runtime.replays and len(self.ranks.members) > 1
            self.observer.uses.forget_scopes()
            self.runtime.abort_forward()
            raise
        if training:
            self.stage = Stage.FORWARDED

    def _is_training(self) -> bool:
        # Not by the module's mode: a model from from_pretrained is in evaluation mode, and may be trained so.
        return torch.is_grad_enabled()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Scales ``loss`` and runs its backward; gradients end up in chunks."""
        self.check_open()
        self._check_loss(loss)
        scale = self.loss_scale
        if self._profiler is not None:
            self._profiler.begin_backward()
        self.gradients.forget()
        self.runtime.begin_backward(self.expected_options(), 1.0 / scale)
        try:
            with self.ranks.guard("backward"), self._inside():
                (loss if scale == 1.0 else loss.float() * scale).backward(**kwargs)
                self.runtime.end_backward()
        except BaseException as error:
            committed = self.runtime.num_committed
            self.observer.uses.forget_scopes()
            self.runtime.abort_backward()
            explain_failed_backward(error, committed)
            raise
        self.stage = Stage.BACKWARDED

    def _check_loss(self, loss: Any) -> None:
        if not isinstance(loss, torch.Tensor):
            raise ValueError(
                f"backward got a {type(loss).__name__}; give the loss tensor (for a Hugging Face model: output.loss)"
            )
        if loss.numel() != 1:
            raise ValueError(
                f"the loss has shape {tuple(loss.shape)}; reduce it to one number, for example loss.mean()"
            )
        if self.stage is Stage.IDLE:
            raise _C.StateError(
                "backward before forward: call loss = model(inputs) first (not under torch.no_grad()), then "
                "model.backward(loss)"
            )
        if not loss.requires_grad:
            raise _C.StateError(
                "the loss does not require grad: it was computed without the model, under torch.no_grad(), or all "
                "parameters are frozen"
            )

    # The step.

    @property
    def loss_scale(self) -> float:
        """What the loss of the next backward is multiplied by; 1 without float16."""
        return self.scaler.scale if self.scaler is not None else 1.0

    def grad_norm(self) -> float:
        """Global L2 norm of the gradients since the last step, before clipping; NaN when one is not finite.

        Raises:
            StateError: there are none.
        """
        self.check_open()
        if not self.runtime.gradients_pending():
            raise _C.StateError("the norm of gradients was asked for, but there are none; call backward first")
        with self.ranks.guard("the norm of all gradients"):
            return self.gradients.norm(self.loss_scale)

    def step(self, param_groups: list[dict[str, Any]], options: list[_C.GroupOptions]) -> None:
        """One optimizer step: managed parameters with ``param_groups``, chunks with the same as ``options``."""
        self.check_open()
        with self.ranks.guard("step"):
            self._step(param_groups, options)

    def _step(self, param_groups: list[dict[str, Any]], options: list[_C.GroupOptions]) -> None:
        if not self.runtime.gradients_pending():
            return
        scale = self.loss_scale
        norm = self.gradients.norm(scale)
        finite = math.isfinite(norm)
        committed = self.config.optimizer.speculation is Speculation.COMMIT
        self.outcome = StepOutcome(grad_norm=norm, applied=finite or committed)
        if committed and not finite:
            logger.warning('the gradients are not finite, and are applied: optimizer.speculation is "commit"')
        if self.outcome.applied:
            clip = self.gradients.clip_factor(scale)
            self.managed.step(param_groups, clip / scale)
            self.runtime.apply_step(options, clip / scale)
        else:
            self.runtime.skip_step()
            if self.scaler is None:
                logger.warning("the gradients are not finite: this step is skipped, nothing was updated")
            elif self.scaler.is_at_minimum:
                logger.warning("gradients overflow at the least loss scale, %g: this step is skipped", scale)
        if self.scaler is not None:
            self.scaler.update(overflow=not finite)
        self.num_steps += 1
        self.gradients.end_step()
        self.managed.zero_grad()
        if self._hooks.is_learning:
            got_gradient = {hook.param for hook in self._gradient_hooks if hook.has_folded}
            self._hooks.finish_learning(got_gradient | {spec.param._patrickstar.id for spec in self._frozen})
        self.stage = Stage.IDLE
        self._log_pressure()
        if self._profiler is not None:
            self._profiler.end_step()

    def _log_pressure(self) -> None:
        count = self.runtime.num_pressure_evictions
        if count > self._num_pressure_evictions:
            logger.info(
                "device memory ran short for activations: %d arrays of chunks made room; the next step is planned anew",
                count - self._num_pressure_evictions,
            )
        self._num_pressure_evictions = count

    def zero_grad(self) -> None:
        """Forgets all gradients since the last step."""
        self.check_open()
        self.runtime.clear_gradients()
        self.gradients.end_step()
        self.managed.zero_grad()
        if self.stage is Stage.BACKWARDED:
            self.stage = Stage.IDLE

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
        """Turns the module back into an ordinary one (original dtype and device) and frees all chunks. Idempotent."""
        self._end(release_params)

    def discard(self) -> None:
        """Frees all chunks without giving the module its values back. Idempotent."""
        self._end(discard_params)

    def leave(self, error: BaseException) -> None:
        """As :meth:`discard`, but the other ranks are told of ``error`` instead of waited for. Idempotent."""
        self._end(discard_params, error)

    def _end(
        self,
        give_up_params: Callable[[ParamPlan, _C.Layout, _C.Runtime], None],
        error: BaseException | None = None,
    ) -> None:
        if self.closed:
            return
        self.closed = True
        if self._profiler is not None:
            self._profiler.close()
        self._converted.restore()
        self._hooks.remove()
        self.managed.remove()
        for handle in self._handles:
            handle.remove()
        give_up_params(self._plan, self.layout, self.runtime)
        self.runtime.close()
        self._segments.close()
        self.ranks.__exit__(type(error) if error is not None else None, error, None)

    def check_open(self) -> None:
        """Raises StateError when it is closed."""
        if self.closed:
            raise _C.StateError(
                "this engine is closed; its module is an ordinary one again, build a new engine to train on"
            )


def _is_no_plain_container(value: Any) -> bool:
    """Other containers (caches, a model's outputs) pass as the objects they are."""
    return not isinstance(value, (tuple, list, dict))
