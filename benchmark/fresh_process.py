"""Runs a function in a fresh process, so that runs do not affect each other."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """Returns ``function(*args)`` from a new process; function, arguments and result are pickled.

    Raises:
        RuntimeError: the process ended before it returned; its traceback is on stderr.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_send, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"its process ended with {process.exitcode}") from None
    finally:
        process.join()


def _send(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    sender.send(function(*args))
    sender.close()
    sys.stderr.flush()
    os._exit(0)  # closing an engine would first copy the model out of its chunks
