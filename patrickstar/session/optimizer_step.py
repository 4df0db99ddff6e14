"""The optimizer's step: decided once, from the gradients' norm, and then carried out.

[Note: a step that fails] Where host memory or a disk fails in the middle, a part of the chunks is updated, each of them
wholly (``csrc/engine/update_progress.h``). The same decision is then carried out by the next call, which leaves those
alone; whatever else would use the parameters is refused until then (:mod:`patrickstar.engine.wholeness`). Where nothing
was updated the step is as if it had not been called. A chunk, or PyTorch's own optimizer, that fails in the middle of
an update leaves a mixed state.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from patrickstar import _C
from patrickstar.optimizer.core_options import CoreOptions

if TYPE_CHECKING:
    from patrickstar.engine.session import Session

logger = logging.getLogger("patrickstar")


@dataclasses.dataclass(frozen=True)
class OptimizerLink:
    """Requests of a session to its optimizer; without one there are no groups."""

    expected_options: Callable[[], list[CoreOptions]] = list
    """The options that the next step is expected to use (none: not known)."""
    read_groups: Callable[[], list[dict[str, Any]]] = list
    """Gives the optimizer's groups; a host may put another list in their place."""
    tell_groups: Callable[[], None] = lambda: None
    """Tells the core, and what stays with PyTorch, which parameter is in which of the optimizer's groups."""


@dataclasses.dataclass
class StepOutcome:
    """Result of the last step."""

    grad_norm: float = 0.0
    """Global L2 norm of the unscaled gradients before clipping; not finite when the step was skipped."""
    applied: bool = True
    """Parameters were updated. True before the first step and after loading."""


class Stage(enum.Enum):
    """The part of a step that is done."""

    CHUNKS = enum.auto()
    """Chunks are updated; how many, the core says (``_C.StepState``)."""
    MANAGED = enum.auto()
    """All chunks; PyTorch's optimizer has begun with the parameters that it keeps."""


@dataclasses.dataclass
class Decision:
    """Everything that a step does, so that it can be carried out again."""

    outcome: StepOutcome
    param_groups: list[dict[str, Any]]
    options: list[CoreOptions]
    loss_scale: float
    clip_ratio: float
    """The largest norm allowed over the norm."""
    stage: Stage = Stage.CHUNKS

    @property
    def is_finite(self) -> bool:
        """The gradients have neither infinities nor NaNs."""
        return math.isfinite(self.outcome.grad_norm)


class OptimizerStep:
    """Steps of one session, one after the other."""

    def __init__(self, session: Session):
        self._session = session
        self._failed: Decision | None = None

    def run(self, param_groups: list[dict[str, Any]], options: list[CoreOptions]) -> None:
        """Does one step with these options, or what is left of one that has failed with its own. Without gradients
        nothing happens.
        """
        decision = self._failed
        if decision is None:
            if not self._session.runtime.gradients_pending():
                return
            decision = self._decide(param_groups, options)
        try:
            self._carry_out(decision)
        except BaseException as error:
            self._note_failure(decision, error)
            raise
        self._failed = None
        self._session.whole.end_step()
        self._end(decision)

    def give_up(self) -> None:
        """Drops the gradients of a step that has failed. Values stay mixed."""
        self._failed = None
        self._session.runtime.drop_step()

    def _decide(self, param_groups: list[dict[str, Any]], options: list[CoreOptions]) -> Decision:
        session = self._session
        scale = session.gradients.scale
        norm = session.gradients.norm()
        finite = math.isfinite(norm)
        committed = session.gradients.are_committed
        if committed and not finite:
            logger.warning('the gradients are not finite, and are applied: optimizer.speculation is "commit"')
        outcome = StepOutcome(grad_norm=norm, applied=finite or committed)
        ratio = session.gradients.clip_ratio()
        session.gradient_reads.keep(scale, min(1.0, ratio) if finite else 1.0)
        return Decision(outcome, param_groups, options, scale, ratio)

    def _carry_out(self, decision: Decision) -> None:
        session = self._session
        if not decision.outcome.applied:
            session.runtime.skip_step()
            return
        clip = min(1.0, decision.clip_ratio)
        factor = clip * session.gradients.chunk_factor / decision.loss_scale
        session.runtime.apply_step(decision.options, factor, decision.clip_ratio)
        session.observer.overwritten.forget()
        decision.stage = Stage.MANAGED
        session.managed.step(decision.param_groups, clip / decision.loss_scale)

    def _end(self, decision: Decision) -> None:
        session, scaler = self._session, self._session.scaler
        session.outcome = decision.outcome
        if not decision.outcome.applied:
            if scaler is None:
                logger.warning("the gradients are not finite: this step is skipped, nothing was updated")
            elif scaler.is_at_minimum:
                logger.warning(
                    "gradients overflow at the least loss scale, %g: this step is skipped", decision.loss_scale
                )
        if scaler is not None:
            scaler.update(overflow=not decision.is_finite)
        session.end_step(decision.param_groups[0]["lr"])

    def _note_failure(self, decision: Decision, error: BaseException) -> None:
        session = self._session
        if session.runtime.closed:
            return
        state = session.runtime.step_state
        if decision.stage is Stage.MANAGED or state == _C.StepState.TORN:
            session.whole.break_up(f"optimizer.step() failed in the middle of an update ({error})")
        elif state == _C.StepState.UPDATING:
            self._failed = decision
            session.whole.interrupt_step(
                f"optimizer.step() failed when {session.runtime.num_committed} chunks had been updated ({error})"
            )
        elif state == _C.StepState.ENDING:
            self._failed = decision
            session.whole.interrupt_step(f"optimizer.step() failed at its end ({error})")
