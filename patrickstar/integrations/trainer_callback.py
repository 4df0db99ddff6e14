"""The callback that a ``Trainer`` with an engine adds to its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import IntervalStrategy, TrainerCallback, TrainerState, TrainingArguments

if TYPE_CHECKING:
    from patrickstar.engine.engine import Engine
    from patrickstar.monitor import StallSampler


class EngineCallback(TrainerCallback):
    """Traces the step before a log, on the process that logs. Completes the last save when training ends."""

    def __init__(self, engine: Callable[[], Engine]):
        """``engine``: the trainer's, once it is made."""
        self._engine_of = engine
        self._engine: Engine | None = None
        self.sampler: StallSampler | None = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Counts steps towards the next log."""
        if not state.is_world_process_zero or args.logging_strategy != IntervalStrategy.STEPS:
            return
        if self._engine is not self._engine_of():
            self._engine = self._engine_of()
            self.sampler = self._engine.make_stall_sampler()
        every = max(state.logging_steps, 1)
        self.sampler.end_step(steps_until_line=-state.global_step % every, steps_per_line=every)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Waits for a save that goes on."""
        self._engine_of().wait_for_save()
