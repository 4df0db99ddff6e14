"""One-dimensional tensor parallelism with sequence parallelism (Megatron), the baseline of two dimensions.

    group = tall_group(line)                          # of p ranks: p rows, one column
    hidden = hidden + MLP1D(1024, 4096, group)(norm(hidden))       # [b, s/p, h] on each rank

In a pair of linear layers the first is sharded by output features, the second by input features (Shoeybi et al.,
*Megatron-LM*, arXiv 1909.08053). Outside of pairs tokens are sharded (Korthikanti et al., *Reducing Activation
Recomputation in Large Transformer Models*, arXiv 2205.05198). There, activations are as on a mesh of p rows and one
column, with tokens in place of samples. So norms, embeddings and their gradients are those of
:mod:`patrickstar.tensor2d` on such a mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from patrickstar.tensor2d.attention import Attention, Heads
from patrickstar.tensor2d.division import Placement, Split
from patrickstar.tensor2d.embedding import Embedding2D, padded_vocabulary
from patrickstar.tensor2d.feed_forward import FeedForward, GatedFeedForward
from patrickstar.tensor2d.group import MeshGroup
from patrickstar.tensor2d.layer import Layer2D
from patrickstar.tensor2d.lines import Line
from patrickstar.tensor2d.panels import check_divides
from patrickstar.tensor2d.sharded_products import TOKENS, column_product, row_product
from patrickstar.tensor2d.sums import replicated


def tall_group(line: Line) -> MeshGroup:
    """A mesh of one column, with the ranks of ``line`` as rows: for this module's layers, norms and embeddings."""
    return MeshGroup(line, Line(), line)


def wide_group(line: Line) -> MeshGroup:
    """A mesh of one row, with the ranks of ``line`` as columns: for the loss of :class:`LMHead1D`'s logits."""
    return MeshGroup(Line(), line, line)


class _Linear1D(Layer2D):
    def __init__(
        self,
        sizes: tuple[int, int],
        group: MeshGroup,
        shape: tuple[int, int],
        placement: Placement,
        dtype: torch.dtype | None,
        device: object,
    ):
        super().__init__(group)
        if group.place.columns != 1:
            raise ValueError(
                f"{type(self).__name__} divides layers over rows; the mesh is {group.place.rows} x "
                f"{group.place.columns}: make it by tall_group"
            )
        self.in_features, self.out_features = sizes
        self.add_parameter("weight", shape, placement, dtype, device)
        self.register_parameter("bias", None)
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)

    def extra_repr(self) -> str:
        """Sizes of the whole layer."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class ColumnLinear1D(_Linear1D):
    """First layer of a pair: [b, s/p, in] -> [b, s, out/p]. The weight is [out/p, in], the bias [out/p].

    Args:
        in_features: of the whole layer.
        out_features: of the whole layer; ranks divide it.
        group: p rows and one column.
        bias: the layer has one.
        parts: parts of the output of which each rank gets some (:class:`Placement`).
        dtype: of the parameters.
        device: of the parameters.

    Raises:
        ValueError: ranks do not divide the features, or the mesh has several columns.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: MeshGroup,
        *,
        bias: bool = True,
        parts: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        device: object = None,
    ):
        for size in parts or (out_features,):
            check_divides(f"ColumnLinear1D({in_features}, {out_features}): features", size, group.place, "rows")
        mine = out_features // group.place.rows
        placement = Placement(Split.ROWS, tuple(parts))
        super().__init__((in_features, out_features), group, (mine, in_features), placement, dtype, device)
        if bias:
            self.add_parameter("bias", (mine,), placement, dtype, device)
            nn.init.zeros_(self.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b, s/p, in] -> [b, s, out/p]."""
        return column_product(hidden, self.weight, self.group.along_rows, self.bias)


class RowLinear1D(_Linear1D):
    """Second layer of a pair: [b, s, in/p] -> [b, s/p, out]. The weight is [in/p, out]; the bias [out] is replicated.
    Arguments are those of :class:`ColumnLinear1D`.

    Raises:
        ValueError: ranks do not divide the features, or the mesh has several columns.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: MeshGroup,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: object = None,
    ):
        check_divides(f"RowLinear1D({in_features}, {out_features}): features", in_features, group.place, "rows")
        shape, placement = (in_features // group.place.rows, out_features), Placement(Split.ROWS, transposed=True)
        super().__init__((in_features, out_features), group, shape, placement, dtype, device)
        if bias:
            self.add_parameter("bias", (out_features,), Placement(Split.COLUMNS), dtype, device)
            nn.init.zeros_(self.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b, s, in/p] -> [b, s/p, out].

        Raises:
            ValueError: ranks do not divide the tokens.
        """
        check_divides("RowLinear1D: tokens of a sequence", hidden.shape[TOKENS], self.group.place, "rows")
        bias = None if self.bias is None else replicated(self.bias, self.group.along_rows)
        return row_product(hidden, self.weight, self.group.along_rows, bias)


class _Heads1D(Heads):
    _layer = ColumnLinear1D
    _cut = "rows"


class Attention1D(Attention):
    """Attention with heads sharded over ranks: [b, s/p, h] -> [b, s/p, h]. Arguments are those of
    :class:`~patrickstar.tensor2d.Attention2D`; masks and rotary positions are of whole sequences.
    """

    _heads = _Heads1D
    _out_layer = RowLinear1D


class MLP1D(FeedForward):
    """``down(activation(up(x)))``: [b, s/p, h] -> [b, s/p, h]. Arguments are those of
    :class:`~patrickstar.tensor2d.MLP2D`.
    """

    _up_layer = ColumnLinear1D
    _down_layer = RowLinear1D


class GatedMLP1D(GatedFeedForward):
    """``down(activation(gate(x)) * up(x))``: [b, s/p, h] -> [b, s/p, h]. Arguments are those of
    :class:`~patrickstar.tensor2d.MLP2D`.
    """

    _up_layer = ColumnLinear1D
    _down_layer = RowLinear1D


class LMHead1D(Layer2D):
    """Logits [b, s, v/p] of activations [b, s/p, h], by an embedding's table [v/p, h] or its own. The loss is
    :class:`~patrickstar.tensor2d.CrossEntropy2D` on :func:`wide_group`, with labels [b, s].

    Args:
        features: h.
        vocabulary: number of real tokens.
        group: p rows and one column.
        bias: the layer has one, [v/p].
        tied: the embedding whose table is shared; None: a table of its own.
        dtype: of the table.
        device: of the table.
    """

    def __init__(
        self,
        features: int,
        vocabulary: int,
        group: MeshGroup,
        *,
        bias: bool = False,
        tied: Embedding2D | None = None,
        dtype: torch.dtype | None = None,
        device: object = None,
    ):
        super().__init__(group)
        self.vocabulary = vocabulary
        table = Embedding2D(vocabulary, features, group, dtype=dtype, device=device) if tied is None else tied
        self.weight = table.weight
        self.placements, self.whole_rows = dict(table.placements), dict(table.whole_rows)
        if bias:
            placement = Placement(Split.ROWS, padded_to=padded_vocabulary(vocabulary, group))
            self.add_parameter("bias", (len(self.weight),), placement, dtype, device)
            self.whole_rows["bias"] = vocabulary
            nn.init.zeros_(self.bias)
        else:
            self.register_parameter("bias", None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b, s/p, h] -> [b, s, v/p]."""
        return column_product(hidden, self.weight, self.group.along_rows, self.bias)
