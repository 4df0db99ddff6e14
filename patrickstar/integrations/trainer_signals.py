"""Signals of a scheduler to a ``Trainer`` with an engine, whose configuration has ``"resume": "auto"``.

After SIGTERM or SIGUSR1 the step is finished or undone as :class:`patrickstar.SavedRun` does. The Trainer then saves a
checkpoint, and all ranks end with status 75. The next start resumes the last complete checkpoint by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments

from patrickstar.engine.saved_run import SavedRun
from patrickstar.integrations.decided_config import TRAINER_KEYS
from patrickstar.integrations.engine_states import CHECKPOINT_FOLDER, last_complete


def signals_of(trainer: Any, config: dict[str, Any]) -> TrainerSignals | None:
    """Removes ``resume`` and ``grace_seconds`` from ``config``; None if there is no ``resume``.

    Raises:
        ValueError: ``resume`` has another value than ``"auto"``, or ``grace_seconds`` comes without it.
    """
    resume, grace_seconds = (config.pop(key, None) for key in TRAINER_KEYS)
    if resume not in ("auto", None):
        raise ValueError(f"resume is {resume!r}; give 'auto', or a path as train's resume_from_checkpoint")
    if resume is None and grace_seconds is not None:
        raise ValueError("grace_seconds has no effect without 'resume': 'auto'; give both")
    return None if resume is None else TrainerSignals(trainer, grace_seconds)


class TrainerSignals(TrainerCallback):
    """Callback of a trainer, and the context of its training."""

    def __init__(self, trainer: Any, grace_seconds: float | None):
        self._trainer, self._grace_seconds = trainer, grace_seconds
        self._held = contextlib.ExitStack()
        self._run: _TrainerRun | None = None

    def __enter__(self) -> None:
        self._held = contextlib.ExitStack()

    def __exit__(self, *error: Any) -> bool | None:
        return self._held.__exit__(*error)

    def on_train_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        """Receives signals from here on; the Trainer has loaded its checkpoint."""
        if args.save_only_model:
            raise ValueError("save_only_model is set, and 'resume': 'auto' needs the optimizer's states; leave one out")
        self._run = self._held.enter_context(_TrainerRun(self._trainer, self._grace_seconds))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Saves and ends the process if a signal came to a rank. After the last step training just ends."""
        if self._run is not None and state.global_step < state.max_steps:
            self._run.after_step({})

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Notes a save of the Trainer."""
        if self._run is not None:
            self._run.saved_step = state.global_step


class _TrainerRun(SavedRun):
    """A run whose checkpoints are the Trainer's."""

    _unfinished = f"checkpoint-*/{CHECKPOINT_FOLDER}/.saving-*/*"

    def __init__(self, trainer: Any, grace_seconds: float | None):
        super().__init__(trainer.engine, trainer.args.output_dir, minutes=0, grace_seconds=grace_seconds)
        self._trainer = trainer
        self.saved_step: int | None = None
        """The step of this training's last save."""

    def _load(self) -> None:
        """Does nothing: the Trainer loads."""

    def _save(self, client_state: Mapping[str, Any], *, wait: bool) -> None:
        if self.saved_step != self._trainer.state.global_step:  # files of a complete save are not written again
            self._trainer._save_checkpoint(self._trainer.model, trial=None)
        self._engine.wait_for_save()

    def _last_complete(self) -> str | None:
        directory = Path(self._trainer.args.output_dir)
        found = last_complete(directory.iterdir()) if directory.is_dir() else None
        return None if found is None else found.name
