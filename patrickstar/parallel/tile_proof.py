"""Proof that modules computed in tiles give the same results, one module of each kind at a time."""

from __future__ import annotations

import torch
from torch import nn

from patrickstar.module.specimen import copy_specimen, kind_of, take_specimen
from patrickstar.module.tiled_modules import TiledForward, find_tileable
from patrickstar.parallel.computed import Computed, differences, gradients_of, not_callable, not_equal

_KEY = "activations.tile_tokens"
_TILE_TOKENS = 5
_NUM_TOKENS = 12
_ANY_WIDTH = 8


def prove_tiles(module: nn.Module, tile_tokens: int) -> None:
    """Raises ValueError, which names a module, if it computes something else in tiles. Changes nothing.

    Args:
        module: the user's.
        tile_tokens: of a tile in training; 0: no tiles.
    """
    kinds = {kind_of(child): (name, child) for name, child in find_tileable(module).items()} if tile_tokens else {}
    for name, child in kinds.values():
        try:
            specimen = take_specimen(child)
            plain = _compute(copy_specimen(specimen))
        except Exception as error:  # the user's code may raise anything
            raise not_callable(name, child, error, "its tiles", _KEY) from error
        tiled = copy_specimen(specimen)
        TiledForward(tiled, name, min(tile_tokens, _TILE_TOKENS))
        found = differences(plain, _compute(tiled))
        if found:
            raise not_equal(name, child, found, "in tiles", _KEY)


def _compute(module: nn.Module) -> Computed:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(1, _NUM_TOKENS, _width(module), generator=generator, device="cpu")
    hidden = tokens.requires_grad_()
    weights = torch.randn(1, _NUM_TOKENS, 1, generator=generator, device="cpu")
    loss = (module(hidden) * weights).sum()
    loss.backward()
    assert hidden.grad is not None
    changed = hidden.detach().clone()
    changed[0, 0] *= 2
    other = (module(changed) * weights).sum()
    return Computed(loss.item(), other.item(), {"its input": hidden.grad, **gradients_of(module)})


def _width(module: nn.Module) -> int:
    """Number of input features of ``module``."""
    for child in module.modules():
        for name in ("in_features", "nx"):
            if isinstance(getattr(child, name, None), int):
                return getattr(child, name)
    return next((param.shape[0] for param in module.parameters()), _ANY_WIDTH)
