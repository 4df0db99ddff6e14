"""Which ranks share a parameter: all of them, or each has values of its own, as those of an expert that lives there.

The core has chunks of both kinds (csrc/chunk/layout.h, [Note: ranks of a chunk]). No key of the configuration chooses
between them yet.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

_ATTRIBUTE = "_patrickstar_is_own"


def keep_on_rank(params: Iterable[nn.Parameter]) -> None:
    """Engines that are made from now on leave ``params`` to their rank: they have other values on each, of one shape.
    All ranks say so of the same parameters.
    """
    for param in params:
        setattr(param, _ATTRIBUTE, True)


def is_own(param: nn.Parameter) -> bool:
    """True where :func:`keep_on_rank` was called for it."""
    return bool(getattr(param, _ATTRIBUTE, False))
