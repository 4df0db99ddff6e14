"""The optimizer step: one decision from the gradients' norm, then its update.

If host memory or a disk fails during the update, some chunks are updated and each of them completely
(``csrc/engine/update_states.h``). The next call finishes the same decision and skips these chunks. Until then
``Wholeness`` refuses every other use of the parameters. If no chunk was updated, the step counts as not called. If an
update fails within a chunk, or in PyTorch's own optimizer, the state is mixed.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from patrickstar import _C
from patrickstar.optimizer.core_options import CoreOptions
from patrickstar.session.session import Session
from patrickstar.session.step_state import Decision, StepOutcome, UpdateStage

logger = logging.getLogger("patrickstar")


def run_step(session: Session, param_groups: list[dict[str, Any]], options: list[CoreOptions]) -> None:
    """Runs one step with these options, or finishes a failed one with its own. Does nothing without gradients."""
    decision = session.unfinished
    if decision is None:
        if not session.runtime.gradients_pending():
            session.run_log.note_step_without_gradients()
            return
        session.parts.agreed_options.check(param_groups)
        decision = _decide(session, param_groups, options)
        session.parts.recompute_choice.before_step(decision.clip_ratio)
    try:
        _update(session, decision)
    except BaseException as error:
        _note_failure(session, decision, error)
        raise
    session.unfinished = None
    session.whole.end_step()
    _end(session, decision)


def give_up_step(session: Session) -> None:
    """Drops the gradients of a failed step. Values stay mixed until a checkpoint is loaded."""
    session.unfinished = None
    session.runtime.drop_step()
    session.backwards.forget()
    session.course.end()


def _decide(session: Session, param_groups: list[dict[str, Any]], options: list[CoreOptions]) -> Decision:
    scale = session.gradients.scale
    norm = session.gradients.norm()
    finite = math.isfinite(norm)
    committed = session.gradients.are_committed
    if committed and not finite:
        logger.warning('the gradients are not finite, and are applied: optimizer.speculation is "commit"')
    outcome = StepOutcome(grad_norm=norm, parts=session.gradients.parts, applied=finite or committed)
    ratio = session.gradients.clip_ratio()
    session.gradient_reads.keep(scale, min(1.0, ratio) if finite else 1.0)
    return Decision(outcome, param_groups, options, scale, ratio)


def _update(session: Session, decision: Decision) -> None:
    if not decision.outcome.applied:
        session.runtime.skip_step()
        return
    clip = min(1.0, decision.clip_ratio)
    factor = clip * session.gradients.chunk_factor / decision.loss_scale
    session.runtime.apply_step(decision.options, factor, decision.clip_ratio)
    session.observer.overwritten.forget()
    decision.stage = UpdateStage.MANAGED
    session.managed.step(decision.param_groups, clip / decision.loss_scale)


def _end(session: Session, decision: Decision) -> None:
    scaler = session.scaler
    session.outcome = decision.outcome
    if not decision.outcome.applied:
        if scaler is None:
            logger.warning("the gradients are not finite: this step is skipped, nothing was updated")
        elif scaler.is_at_minimum:
            logger.warning("gradients overflow at the least loss scale, %g: this step is skipped", decision.loss_scale)
    if scaler is not None:
        scaler.update(overflow=not decision.is_finite)
    session.num_steps += 1
    session.gradients.end_step()
    session.course.end()
    for end in session.parts.ends_of_step:
        end()
    session.run_log.end_step(decision.param_groups[0]["lr"])


def _note_failure(session: Session, decision: Decision, error: BaseException) -> None:
    if session.runtime.closed:
        return
    state = session.runtime.step_state
    if decision.stage is UpdateStage.MANAGED or state == _C.StepState.TORN:
        session.whole.break_up(f"optimizer.step() failed in the middle of an update ({error})")
    elif state == _C.StepState.UPDATING:
        session.unfinished = decision
        session.whole.interrupt_step(
            f"optimizer.step() failed when {session.runtime.num_committed} chunks had been updated ({error})"
        )
    elif state == _C.StepState.ENDING:
        session.unfinished = decision
        session.whole.interrupt_step(f"optimizer.step() failed at its end ({error})")
