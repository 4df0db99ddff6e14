"""Choices of saving and loading: parts of an engine, names, frozen parameters."""

from __future__ import annotations

import dataclasses
import enum


class Part(enum.Enum):
    """The part of a checkpoint that is loaded; the rest of the engine stays unchanged."""

    EVERYTHING = "all that was saved"
    ALL_BUT_OPTIMIZER = "all but Adam's states, counts of updates, the groups' options and the loss scale"
    MODULE = "parameters, buffers and modules' extra states"


class Completion(enum.Enum):
    """When a checkpoint is complete."""

    NOW = "when the call returns"
    LATER = "while training goes on"


class Names(enum.Enum):
    """Which parameters and buffers the checkpoint must have."""

    SAME = "those of the model, no more and no fewer"
    COMMON = "any: those that checkpoint and model both have are loaded"


class Frozen(enum.Enum):
    """Treatment of parameters that require no grad."""

    SAVED = "saved as all others"
    LEFT_OUT = "not saved"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a checkpoint is loaded."""

    part: Part = Part.EVERYTHING
    names: Names = Names.SAME
