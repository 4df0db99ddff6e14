"""One call of an engine at a time, from any thread.

    thread = OneThread()
    with thread.hold("forward of step 3"):
        ...
    thread.check_inside()   # a call of the module within a call of the engine

Threads may take turns: a forward on one, its backward on another. Concurrent calls would see each other's half-done
forward. Work on autograd's own threads (on a GPU) belongs to the backward that waits for it.
"""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from patrickstar import _C


class OneThread:
    """The thread in a call of one engine, and that call."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder = ""
        self._holder_id = 0
        self._call = ""

    def hold(self, call: str) -> _Hold:
        """Wraps ``call``. Nested calls, also on autograd's threads, belong to it.

        Raises:
            StateError: another thread is in a call of this engine.
        """
        return _Hold(self, call)

    def check_inside(self) -> None:
        """Raises StateError if the running call belongs to another thread that is not autograd's."""
        if self._holder_id != threading.get_ident() and not _is_autograds():
            self._refuse("a call of the module")

    def _refuse(self, call: str) -> None:
        raise _C.StateError(
            f"{call} on thread {threading.current_thread().name!r}, while this engine's {self._call or 'last call'} "
            f"runs on thread {self._holder!r}: an engine has one call at a time; put a lock around its calls, or give "
            "each thread an engine of its own"
        )


class _Hold:
    def __init__(self, thread: OneThread, call: str):
        self._thread = thread
        self._call = call
        self._is_outermost = False
        self._is_held = False

    def __enter__(self) -> None:
        thread = self._thread
        if not thread._lock.acquire(blocking=False):
            if _is_autograds():
                return
            thread._refuse(self._call)
        self._is_held = True
        self._is_outermost = not thread._call
        if self._is_outermost:
            thread._holder_id, thread._holder = threading.get_ident(), threading.current_thread().name
            thread._call = self._call

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_outermost:
            self._thread._call = ""
        if self._is_held:
            self._thread._lock.release()


def _is_autograds() -> bool:
    """True if this thread runs a part of a backward."""
    return torch._C._current_graph_task_id() != -1
