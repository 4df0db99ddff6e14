"""A checkpoint that a thread completes while training goes on.

    session.saves.start("checkpoint global_step1000", work)    # work: runs in the thread
    session.saves.check()     # in each step: raises the failure of a save that is over, on all ranks in the same step
    session.saves.finish()    # waits

The thread uses no part of the engine but memory that is lent to it. It is no daemon: a process that ends waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("patrickstar")


class BackgroundSave:
    """See the module's docstring. At most one save runs at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.seconds = 0.0
        """Duration of the last save's thread; 0: there was none."""
        self.control: Any = None
        """Control group of the ranks for the thread; None until a save needs it."""

    @property
    def is_running(self) -> bool:
        """True until :meth:`check` or :meth:`finish` has seen the end."""
        return self._thread is not None

    def start(self, what: str, work: Callable[[], object]) -> None:
        """Runs ``work`` in a thread, named ``what``. No other save may run."""
        self._thread = threading.Thread(target=self._run, args=(work,), name=what)
        self._thread.start()

    def check(self, control: Any) -> None:
        """Raises the failure of a save that is over on all ranks. Collective if a save runs.

        Args:
            control: the control group of the ranks that save together.
        """
        if self._thread is None:
            return
        is_over = not self._thread.is_alive()
        if all(told == b"over" for told in control.exchange(b"over" if is_over else b"runs", "the state of the save")):
            self.finish()

    def finish(self) -> None:
        """Waits until the save is over, and raises its failure."""
        self.wait()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def wait(self) -> None:
        """Waits until the save is over; its failure is kept."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, work: Callable[[], object]) -> None:
        began = time.monotonic()
        try:
            work()
            self.seconds = time.monotonic() - began
        except BaseException as error:
            self._failure = error
            logger.error("%s failed: %s", threading.current_thread().name, error)
