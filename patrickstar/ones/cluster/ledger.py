"""What a scheduler must know when it comes back: submissions, and what became of them, line by line in a file.

A line is on the disk before what it says is done, so a scheduler that was killed finds every job that it accepted. What
runs is not in it: that is asked of the fleet, which outlives the scheduler.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import time
from pathlib import Path

from patrickstar.ones.cluster.submission import Submission
from patrickstar.ranks.private_files import append_private


class End(enum.Enum):
    """How a job ended."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclasses.dataclass
class Entry:
    """A job in the ledger."""

    submission: Submission
    submitted_s: float
    """Seconds since 1970."""
    num_failures: int = 0
    """Of its processes, after which it was started again from its checkpoint."""
    end: End | None = None
    reason: str = ""
    """Of its last failure."""


class LedgerError(RuntimeError):
    """The file is no ledger, or one of its lines is damaged."""


class Ledger:
    """An append-only file of JSON lines. One process writes it.

    Args:
        path: made if there is none, with mode 0600. A last line that was cut off by a crash is taken back.

    Raises:
        LedgerError: another line cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.entries: dict[str, Entry] = {}
        whole = self._read()
        self._file = os.fdopen(append_private(self._path), "ab")
        self._file.truncate(whole)

    def submitted(self, submission: Submission) -> None:
        """Accepts a job.

        Raises:
            ValueError: there is one of that name.
        """
        if submission.name in self.entries:
            raise ValueError(f"there is a job {submission.name} already; give another name")
        self._add({"event": "submitted", "job": submission.as_plain()})

    def failed(self, name: str, reason: str) -> None:
        """Its processes have failed; it will be started again."""
        self._add({"event": "failed", "name": name, "reason": reason})

    def ended(self, name: str, end: End, reason: str = "") -> None:
        """It will not run again."""
        self._add({"event": "ended", "name": name, "end": end.value, "reason": reason})

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _add(self, fields: dict[str, object]) -> None:
        fields["time"] = time.time()
        self._file.write(json.dumps(fields).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._apply(fields)

    def _read(self) -> int:
        """The bytes of whole lines."""
        whole = 0
        data = self._path.read_bytes() if self._path.exists() else b""
        for number, line in enumerate(data.splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                break
            try:
                self._apply(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise LedgerError(
                    f"line {number} of {self._path} is no line of a ledger ({error!r}); give another file, or repair it"
                ) from error
            whole += len(line)
        return whole

    def _apply(self, fields: dict) -> None:
        if fields["event"] == "submitted":
            submission = Submission.of(fields["job"])
            self.entries[submission.name] = Entry(submission, fields["time"])
            return
        entry = self.entries[fields["name"]]
        entry.reason = fields["reason"]
        if fields["event"] == "failed":
            entry.num_failures += 1
        else:
            entry.end = End(fields["end"])
