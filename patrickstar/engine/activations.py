"""What an engine changes of a model so that activations take less memory (`activations` in the configuration).

    changed = change_activations(module, config.activations)
    changed.close()

Both changes are made of the module itself, before hooks are put on it, and undone when the engine is closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from patrickstar.config import ActivationsConfig, LossComputation
from patrickstar.module.tiled_modules import find_tileable, tile_modules
from patrickstar.sequence.fused_loss import check_fusable, fuse_loss
from patrickstar.sequence.hugging_face import find_model

logger = logging.getLogger("patrickstar")


class ChangedActivations:
    """See the module's docstring."""

    def __init__(self, undo: list[Callable[[], None]]):
        self._undo = undo

    def close(self) -> None:
        """The module is what it was."""
        while self._undo:
            self._undo.pop()()


def check_activations(module: nn.Module, section: ActivationsConfig) -> None:
    """Raises ValueError where ``module`` cannot be changed as ``section`` says; nothing is changed."""
    if section.loss is LossComputation.FUSED:
        check_fusable(_language_model(module))
    if section.tile_tokens:
        find_tileable(module)


def change_activations(module: nn.Module, section: ActivationsConfig) -> ChangedActivations:
    """Changes the module as ``section`` says, which was checked."""
    undo: list[Callable[[], None]] = []
    if section.loss is LossComputation.FUSED:
        undo.append(fuse_loss(_language_model(module)).restore)
    if section.tile_tokens:
        tiled = tile_modules(module, section.tile_tokens)
        undo.append(tiled.restore)
        logger.debug("in tiles of %d tokens: %s", section.tile_tokens, ", ".join(tiled.names))
    return ChangedActivations(undo)


def _language_model(module: nn.Module) -> nn.Module:
    model = find_model(module)
    if model is None:
        raise ValueError(
            f'activations.loss is "fused", but {type(module).__name__} is no model of Hugging Face, and has none '
            'inside; set it to "whole", and compute the loss with patrickstar.sequence.linear_cross_entropy'
        )
    return model
