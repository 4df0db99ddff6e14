"""What a build prints: a line for each file that is compiled; with V=1 in the environment, its command.

PyTorch runs `ninja -v`, which prints the whole command of every file. What else comes that way is passed on as it is:
a compiler's warnings and errors, and the command that failed.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

_IDLE = b"ninja: no work to do.\n"


def wants_commands() -> bool:
    """Whether V=1 asks for whole commands."""
    return os.environ.get("V") == "1"


def shortened(line: bytes, sources: Path) -> bytes:
    """A line of ninja's; of one that compiles a file below `sources`, how far the build is and the file."""
    if line == _IDLE:
        return b""
    folder = re.escape(os.fsencode(sources))
    found = re.match(rb"(\[\d+/\d+\]) .* -c '?" + folder + rb"/([^\s']+)'? -o ", line)
    return b"%s %s\n" % found.groups() if found else line


@contextlib.contextmanager
def short_lines(sources: Path) -> Iterator[None]:
    """Shortens what this process and those it starts write to standard output meanwhile."""
    if wants_commands():
        yield
        return
    sys.stdout.flush()
    reading, writing = os.pipe()
    printed = os.dup(1)
    os.dup2(writing, 1)
    os.close(writing)
    thread = threading.Thread(target=_pass_on, args=(reading, printed, sources), daemon=True)
    thread.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(printed, 1)
        thread.join(timeout=10)  # a compiler's server, such as sccache's, may hold the pipe open for ever


def _pass_on(reading: int, printed: int, sources: Path) -> None:
    with open(reading, "rb") as lines, open(printed, "wb", buffering=0) as output:
        for line in lines:
            output.write(shortened(line, sources))
