"""Signals at instants that one can name.

A signal whose handler raises (Ctrl-C) may come between any two lines. Where several things must change together (a
step's update, its count and the loss scale; a forward that is over in the core and in Python), it must not:

    with deferred_signals() as signals:
        begin()
        try:
            with signals.allowed():    # the user's code, or something long
                result = call()
        except BaseException:
            abort()
            raise
        end()

Within ``deferred_signals`` a signal waits until the block ends, and is delivered then. Within ``signals.allowed`` it
waits for the next hook of ours (before a module's forward, at a gradient: csrc/bind/interrupts.h), since at other
instants PyTorch itself may be half done with something (a ``torch.no_grad()`` that is being left); a signal that comes
a second time is delivered at once, for a call that hangs. Where no hook comes any more, the call ends, and the block
with it.

[Note: no gap] Once a signal was delivered within ``allowed``, others wait until that block ends. So whoever catches
what comes out of the ``with signals.allowed()`` statement runs with signals deferred, whichever line of it was
interrupted.

Only the main thread gets signals; in every other one nothing happens here. Signals that are left to the system, or
ignored, stay so.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from patrickstar import _C

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
_Handler = Callable[[int, FrameType | None], Any]


class _State:
    """Signals and open blocks; only the main thread changes it."""

    def __init__(self) -> None:
        self.depth = 0
        """Blocks of ``deferred_signals`` that are open."""
        self.is_open = False
        """Whether the innermost block is one of ``allowed``, in which nothing was delivered yet."""
        self.handlers: dict[int, _Handler] = {}
        """The user's handlers, by signal number."""
        self.waiting: dict[int, FrameType | None] = {}
        """Signals that have come, in their order, each once."""


_state = _State()


def _receive(signum: int, frame: FrameType | None) -> None:
    """Stands where the user's handler was. Before a block has begun and after it has ended it hands on at once."""
    if _state.depth == 0:
        _state.waiting.setdefault(signum, frame)
        _deliver()
    elif _state.is_open and signum in _state.waiting:
        _deliver()
    else:
        _state.waiting.setdefault(signum, frame)
        _C.set_interrupt_waiting(_state.is_open)


def _deliver() -> None:
    """Signals that are waiting; the first that raises is the last."""
    was_open, _state.is_open = _state.is_open, False  # [Note: no gap]
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
    """On autograd's threads nothing is delivered: the backward goes on to its end."""
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
        if signal.getsignal(signum) is _receive:  # else somebody has set another one meanwhile
            signal.signal(signum, handler)


class deferred_signals:  # noqa: N801 (used as a function)
    """See the module's docstring. Blocks may nest; one within ``signals.allowed`` defers as well, until its own end."""

    def __enter__(self) -> deferred_signals:
        self._is_main = threading.current_thread() is threading.main_thread()
        if not self._is_main:
            return self
        if _state.depth == 0:
            _take_handlers()  # a signal that raises here has begun nothing: see _receive
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
        """Signals come at hooks within it; those that are waiting come as it begins."""
        return _Allowed()


@contextlib.contextmanager
def _notes_of(error: BaseException | None) -> Iterator[None]:
    """A signal that takes the place of ``error`` says what that said."""
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
