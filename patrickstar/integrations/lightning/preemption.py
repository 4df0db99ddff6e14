"""Signals of a scheduler to a fit.

    keep = ModelCheckpoint("runs/fit", save_on_exception=True, save_last=True)
    trainer = Trainer(strategy="patrickstar", callbacks=[keep, Preemption()])
    trainer.fit(module, loader, ckpt_path="last")

After SIGTERM or SIGUSR1, on any rank, all ranks finish the step, ``ModelCheckpoint`` saves, and the processes end with
status 75. The same command goes on. Lightning alone ends after a micro-batch, where an engine cannot be saved, and with
status 0.
"""

from __future__ import annotations

from typing import Any

from patrickstar.engine.saved_run import EXIT_PREEMPTED, SavedRun
from patrickstar.integrations.lightning.package import pl


class Preemption(pl.Callback):
    """See the module's docstring.

    Raises:
        ValueError: when training begins, if no ``ModelCheckpoint`` would save.
    """

    def __init__(self) -> None:
        self._run: _Fit | None = None
        self._num_steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Receives signals in place of Lightning."""
        if not any(getattr(each, "save_on_exception", False) for each in trainer.checkpoint_callbacks):
            raise ValueError(
                "Preemption needs a ModelCheckpoint that saves then: give ModelCheckpoint(save_on_exception=True, "
                "save_last=True)"
            )
        self._num_steps = trainer.global_step
        self._run = _Fit(trainer)
        self._run.__enter__()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Ends the fit after a whole step if a signal came to a rank."""
        if self._run is not None and trainer.global_step != self._num_steps:
            self._num_steps = trainer.global_step
            self._run.after_step({})

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Sets the status; ``ModelCheckpoint`` saves after this callback."""
        if self._run is not None and self._run.ends and isinstance(exception, SystemExit):
            exception.code = EXIT_PREEMPTED
            exception.on_all_ranks = True  # type: ignore[attr-defined]
        self._end(exception)

    def on_train_end(self, *_: Any) -> None:
        """Restores the handlers."""
        self._end(None)

    def _end(self, exception: BaseException | None) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.__exit__(None if exception is None else type(exception), exception, None)


class _Fit(SavedRun):
    """Lets Lightning's loop end as after its own signal."""

    def __init__(self, trainer: Any):
        super().__init__(trainer.strategy.engine, trainer.default_root_dir, minutes=0)
        self._trainer = trainer
        self.ends = False

    def _load(self) -> None:
        """Does nothing: Lightning loads."""

    def _end(self, client_state: Any, left: float | None) -> None:  # type: ignore[override]
        self.ends = True
        self._trainer._signal_connector.received_sigterm = True

    def _last_complete(self) -> str | None:
        return self._trainer.checkpoint_callback.last_model_path or None
