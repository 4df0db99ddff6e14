"""Delivery of Python signals at safe points of an engine's calls.

A signal whose handler raises (Ctrl-C) may arrive between any two lines. Changes that belong together (a step's update,
its count and the loss scale; the end of a forward in the core and in Python) must not be split:

    with deferred_signals() as signals:
        begin()
        try:
            with signals.allowed():    # the user's code, or something long
                result = call()
        except BaseException:
            abort()
            raise
        end()

Within ``deferred_signals`` a signal waits until the block ends. Within ``signals.allowed`` it waits for the next hook:
before a module's forward, or at a gradient (csrc/bind/interrupts.h). At other points PyTorch may be inside a
``torch.no_grad()`` or similar. A second signal of the same number is delivered at once, for a call that hangs. If no
hook follows, the signal is delivered at the block's end.

Once a signal was delivered within ``allowed``, others wait until that block ends. So an ``except`` around ``with
signals.allowed()`` always runs with signals deferred, wherever the block was interrupted.

Only the main thread receives signals; on other threads these blocks do nothing. Ignored signals and those with the
system's default handler are left alone.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from patrickstar import _C

_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGALRM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,  # a DataLoader's handler raises when a worker process ends
)
_Handler = Callable[[int, FrameType | None], Any]


class _State:
    """Signals and open blocks; changed by the main thread only."""

    def __init__(self) -> None:
        self.depth = 0
        """Number of open ``deferred_signals`` blocks."""
        self.is_open = False
        """True if the innermost block is an ``allowed`` one in which nothing was delivered yet."""
        self.handlers: dict[int, _Handler] = {}
        """The user's handlers by signal number."""
        self.waiting: dict[int, FrameType | None] = {}
        """Pending signals in order of arrival, each once."""


_state = _State()


def _receive(signum: int, frame: FrameType | None) -> None:
    """Replaces the user's handler. Outside of all blocks it delivers at once."""
    if _state.depth == 0:
        _state.waiting.setdefault(signum, frame)
        _deliver()
    elif _state.is_open and signum in _state.waiting:
        _deliver()
    else:
        _state.waiting.setdefault(signum, frame)
        _C.set_interrupt_waiting(_state.is_open)


def _deliver() -> None:
    """Delivers pending signals; stops at the first handler that raises."""
    was_open, _state.is_open = _state.is_open, False
    waiting, _state.waiting = _state.waiting, {}
    _C.set_interrupt_waiting(False)
    for signum, frame in waiting.items():
        try:
            _state.handlers[signum](signum, frame)
        except BaseException as error:
            error.raised_by_signal = True  # type: ignore[attr-defined]  # patrickstar.ranks.failures.is_interrupt
            raise
    _state.is_open = was_open


def _deliver_at_hook() -> None:
    """Called by hooks. On autograd's threads nothing is delivered: the backward runs to its end."""
    if _state.is_open and threading.current_thread() is threading.main_thread():
        _deliver()


_C.set_interrupt_delivery(_deliver_at_hook)


def _take_handlers() -> None:
    for signum in _SIGNALS:
        handler = signal.getsignal(signum)
        if handler is not _receive and callable(handler):
            _state.handlers[signum] = handler
            signal.signal(signum, _receive)


def _give_back_handlers() -> None:
    for signum, handler in _state.handlers.items():
        if signal.getsignal(signum) is _receive:  # else the handler was replaced meanwhile
            signal.signal(signum, handler)


def is_within_call() -> bool:
    """True in a handler that runs within an engine's call, which ends cleanly if the handler raises."""
    return _state.depth > 0


class deferred_signals:  # noqa: N801 (used as a function)
    """See the module's docstring. Blocks nest; one within ``signals.allowed`` defers until its own end."""

    def __enter__(self) -> deferred_signals:
        self._is_main = threading.current_thread() is threading.main_thread()
        if not self._is_main:
            return self
        if _state.depth == 0:
            _take_handlers()  # a signal that raises here has changed nothing: see _receive
        self._was_open, _state.is_open = _state.is_open, False
        _state.depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_main:
            return
        _state.is_open = self._was_open
        _state.depth -= 1
        if _state.depth == 0:
            try:
                _give_back_handlers()
            finally:
                if _state.waiting:
                    with _notes_of(error):
                        _deliver()
        elif _state.waiting:
            _C.set_interrupt_waiting(_state.is_open)

    def allowed(self) -> _Allowed:
        """Delivers signals at hooks within the block, and pending ones at its start."""
        return _Allowed()


@contextlib.contextmanager
def _notes_of(error: BaseException | None) -> Iterator[None]:
    """Copies the notes of ``error`` to a signal's exception that replaces it."""
    try:
        yield
    except BaseException as signal_error:
        for note in getattr(error, "__notes__", ()):
            signal_error.add_note(note)
        raise


class _Allowed:
    def __enter__(self) -> None:
        self._is_main = threading.current_thread() is threading.main_thread()
        if not self._is_main:
            return
        self._was_open = _state.is_open
        if _state.waiting:
            _deliver()
        _state.is_open = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_main:
            return
        _state.is_open = self._was_open
        _C.set_interrupt_waiting(False)
