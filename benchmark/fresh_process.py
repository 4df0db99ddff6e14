"""A function in a process of its own: what one run leaves in a process does not reach the next."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function(*args)`` returns in a new process; both can be pickled.

    Raises:
        RuntimeError: the process ended before; what it raised is on stderr.
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
    os._exit(0)  # a model whose engine is closed would be written out of its chunks first
