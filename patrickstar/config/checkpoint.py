"""The section ``checkpoint``: this engine's keys, and those of DeepSpeed's."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from patrickstar.config.fates import HONOURED, Reader
from patrickstar.config.other_keys import with_other_keys
from patrickstar.config.values import Memory, Section, Switch


class CheckpointWriterConfig(with_other_keys("checkpoint.writer"), Section):
    """The section ``checkpoint.writer``: how the files of a checkpoint are written."""

    decoupled: Annotated[Switch, HONOURED, Reader.INITIALIZE] = False
    """True: ``save_checkpoint`` returns when values are copied into free host memory, and a thread writes the files
    while training goes on.
    """


class CheckpointConfig(with_other_keys("checkpoint"), Section):
    """The section ``checkpoint``: how checkpoints of the training state are saved and loaded."""

    host_memory: Annotated[Memory | None, HONOURED] = None
    """Most host memory of each rank for copies of values that a thread saves while training goes on, in bytes or as
    ``"16GiB"``, within ``host_memory`` of the engine; what finds no room is written before the call returns. None: all
    that ``host_memory`` has left beside chunks, gradients and offloaded activations.
    """
    writer: CheckpointWriterConfig = Field(default_factory=CheckpointWriterConfig)
    """Which writer makes the files, and its options."""
