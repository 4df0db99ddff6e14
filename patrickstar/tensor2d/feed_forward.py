"""Feed-forward layers of transformers on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from patrickstar.tensor2d.group import MeshGroup
from patrickstar.tensor2d.linear import Linear2D

Activation = Callable[[torch.Tensor], torch.Tensor]


class FeedForward(nn.Module):
    """``down(activation(up(x)))``. A subclass names its two linear layers."""

    _up_layer: ClassVar[Callable[..., nn.Module]]
    _down_layer: ClassVar[Callable[..., nn.Module]]

    def __init__(
        self,
        features: int,
        intermediate: int,
        group: MeshGroup,
        *,
        activation: Activation = nn.functional.gelu,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: object = None,
    ):
        super().__init__()
        self.activation = activation
        self.up = self._up_layer(features, intermediate, group, bias=bias, dtype=dtype, device=device)
        self.down = self._down_layer(intermediate, features, group, bias=bias, dtype=dtype, device=device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape and dtype are unchanged."""
        return self.down(self.activation(self.up(hidden)))


class GatedFeedForward(nn.Module):
    """``down(activation(gate(x)) * up(x))``; one layer computes gate and up, concatenated. A subclass names its two
    linear layers.
    """

    _up_layer: ClassVar[Callable[..., nn.Module]]
    _down_layer: ClassVar[Callable[..., nn.Module]]

    def __init__(
        self,
        features: int,
        intermediate: int,
        group: MeshGroup,
        *,
        activation: Activation = nn.functional.silu,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: object = None,
    ):
        super().__init__()
        self.activation = activation
        parts = (intermediate, intermediate)
        self.gate_up = self._up_layer(features, sum(parts), group, bias=bias, parts=parts, dtype=dtype, device=device)
        self.down = self._down_layer(intermediate, features, group, bias=bias, dtype=dtype, device=device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape and dtype are unchanged."""
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


class MLP2D(FeedForward):
    """``down(activation(up(x)))``: [b/r, ..., h/c] -> [b/r, ..., h/c].

    Args:
        features: h.
        intermediate: width between the two layers.
        group: the mesh.
        activation: element-wise function.
        bias: both layers have one.
        dtype: of the parameters.
        device: of the parameters.
    """

    _up_layer = _down_layer = Linear2D


class GatedMLP2D(GatedFeedForward):
    """``down(activation(gate(x)) * up(x))``; one product computes gate and up. Arguments are those of
    :class:`MLP2D`.
    """

    _up_layer = _down_layer = Linear2D
