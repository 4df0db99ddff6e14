"""Jobs as ``patrickstar ones status`` shows them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Row:
    """A job as ``status`` shows it."""

    name: str
    state: str
    """Waiting, a phase of the fleet, or the final state."""
    num_gpus: int
    gpu_type: str
    """Empty: none, or unknown."""
    global_batch: int
    """0: not started."""
    noise_scale: float
    """In samples; 0: unknown."""
    num_steps: int
    seconds_per_step: float
    """0: not measured yet."""
    loss: float | None
    num_resizes: int
    resize_s: float
    """Seconds of its last resize."""
    num_failures: int
    note: str


def in_a_line(note: str) -> str:
    """The first and the last line of a note: what happened, and the error at the end of a process's output."""
    lines = [line.strip() for line in note.strip().splitlines() if line.strip()]
    return " ".join(lines if len(lines) < 2 else (lines[0], lines[-1]))
