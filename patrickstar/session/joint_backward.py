"""A backward, of one engine's loss or of several engines'.

[Note: joint backward] The loss may come of several engines' modules (a generator's, through the discriminator). So
every engine that is between a forward and its step on this thread takes part; one that gets no gradient is as it was.
Engines of other threads have losses of their own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from patrickstar import _C
from patrickstar.engine.error_texts import explain_failed_backward
from patrickstar.engine.interrupts import deferred_signals
from patrickstar.engine.open_session import open_sessions

if TYPE_CHECKING:
    from patrickstar.engine.session import Session

logger = logging.getLogger("patrickstar")


def run_backward(session: Session, loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
    """Scales ``loss``, which was made with ``session``, and runs its backward; gradients end up in chunks. When it
    fails, all engines are as before it, but for updates that were committed
    (:class:`patrickstar.engine.wholeness.Wholeness`).
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
        session.keep_backward(scale)
        for other in sessions[1:]:
            if other.backwards.gave_gradients():
                other.keep_backward(scale)


def _abort(sessions: Sequence[Session]) -> int:
    """Aborts all of them. Returns how many chunks were updated for good."""
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
    """Autograd's queue of this thread has the nodes that a failed backward did not come to, and with them its
    activations, until another backward is run on this thread.
    """
    with _C.HostAllocations(), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).backward()
