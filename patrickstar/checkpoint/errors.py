"""The error of checkpoints."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint was not saved, is damaged, or belongs to another model; the message says which, and what to do."""

    on_all_ranks = False
    """True if all ranks raise it together, and can go on together."""
