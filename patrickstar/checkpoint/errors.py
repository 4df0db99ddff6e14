"""The one error of checkpoints."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint was not saved, or is damaged, or is that of another model; the message says which and what to do."""

    on_all_ranks = False
    """Whether all ranks raise it together, and may go on together."""
