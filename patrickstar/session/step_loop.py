"""The calls of a training loop on one session: forward, backward, optimizer step, ``zero_grad``, compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.module.compiled.dynamo import Compiler, check_no_compiled_autograd, outside_of_graphs
from patrickstar.optimizer.core_options import CoreOptions
from patrickstar.session.interrupts import deferred_signals
from patrickstar.session.joint_backward import run_backward
from patrickstar.session.kept_plan import Inputs
from patrickstar.session.losses import check_loss, has_forwards_in_backward, no_gradients_came
from patrickstar.session.optimizer_step import give_up_step, run_step
from patrickstar.session.session import Session
from patrickstar.session.step_state import StepStage
from patrickstar.session.wholeness import State


class StepLoop:
    """See the module's docstring. Holds no state but the session."""

    def __init__(self, session: Session):
        self._session = session

    def compile(self, module: nn.Module, compiler: Compiler) -> None:
        """Compiles ``module``, which is the session's or one inside, from its next call on."""
        session = self._session
        session.check_open()
        if session.parts.forwards.is_running:
            raise _C.StateError("compile() was called within a forward or a backward; call it between them")
        session.compiled.compile(module, compiler)

    @outside_of_graphs
    def forward(self, call: Callable[[], Any], inputs: Inputs | None = None) -> Any:
        """Runs ``call``, one forward of the module, and returns its result.

        If device memory runs out, it runs again with chunks evicted. Ranks that replay a plan keep their chunks off the
        device until the step is over.

        Args:
            call: calls the module.
            inputs: the module's arguments, if known.
        """
        session, parts = self._session, self._session.parts
        session.check_ready()
        if not torch.is_grad_enabled():  # a model from from_pretrained is in evaluation mode, and may be trained so
            with deferred_signals() as signals, session.guard("evaluation forward"):
                parts.buffers.run(_C.Tracking.UNTRACKED)
                return parts.forwards.run(call, signals, _C.Tracking.UNTRACKED)
        with deferred_signals() as signals:
            session.gradient_reads.forget()
            parts.trained.follow(lambda: session.guard("forward"))
            with session.guard("forward"):
                parts.buffers.run(_C.Tracking.TRAINING)
                session.kept_plan.begin_forward(inputs)
                parts.recompute_choice.begin_forward(inputs)
                result = parts.forwards.run(call, signals, _C.Tracking.TRAINING)
                session.course.note(StepStage.FORWARDED)
                session.run_log.note_forward(inputs)
                return result

    @outside_of_graphs
    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Scales ``loss`` and runs its backward; gradients end up in chunks. ``kwargs``: of ``Tensor.backward``."""
        session = self._session
        session.check_ready()
        comes_first = session.stage is not StepStage.FORWARDED and has_forwards_in_backward(loss, session.has_param)
        check_loss(loss, has_forward=comes_first or session.stage is not StepStage.IDLE)
        check_no_compiled_autograd()
        if comes_first:
            self.forward(lambda: None)
        run_backward(session, loss, kwargs)
        if comes_first and not session.backwards.gave_gradients():
            session.backwards.forget()
            session.course.end()
            raise no_gradients_came()
        session.run_log.note_backward(loss)
        if session.owner.after_backward is not None:
            session.owner.after_backward()

    def step(self, param_groups: list[dict[str, Any]], options: list[CoreOptions]) -> None:
        """Runs one optimizer step, or finishes a failed one. Signals are delivered when the step is over.

        Args:
            param_groups: for parameters that stay with PyTorch.
            options: the same options for chunks.
        """
        session = self._session
        session.check_open()
        session.loan.check()
        session.whole.check_step()
        with deferred_signals(), session.guard("step"):
            session.saves.check(session.ranks.control)
            run_step(session, param_groups, options)

    def accept_mixed_state(self) -> None:
        """Continues with the present values, even if they come from different steps."""
        session = self._session
        session.check_open()
        if session.whole.state is not State.WHOLE:
            with deferred_signals(), session.thread.hold("accept_mixed_state"):
                give_up_step(session)
                session.whole.mend()

    def zero_grad(self) -> None:
        """Drops all gradients since the last step."""
        session = self._session
        session.check_ready()
        with deferred_signals(), session.thread.hold("zero_grad"):
            session.parts.trained.drop_left_gradients()
            session.runtime.clear_gradients()
            session.backwards.forget()
            session.course.forget_gradients()
            session.run_log.note_zero_grad()
