"""Periodic checkpoints of a run, its end after a preemption signal, and its resumption.

with SavedRun(engine, "runs/a", lr_scheduler=scheduler) as run:
    begin = run.resume().get("step", 0)
    for step in range(begin, num_steps):
        ...
        run.after_step({"step": step + 1})
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from patrickstar.checkpoint import latest_tag, tags
from patrickstar.checkpoint.folder import remove_checkpoint
from patrickstar.engine.engine import Engine
from patrickstar.state.save_load import Scheduler

logger = logging.getLogger("patrickstar")

EXIT_PREEMPTED = os.EX_TEMPFAIL
"""Exit status of a process that saved its run because of a signal: 75, "try again"."""
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_STOP, _SAVE, _GO_ON = b"stop", b"save", b""


class SavedRun:
    """See the module's docstring. A context that receives signals; all ranks make the same calls.

    Args:
        engine: of the run.
        directory: of checkpoints, created if missing.
        lr_scheduler: whose state is saved too.
        minutes: between two saves, by the first rank's clock; training goes on meanwhile. 0: no such saves.
        keep: complete checkpoints ``global_step<n>`` that stay when the next save begins; older ones are removed.
        signals: after which the run is saved and the process ends. One rank's is enough.

    Raises:
        ValueError: ``keep`` or ``minutes`` is out of range.
    """

    def __init__(
        self,
        engine: Engine,
        directory: str | os.PathLike[str],
        *,
        lr_scheduler: Scheduler | None = None,
        minutes: float = 60.0,
        keep: int = 2,
        signals: Sequence[signal.Signals] = _SIGNALS,
    ):
        if keep < 1 or minutes < 0:
            raise ValueError(f"SavedRun: keep is {keep} and minutes is {minutes}; keep at least 1, 0 minutes or more")
        self._engine, self._directory, self._scheduler = engine, Path(directory), lr_scheduler
        self._seconds, self._keep = minutes * 60, keep
        self._signals, self._handlers = tuple(signals), {}
        self._was_told = False
        self._saved_at = time.monotonic()

    def __enter__(self) -> SavedRun:
        self._handlers = {number: signal.signal(number, self._receive) for number in self._signals}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def resume(self) -> dict[str, Any]:
        """Loads the latest checkpoint and returns its ``client_state``; empty if nothing was saved yet.

        Raises:
            CheckpointError: it cannot be loaded.
        """
        if latest_tag(self._directory) is None:
            return {}
        return self._engine.load_checkpoint(self._directory, lr_scheduler=self._scheduler)[1]

    def after_step(self, client_state: Mapping[str, Any]) -> None:
        """Call it after each optimizer step. Saves ``client_state`` with the run, if it is time or a signal came.

        Raises:
            SystemExit: with :data:`EXIT_PREEMPTED`, on all ranks, after a signal. The run is saved.
            CheckpointError: a save failed.
        """
        now = time.monotonic()
        wish = _SAVE if 0 < self._seconds <= now - self._saved_at else _GO_ON
        session = self._engine._session
        with session.guard("after_step of a saved run"):
            mine = _STOP if self._was_told else wish
            wishes = session.ranks.control.exchange(mine, "saves and signals")
        if _STOP in wishes:
            self._save(client_state, wait=True)
            if session.ranks.control.rank == 0:
                text = "a signal came: the run is saved in %s and ends with status %d"
                logger.warning(text, self._directory, EXIT_PREEMPTED)
            end = SystemExit(EXIT_PREEMPTED)
            end.on_all_ranks = True  # type: ignore[attr-defined]
            raise end
        if wishes[0] == _SAVE:
            self._save(client_state, wait=False)

    def _save(self, client_state: Mapping[str, Any], *, wait: bool) -> None:
        self._engine.wait_for_save()
        if self._engine._session.ranks.control.rank == 0:
            self._remove_old()
        self._engine.save_checkpoint(self._directory, None, client_state, lr_scheduler=self._scheduler, wait=wait)
        self._saved_at = time.monotonic()

    def _remove_old(self) -> None:
        found = [re.fullmatch(r"global_step(\d+)", tag) for tag in tags(self._directory)]
        steps = sorted(int(match[1]) for match in found if match is not None)
        for step in steps[: -self._keep]:
            with contextlib.suppress(OSError):
                remove_checkpoint(self._directory / f"global_step{step}")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._was_told = True
