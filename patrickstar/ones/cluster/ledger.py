"""The scheduler's persistent state: submissions and their results, line by line in a file.

A line is on the disk before its effect, so a restarted scheduler finds every accepted job. Running processes are not in
it: the fleet, which outlives the scheduler, reports them.
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
    """Final states of a job."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements of a job, by the scheduler."""

    num_steps: int = 0
    loss: float = 0.0
    """The last one; 0: none."""
    observed: dict[tuple[int, int], float] = dataclasses.field(default_factory=dict)
    """Seconds of a step by number of ranks and global batch."""
    done_samples: float = 0.0
    """Progress, in samples of the first batch."""
    noise_scale: float = 0.0
    """The gradient noise scale, in samples; 0: not measured."""
    num_parameters: int = 0
    """Parameters of its model; 0: not reported."""

    def as_plain(self) -> dict[str, object]:
        """In JSON's types."""
        return {**dataclasses.asdict(self), "observed": [[*key, seconds] for key, seconds in self.observed.items()]}

    @staticmethod
    def of(plain: dict, first_batch: int) -> Measured:
        """The inverse of :meth:`as_plain`. In ledgers of earlier versions all steps have the first batch."""
        rows = [(row[0], row[1] if len(row) == 3 else first_batch, row[-1]) for row in plain["observed"]]
        num_steps = int(plain["num_steps"])
        return Measured(
            num_steps,
            float(plain["loss"]),
            {(int(ranks), int(batch)): float(seconds) for ranks, batch, seconds in rows},
            float(plain.get("done_samples", num_steps * first_batch)),
            float(plain.get("noise_scale", 0.0)),
            int(plain.get("num_parameters", 0)),
        )


@dataclasses.dataclass
class Entry:
    """A job in the ledger."""

    submission: Submission
    submitted_s: float
    """Seconds since 1970."""
    num_failures: int = 0
    """Failures of its processes, after each of which it was restarted from its checkpoint."""
    end: End | None = None
    reason: str = ""
    """Reason of its last failure."""
    measured: Measured = dataclasses.field(default_factory=Measured)
    """Measurements of a job that ended; empty for others."""


class LedgerError(RuntimeError):
    """The file is no ledger, or one of its lines is damaged."""


class Ledger:
    """An append-only file of JSON lines, with one writing process.

    Args:
        path: created with mode 0600 if absent. A last line cut off by a crash is removed.

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
        """Records an accepted job.

        Raises:
            ValueError: its name is in use.
        """
        if submission.name in self.entries:
            raise ValueError(f"there is a job {submission.name} already; give another name")
        self._add({"event": "submitted", "job": submission.as_plain()})

    def failed(self, name: str, reason: str) -> None:
        """Records a failure; the job will be restarted."""
        self._add({"event": "failed", "name": name, "reason": reason})

    def ended(self, name: str, end: End, reason: str = "", measured: Measured | None = None) -> None:
        """Records a job's final state."""
        plain = (measured or Measured()).as_plain()
        self._add({"event": "ended", "name": name, "end": end.value, "reason": reason, "measured": plain})

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
        """Reads the entries; returns the number of bytes in whole lines."""
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
            if "measured" in fields:  # ledgers of earlier versions have none
                entry.measured = Measured.of(fields["measured"], entry.submission.global_batch)
