"""Linear layers on a mesh with one narrow side, such as the two of a LoRA adapter.

    narrow = Narrow2D(1024, 8, group)(hidden)      # [b/r, ..., 1024/c] -> [b/r, ..., 8], replicated over columns
    wide = Widen2D(8, 1024, group)(narrow)         # [b/r, ..., 8] -> [b/r, ..., 1024/c]

Only the wide side is sharded, over columns, so any adapter rank fits any mesh. Rows replicate the weights and sum their
gradients. Messages have the narrow width: a sum over columns in forward, and one in backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from patrickstar.tensor2d.division import Placement, Split
from patrickstar.tensor2d.group import MeshGroup
from patrickstar.tensor2d.layer import Layer2D
from patrickstar.tensor2d.panels import check_divides, sum_dtype
from patrickstar.tensor2d.sums import replicated, world_total


class _LowRank2D(Layer2D):
    def __init__(self, in_features: int, out_features: int, group: MeshGroup):
        super().__init__(group)
        self.in_features, self.out_features = in_features, out_features

    def _draw(self) -> None:
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)

    def extra_repr(self) -> str:
        """Sizes of the whole layer."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class Narrow2D(_LowRank2D):
    """``torch.nn.Linear`` without bias: [b/r, ..., in/c] -> [b/r, ..., out]. The weight is [out, in/c].

    Args:
        in_features: of the whole layer; columns divide it.
        out_features: not sharded.
        group: the mesh.
        dtype: of the weight.
        device: of the weight.

    Raises:
        ValueError: columns do not divide the features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: MeshGroup,
        *,
        dtype: torch.dtype | None = None,
        device: object = None,
    ):
        super().__init__(in_features, out_features, group)
        check_divides(f"Narrow2D({in_features}, {out_features}): features", in_features, group.place, "columns")
        shape = (out_features, in_features // group.place.columns)
        self.add_parameter("weight", shape, Placement(Split.COLUMNS), dtype, device)
        self._draw()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b/r, ..., in/c] -> [b/r, ..., out], with the same bits on all columns."""
        line = self.group.along_columns
        mine = nn.functional.linear(hidden, replicated(self.weight, self.group.along_rows))
        if line.size == 1:
            return mine
        total = world_total(mine.to(sum_dtype(mine.dtype)), line)
        return replicated(total.to(mine.dtype), line)  # each column uses it for its own features


class Widen2D(_LowRank2D):
    """``torch.nn.Linear``: [b/r, ..., in] -> [b/r, ..., out/c]. The weight is [in, out/c], the bias [out/c].

    Args:
        in_features: not sharded.
        out_features: of the whole layer; columns divide it.
        group: the mesh.
        bias: the layer has one.
        parts: parts of the output of which each column gets some (:class:`Placement`).
        dtype: of the parameters.
        device: of the parameters.

    Raises:
        ValueError: columns do not divide the features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: MeshGroup,
        *,
        bias: bool = False,
        parts: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        device: object = None,
    ):
        super().__init__(in_features, out_features, group)
        for size in parts or (out_features,):
            check_divides(f"Widen2D({in_features}, {out_features}): features", size, group.place, "columns")
        mine = out_features // group.place.columns
        placement = Placement(Split.COLUMNS, tuple(parts), transposed=True)
        self.add_parameter("weight", (in_features, mine), placement, dtype, device)
        self._draw()
        if bias:
            self.add_parameter("bias", (mine,), Placement(Split.COLUMNS, tuple(parts)), dtype, device)
            nn.init.zeros_(self.bias)
        else:
            self.register_parameter("bias", None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b/r, ..., in] -> [b/r, ..., out/c]."""
        line = self.group.along_rows
        bias = None if self.bias is None else replicated(self.bias, line)
        return nn.functional.linear(hidden, replicated(self.weight, line).t(), bias)
