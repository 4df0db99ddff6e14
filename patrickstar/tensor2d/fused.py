"""Linear layers with the same input, computed by one product: queries, keys and values; gate and up.

    q, k, v = parts_of(Linear2D(1024, 3072, group, parts=(1024, 1024, 1024)), (1024, 1024, 1024))
    q(hidden), k(hidden), v(hidden)             # the first call computes all three

Each part stands where the model has its own layer, so the model's code stays as it is. The input is sent once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from patrickstar.tensor2d.layer import Layer2D


class FusedProduct:
    """The product of one input, until all parts of it are taken.

    Args:
        layer: computes all parts, concatenated.
        sizes: features of each part, over all ranks.
    """

    def __init__(self, layer: Layer2D, sizes: Sequence[int]):
        self._layer, self._sizes = layer, tuple(sizes)
        self._hidden: torch.Tensor | None = None
        self._parts: list[torch.Tensor | None] = []

    def take(self, hidden: torch.Tensor, index: int) -> torch.Tensor:
        """Part ``index`` of the product of ``hidden``, which is computed once for the calls of all parts."""
        if self._hidden is not hidden or self._parts[index] is None:
            product = self._layer(hidden)
            ranks = sum(self._sizes) // product.shape[-1]
            self._hidden, self._parts = hidden, list(product.split([size // ranks for size in self._sizes], dim=-1))
        part, self._parts[index] = self._parts[index], None
        if all(other is None for other in self._parts):
            self._hidden = None
        assert part is not None
        return part


class Part(nn.Module):
    """One of the layers that :func:`parts_of` makes."""

    def __init__(self, product: FusedProduct, index: int):
        super().__init__()
        self._product, self._index = product, index

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], sharded as by the fused layer."""
        return self._product.take(hidden, self._index)


def parts_of(layer: Layer2D, sizes: Sequence[int]) -> list[Part]:
    """A layer for each part of the output of ``layer``, which becomes a submodule of the first."""
    product = FusedProduct(layer, sizes)
    parts = [Part(product, index) for index in range(len(sizes))]
    parts[0].layer = layer
    return parts
