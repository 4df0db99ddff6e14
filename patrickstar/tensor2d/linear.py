"""Linear layers on a mesh.

Y = X W as A B sends X along columns; as X (Wᵀ)ᵀ, an A Bᵀ, it sends partial sums of Y. Both send W along rows, and
backward sends twice as much of the same two. So a layer with fewer outputs than inputs stores its weight as [out, in]
and sends its output. Any other stores [in, out] and sends its input. A transformer's layers then send 4 bsh elements of
activations. The published algorithm, whose products are all A B, sends 7: the second matrix of the MLP makes the
difference.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import torch
from torch import nn

from patrickstar.tensor2d.division import Placement, Split
from patrickstar.tensor2d.group import MeshGroup
from patrickstar.tensor2d.layer import Layer2D
from patrickstar.tensor2d.panels import check_divides
from patrickstar.tensor2d.products import multiply, multiply_transposed
from patrickstar.tensor2d.sums import replicated


class Sent(enum.Enum):
    """The activations that a linear layer sends along columns."""

    INPUT = "input"
    """Y = X W, by A B; the weight is stored as [in, out]."""
    OUTPUT = "output"
    """Y = X (Wᵀ)ᵀ, by A Bᵀ; the weight is stored as [out, in]."""


def narrower(in_features: int, out_features: int) -> Sent:
    """The side with fewer features."""
    return Sent.OUTPUT if out_features < in_features else Sent.INPUT


class Linear2D(Layer2D):
    """``torch.nn.Linear``: [b/r, ..., in/c] -> [b/r, ..., out/c].

    The weight is sharded into r x c blocks; the bias [out/c] is replicated over rows.

    Args:
        in_features: of the whole layer; columns divide it, and lcm(r, c) if the input is sent.
        out_features: of the whole layer; columns divide it, and lcm(r, c) if the output is sent.
        group: the mesh.
        bias: the layer has one.
        parts: parts of the output of which each column gets some (:class:`Placement`).
        sent: the side that is sent; None: the narrower one.
        dtype: of the parameters.
        device: of the parameters.

    Raises:
        ValueError: the mesh does not divide the features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: MeshGroup,
        *,
        bias: bool = True,
        parts: Sequence[int] = (),
        sent: Sent | None = None,
        dtype: torch.dtype | None = None,
        device: object = None,
    ):
        super().__init__(group)
        self.in_features, self.out_features = in_features, out_features
        self.sent = narrower(in_features, out_features) if sent is None else sent
        rows, columns = group.place.rows, group.place.columns
        panels_of = in_features if self.sent is Sent.INPUT else out_features
        check_divides(f"Linear2D({in_features}, {out_features}): the {self.sent.value}", panels_of, group.place)
        for size in (in_features, *(parts or (out_features,))):
            check_divides(f"Linear2D({in_features}, {out_features}): features", size, group.place, "columns")
        shape = (in_features, out_features) if self.sent is Sent.INPUT else (out_features, in_features)
        check_divides(f"Linear2D({in_features}, {out_features}): features", shape[0], group.place, "rows")
        placement = Placement(Split.BLOCKS, tuple(parts), transposed=self.sent is Sent.INPUT)
        self.add_parameter("weight", (shape[0] // rows, shape[1] // columns), placement, dtype, device)
        if bias:
            placement = Placement(Split.COLUMNS, tuple(parts))
            self.add_parameter("bias", (out_features // columns,), placement, dtype, device)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the weight as ``torch.nn.Linear`` does, each rank its own block; zeros for the bias."""
        bound = 1 / math.sqrt(self.in_features)
        self.weight.uniform_(-bound, bound)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b/r, ..., in/c] -> [b/r, ..., out/c].

        Raises:
            ValueError: shapes or dtypes do not fit.
        """
        rows = hidden.reshape(-1, hidden.shape[-1])
        product = multiply if self.sent is Sent.INPUT else multiply_transposed
        bias = None if self.bias is None else replicated(self.bias, self.group.along_rows)
        return product(rows, self.weight, self.group, bias).view(*hidden.shape[:-1], -1)

    def extra_repr(self) -> str:
        """Sizes of the whole layer."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"sent={self.sent.value}"
        )


def initialise_normal(layer: nn.Module, std: float) -> None:
    """Draws all matrices of the :class:`Layer2D` in ``layer`` from a normal distribution, each rank its own blocks;
    zeros after a vocabulary. Call :func:`match_replicas` afterwards.
    """
    for module in layer.modules():
        if isinstance(module, Layer2D):
            for parameter in module.parameters(recurse=False):
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=std)
            module.clear_padding()
