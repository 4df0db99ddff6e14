"""What of an engine a checkpoint keeps, and what of a checkpoint an engine takes."""

from __future__ import annotations

import dataclasses
import enum
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patrickstar.checkpoint.reader import Checkpoint
    from patrickstar.engine.engine_shards import EngineSink

logger = logging.getLogger("patrickstar")


class Part(enum.Enum):
    """What is loaded; the rest of the engine stays as it is."""

    EVERYTHING = "all that was saved"
    ALL_BUT_OPTIMIZER = "all but Adam's states, counts of updates, the groups' options and the loss scale"
    MODULE = "parameters, buffers and modules' extra states"


class Names(enum.Enum):
    """Which parameters and buffers there must be."""

    SAME = "those of the model, no more and no fewer"
    COMMON = "any: those that checkpoint and model both have are loaded"


class Frozen(enum.Enum):
    """What becomes of parameters that require no grad."""

    SAVED = "saved as all others"
    LEFT_OUT = "not saved"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a checkpoint is loaded."""

    part: Part = Part.EVERYTHING
    names: Names = Names.SAME


def leave_out_others(checkpoint: Checkpoint, sink: EngineSink) -> None:
    """``checkpoint`` and ``sink`` forget the values that the other does not have; the log says which."""
    stored, wanted = checkpoint.manifest.tensors, {item.key for item in sink.wanted()}
    sink.left_out = {key for key in wanted if key[1] == "value" and key not in stored}
    unwanted = {key for key in stored if key[1] == "value" and key not in wanted}
    tensors = {key: tensor for key, tensor in stored.items() if key not in unwanted}
    checkpoint.manifest = dataclasses.replace(checkpoint.manifest, tensors=tensors)
    for keys, where in ((sink.left_out, "not in it: they stay as they are"), (unwanted, "not in this model")):
        if keys:
            names = sorted(name for name, _ in keys)
            logger.info("%s: %d tensors are %s (%s, ...)", checkpoint.path, len(names), where, ", ".join(names[:3]))
