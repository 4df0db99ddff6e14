"""Changes of a model that reduce its activation memory, or its passes over it (``activations`` in the configuration).

    remedies = ActivationRemedies(module, config)  # texts for out-of-memory errors
    changed = change_activations(module, config.activations, num_ranks=1)
    changed.close()

The changes are made before hooks are installed, and undone when the engine closes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from patrickstar.config import ActivationOffload, ActivationsConfig, Config, ExpertsComputation, LossComputation
from patrickstar.module.checkpointed_layers import checkpointable_modules, is_checkpointing
from patrickstar.module.fused_experts import fuse_experts
from patrickstar.module.tiled_modules import PROPOSED_TILE_TOKENS, find_tileable, tile_modules
from patrickstar.sequence.fused_loss import check_fusable, fuse_loss
from patrickstar.sequence.hugging_face import find_model
from patrickstar.tensor2d.model_losses import TokenLoss

logger = logging.getLogger("patrickstar")


class ChangedActivations:
    """Undoes the changes of :func:`change_activations`."""

    def __init__(self, undo: list[Callable[[], None]]):
        self._undo = undo

    def close(self) -> None:
        """Restores the module."""
        while self._undo:
            self._undo.pop()()


def check_activations(module: nn.Module, section: ActivationsConfig) -> None:
    """Raises ValueError if ``module`` cannot be changed as ``section`` says; changes nothing."""
    if section.loss is LossComputation.FUSED and not _has_sharded_loss(module):
        check_fusable(_language_model(module))
    if section.tile_tokens:
        find_tileable(module)


def change_activations(module: nn.Module, section: ActivationsConfig, num_ranks: int) -> ChangedActivations:
    """Changes the module as ``section`` says, which was checked; ``num_ranks`` compute with it."""
    undo: list[Callable[[], None]] = []
    if section.loss is LossComputation.FUSED and not _has_sharded_loss(module):
        undo.append(fuse_loss(_language_model(module), num_ranks).restore)
    if section.experts is ExpertsComputation.FUSED:
        experts = fuse_experts(module)
        undo.append(experts.restore)
        logger.debug("%d mixtures of experts are fused", len(experts.names))
    if section.tile_tokens:
        tiled = tile_modules(module, section.tile_tokens)
        undo.append(tiled.restore)
        logger.debug("in tiles of %d tokens: %s", section.tile_tokens, ", ".join(tiled.names))
    return ChangedActivations(undo)


class ActivationRemedies:
    """Settings that would reduce a module's activation memory and that its configuration does not use.

    Args:
        module: the user's, not changed yet.
        config: the engine's.
    """

    def __init__(self, module: nn.Module, config: Config):
        section = config.activations
        self._section = section
        self._layers = checkpointable_modules(module)
        self._changes: list[str] = []  # changes of the module
        may_fuse = section.loss is LossComputation.WHOLE and not _has_sharded_loss(module)
        if may_fuse and _can_fuse(module):
            self._changes.append('a loss that does not make all logits at once ("activations": {"loss": "fused"})')
        if not section.tile_tokens and _can_tile(module):
            asked = f'"activations": {{"tile_tokens": {PROPOSED_TILE_TOKENS}}}'
            self._changes.append(f"MLPs and norms in tiles of tokens ({asked})")

    def texts(self) -> list[str]:
        """The settings for an error message. Follows the layers' present checkpointing."""
        is_checkpointed = any(map(is_checkpointing, self._layers))
        texts = list(self._changes)
        if not is_checkpointed:
            how = (
                'gradient_checkpointing_enable({"use_reentrant": False})' if self._layers else "torch.utils.checkpoint"
            )
            texts.insert(0, f"activation checkpointing ({how})")
        offload = ActivationOffload.AUTO if is_checkpointed else ActivationOffload.ALWAYS
        if self._section.offload is ActivationOffload.NEVER or (
            self._section.offload is ActivationOffload.AUTO and not is_checkpointed
        ):
            texts.append(f'activations that leave the device ("activations": {{"offload": "{offload.value}"}})')
        else:
            texts.append("more host_memory, where activations that may leave the device find no room on the host")
        return texts


def _can_fuse(module: nn.Module) -> bool:
    return _takes(lambda: check_fusable(_language_model(module)))


def _can_tile(module: nn.Module) -> bool:
    return _takes(lambda: find_tileable(module))


def _takes(check: Callable[[], object]) -> bool:
    try:
        check()
    except ValueError:
        return False
    return True


def _has_sharded_loss(module: nn.Module) -> bool:
    """True if tensor parallelism shards the head's logits over rows and columns of the mesh.

    ``CrossEntropy2D`` then computes the loss without making whole logits. ``"fused"`` changes nothing: computing the
    logits tile by tile would send the head's weight once more for each tile.
    """
    return isinstance(vars(find_model(module) or module).get("_loss_function"), TokenLoss)


def _language_model(module: nn.Module) -> nn.Module:
    model = find_model(module)
    if model is None:
        raise ValueError(
            f'activations.loss is "fused", but {type(module).__name__} is no model of Hugging Face, and has none '
            'inside; set it to "whole", and compute the loss with patrickstar.sequence.linear_cross_entropy'
        )
    return model
