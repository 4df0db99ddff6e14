"""Periodic checkpoints of a run, its end after a preemption signal, and its resumption.

with SavedRun(engine, "runs/a", lr_scheduler=scheduler, grace_seconds=120) as run:
    begin = run.client_state.get("step", 0)
    for step in range(begin, num_steps):
        ...
        run.after_step({"step": step + 1})
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from patrickstar.checkpoint import latest_tag, tags
from patrickstar.checkpoint.folder import remove_checkpoint
from patrickstar.engine.engine import Engine
from patrickstar.engine.preemption import AbandonedStepError, Grace, WholeStep, check_launcher
from patrickstar.ranks.messages import reading
from patrickstar.session.interrupts import is_within_call
from patrickstar.sizes import show_seconds, show_size
from patrickstar.state.save_load import Scheduler

logger = logging.getLogger("patrickstar")

EXIT_PREEMPTED = os.EX_TEMPFAIL
"""Exit status of a process that saved its run because of a signal: 75, "try again"."""
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_STOP, _SAVE, _GO_ON = "stop", "save", ""


class SavedRun:
    """See the module's docstring. A context that resumes the latest checkpoint in ``directory``, if there is one, and
    receives signals. All ranks make the same calls.

    After a signal the step is finished, if it and a save fit into ``grace_seconds`` by the run's own times. Otherwise
    it is undone: gradients are dropped, and the state after the last whole step is saved. One rank leaves the step
    within forward; several ranks do so after the backward of a micro-batch.

    Args:
        engine: of the run.
        directory: of checkpoints, created if missing.
        lr_scheduler: whose state is saved and loaded too. ``patrickstar.initialize`` has its own: leave it out there.
        minutes: between two saves, by the first rank's clock; training goes on meanwhile. 0: no such saves.
        keep: complete checkpoints ``global_step<n>`` that stay when the next save begins; older ones are removed.
        signals: after which the run is saved and the process ends. One rank's is enough.
        grace_seconds: from a signal until the scheduler kills the process; None: unknown, steps are finished.

    Attributes:
        client_state: of the checkpoint that was resumed; empty if there was none.

    Raises:
        ValueError: ``keep``, ``minutes`` or ``grace_seconds`` is out of range.
    """

    _unfinished = ".saving-*/*"  # pattern of files of a save that goes on

    def __init__(
        self,
        engine: Engine,
        directory: str | os.PathLike[str],
        *,
        lr_scheduler: Scheduler | None = None,
        minutes: float = 60.0,
        keep: int = 2,
        signals: Sequence[signal.Signals] = _SIGNALS,
        grace_seconds: float | None = None,
    ):
        if keep < 1 or minutes < 0:
            raise ValueError(f"SavedRun: keep is {keep} and minutes is {minutes}; keep at least 1, 0 minutes or more")
        if grace_seconds is not None and not grace_seconds > 0:
            raise ValueError(f"SavedRun: grace_seconds is {grace_seconds}; give more than 0, or None if it is unknown")
        self._engine, self._directory = engine, Path(directory)
        self._scheduler: dict[str, Any] = {} if lr_scheduler is None else {"lr_scheduler": lr_scheduler}
        self._seconds, self._keep = minutes * 60, keep
        self._signals, self._handlers = tuple(signals), {}
        self._grace = Grace(grace_seconds)
        self._whole: WholeStep | None = None
        self._timer: threading.Timer | None = None
        self._saved_at = time.monotonic()
        self.client_state: dict[str, Any] = {}

    def __enter__(self) -> SavedRun:
        """Resumes the run.

        Raises:
            CheckpointError: the latest checkpoint cannot be loaded.
        """
        self._handlers = {number: signal.signal(number, self._receive) for number in self._signals}
        try:
            self._load()
        except BaseException:
            self._give_back_handlers()
            raise
        self._grace.begin_step()
        if self._grace.seconds is not None:
            if self._is_first and (warning := check_launcher(self._grace.seconds)):
                logger.warning(warning)
            self._whole = WholeStep.of(self._session, self.client_state)
            self._session.owner.after_backward = self._after_backward
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._session.owner.after_backward = None
        try:
            if isinstance(error, AbandonedStepError) and self._whole is not None:
                self._engine.zero_grad()
                self._whole.put_back(self._session)
                logger.warning("the step after step %d does not fit, and is undone", self._whole.num_steps)
                self._end(self._whole.client_state, self._grace.left)
            if isinstance(error, Exception) and self._grace.was_told:
                self._tell_lost(error)
        finally:
            self._stop_timer()
            self._give_back_handlers()

    def after_step(self, client_state: Mapping[str, Any]) -> None:
        """Call it after each optimizer step. Saves ``client_state`` with the run, if it is time or a signal came.

        Raises:
            SystemExit: with :data:`EXIT_PREEMPTED`, on all ranks, after a signal. The run is saved.
            CheckpointError: a save failed.
        """
        self._grace.end_step()
        wish = _SAVE if 0 < self._seconds <= time.monotonic() - self._saved_at else _GO_ON
        told = self._exchange([_STOP if self._grace.was_told else wish, self._grace.left])
        if any(said == _STOP for said, _ in told):
            self._end(client_state, min((left for _, left in told if left is not None), default=None))
        if told[0][0] == _SAVE:
            self._save(client_state, wait=False)
        if self._grace.seconds is not None:
            self._whole = WholeStep.of(self._session, client_state)
        self._grace.begin_step()

    @staticmethod
    def detach_worker(_worker: int = 0) -> None:
        """Gives a DataLoader's worker process a process group of its own: for ``worker_init_fn``. torchrun signals a
        rank's whole group, and a rank whose worker ends raises an error before it is saved.
        """
        os.setpgid(0, 0)

    @property
    def _session(self) -> Any:
        return self._engine._session

    @property
    def _is_first(self) -> bool:
        return self._session.ranks.control.rank == 0

    def _exchange(self, mine: list[Any]) -> list[Any]:
        """Each rank's list of two."""
        with self._session.guard("a call of a saved run"):
            told = self._session.ranks.control.exchange(json.dumps(mine).encode(), "saves and signals")
        with reading("saves and signals"):
            lists = [json.loads(message) for message in told]
            return [(first, second) for first, second in lists]

    def _after_backward(self) -> None:
        """Raises AbandonedStepError on all ranks if a signal came and the rest of the step does not fit."""
        told = self._exchange([self._grace.left, self._needed()])
        lefts = [left for left, _ in told if left is not None]
        if lefts and max(needed for _, needed in told) > min(lefts) and self._can_undo():
            raise AbandonedStepError

    def _needed(self) -> float:
        return self._grace.needed(self._session.saves.seconds)

    def _can_undo(self) -> bool:
        return self._whole is not None and self._whole.can_return(self._session)

    def _end(self, client_state: Mapping[str, Any], left: float | None) -> NoReturn:
        """Saves and ends the process. ``left``: seconds until it is killed; None: unknown."""
        began = time.monotonic()
        if left is not None:
            self._tell_after(left)
        self._save(client_state, wait=True)
        self._stop_timer()
        took = time.monotonic() - began
        if self._is_first:
            late = f", {show_seconds(took - left)} after grace_seconds" if left is not None and took > left else ""
            text = "a signal came: the run is saved in %s%s and ends with status %d"
            logger.warning(text, self._directory, late, EXIT_PREEMPTED)
        end = SystemExit(EXIT_PREEMPTED)
        end.on_all_ranks = True  # type: ignore[attr-defined]
        raise end

    def _tell_after(self, seconds: float) -> None:
        """Lets the first rank log, when the time is over, that the run is not saved yet."""
        if self._timer is None and self._is_first:
            self._timer = threading.Timer(max(seconds, 0.0), self._tell_missing)
            self._timer.daemon = True
            self._timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tell_missing(self) -> None:
        written = 0
        with contextlib.suppress(OSError):  # the folder gets its name meanwhile
            written = sum(path.stat().st_size for path in self._directory.glob(self._unfinished))
        logger.error(
            "grace_seconds (%g) are over and the run is not saved yet, %s are written; killed now, it goes on from %s",
            self._grace.seconds, show_size(written), self._last_complete() or "its begin",
        )  # fmt: skip

    def _tell_lost(self, error: Exception) -> None:
        """Logs that ``error`` came between a signal and the save."""
        remedy = "; give the DataLoader worker_init_fn=patrickstar.SavedRun.detach_worker: torchrun signals its workers"
        logger.error(
            "a signal came, and %s ended the run before it was saved; the next start goes on from %s%s",
            type(error).__name__, self._last_complete() or "its begin",
            remedy if "DataLoader worker" in str(error) else "",
        )  # fmt: skip

    def _load(self) -> None:
        if latest_tag(self._directory) is not None:
            self.client_state = self._engine.load_checkpoint(self._directory, **self._scheduler)[1]

    def _save(self, client_state: Mapping[str, Any], *, wait: bool) -> None:
        self._engine.wait_for_save()
        if self._is_first:
            self._remove_old()
        self._engine.save_checkpoint(self._directory, None, client_state, **self._scheduler, wait=wait)
        self._saved_at = time.monotonic()

    def _last_complete(self) -> str | None:
        """Name of the checkpoint from which the next start goes on; None: there is none."""
        return latest_tag(self._directory)

    def _remove_old(self) -> None:
        found = [re.fullmatch(r"global_step(\d+)", tag) for tag in tags(self._directory)]
        steps = sorted(int(match[1]) for match in found if match is not None)
        for step in steps[: -self._keep]:
            with contextlib.suppress(OSError):
                remove_checkpoint(self._directory / f"global_step{step}")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._grace.tell()
        left = self._grace.left
        if left is not None:
            self._tell_after(left)
        is_alone = self._session.ranks.control.size == 1
        if left is not None and is_alone and is_within_call() and self._needed() > left and self._can_undo():
            raise AbandonedStepError

    def _give_back_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
