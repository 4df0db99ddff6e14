"""Marks parameters that each rank keeps for itself, such as an expert's; others are sharded over all ranks.

The core has chunks of both kinds (`ChunkRanks`, csrc/chunk/layout.h). No configuration key chooses between them yet.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

_ATTRIBUTE = "_patrickstar_is_own"


def keep_on_rank(params: Iterable[nn.Parameter]) -> None:
    """Lets engines made from now on keep ``params`` per rank: values differ between ranks, shapes do not. All ranks
    must mark the same parameters.
    """
    for param in params:
        setattr(param, _ATTRIBUTE, True)


def is_own(param: nn.Parameter) -> bool:
    """Tests whether :func:`keep_on_rank` was called for ``param``."""
    return bool(getattr(param, _ATTRIBUTE, False))
