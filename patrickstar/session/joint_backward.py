"""Backward of one engine's loss, or of a loss made with several engines.

A loss may depend on several engines' modules, as a generator's loss does through the discriminator. Every engine that
is between a forward and its step on this thread takes part. An engine that gets no gradient is left as it was. Engines
used on other threads have their own losses.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import torch

from patrickstar import _C
from patrickstar.session.error_texts import explain_failed_backward
from patrickstar.session.interrupts import deferred_signals
from patrickstar.session.registry import open_sessions
from patrickstar.session.session import Session
from patrickstar.session.step_state import StepStage

logger = logging.getLogger("patrickstar")


def run_backward(session: Session, loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
    """Scales ``loss`` and runs its backward; gradients end up in chunks.

    If it fails, all engines are restored to their state before it, except for optimizer-in-backward updates (see
    ``Wholeness``).

    Args:
        session: whose module made the loss.
        loss: a tensor of one element.
        kwargs: of ``Tensor.backward``.
    """
    scale = session.loss_scale
    sessions = [session, *(other for other in open_sessions() if other is not session and other.course.is_here)]
    for each in sessions:
        each.gradients.check_scale(scale)
    with deferred_signals() as signals, contextlib.ExitStack() as guards:
        for each in sessions:
            guards.enter_context(each.guard("backward"))
        begun: list[Session] = []
        try:
            for each in sessions:
                each.backwards.begin(scale, session.optimizer.expected_options() if each is session else [])
                begun.append(each)
            with signals.allowed():
                (loss if scale == 1.0 else loss.float() * scale).backward(**kwargs)
            for each in sessions:
                each.backwards.end()
        except BaseException as error:
            explain_failed_backward(error, _abort(begun))
            _forget_nodes_of_failed_backwards()
            raise
        _keep(session, scale)
        for other in sessions[1:]:
            if other.backwards.gave_gradients():
                _keep(other, scale)


def _keep(session: Session, scale: float) -> None:
    """Keeps the gradients of a backward, scaled by ``scale``, for the step."""
    session.gradients.keep(scale)
    session.course.note(StepStage.BACKWARDED)


def _abort(sessions: Sequence[Session]) -> int:
    """Aborts the backward of all sessions. Returns the number of chunks whose update cannot be undone."""
    num_committed = 0
    for session in sessions:
        try:
            committed = session.backwards.abort()
            num_committed += committed
            if committed > 0:
                session.whole.break_up(
                    f"a backward failed when {committed} chunks had been updated (optimizer.speculation is "
                    '"commit"): the model is updated in part'
                )
        except Exception as error:
            logger.warning("what a failed backward had begun was not undone: %s: %s", type(error).__name__, error)
            session.whole.break_up(f"a backward failed, and what it had begun could not be undone ({error})")
    return num_committed


def _forget_nodes_of_failed_backwards() -> None:
    """Runs an empty backward, which frees the activations of the failed one.

    Autograd's queue of this thread keeps the nodes that a failed backward did not reach until the next backward.
    """
    with _C.HostAllocations(), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).backward()
