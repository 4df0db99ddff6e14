"""Peak of a process's own memory in tests' subprocesses."""

import re
import threading
import time
from pathlib import Path


def own_bytes() -> int:
    """Resident bytes of the process, without mapped files."""
    text = Path("/proc/self/status").read_text()
    return 1024 * sum(int(size) for size in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", text))


class PeakMemory:
    """Context that samples :func:`own_bytes` each millisecond.

    Attributes:
        peak, end: bytes above those at the beginning: the most, and those at the end.
    """

    def __enter__(self) -> "PeakMemory":
        self._before = own_bytes()
        self.peak = self.end = 0
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def _watch(self) -> None:
        while not self._done.is_set():
            self.peak = max(self.peak, own_bytes() - self._before)
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watcher.join()
        self.end = own_bytes() - self._before
        self.peak = max(self.peak, self.end)
