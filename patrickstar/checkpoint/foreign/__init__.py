"""Reads checkpoints of other programs, without importing or running what they name."""

from patrickstar.checkpoint.foreign.content import ForeignCheckpoint, Receiver
from patrickstar.checkpoint.foreign.folders import ForeignFolder, find_foreign, open_checkpoint

__all__ = ["ForeignCheckpoint", "ForeignFolder", "Receiver", "find_foreign", "open_checkpoint"]
