"""Feed-forward layers of transformers on a mesh."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from patrickstar.tensor2d.group import MeshGroup
from patrickstar.tensor2d.linear import Linear2D

Activation = Callable[[torch.Tensor], torch.Tensor]


class FeedForward(nn.Module):
    """``down(activation(up(x)))`` of any layers."""

    def __init__(self, up: nn.Module, down: nn.Module, activation: Activation):
        super().__init__()
        self.activation, self.up, self.down = activation, up, down

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape and dtype are unchanged."""
        return self.down(self.activation(self.up(hidden)))


class GatedFeedForward(nn.Module):
    """``down(activation(gate(x)) * up(x))`` of any layers; ``gate_up`` computes both, concatenated."""

    def __init__(self, gate_up: nn.Module, down: nn.Module, activation: Activation):
        super().__init__()
        self.activation, self.gate_up, self.down = activation, gate_up, down

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
        up = Linear2D(features, intermediate, group, bias=bias, dtype=dtype, device=device)
        down = Linear2D(intermediate, features, group, bias=bias, dtype=dtype, device=device)
        super().__init__(up, down, activation)


class GatedMLP2D(GatedFeedForward):
    """``down(activation(gate(x)) * up(x))``; one product computes gate and up. Arguments are those of
    :class:`MLP2D`.
    """

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
        parts = (intermediate, intermediate)
        gate_up = Linear2D(features, sum(parts), group, bias=bias, parts=parts, dtype=dtype, device=device)
        down = Linear2D(intermediate, features, group, bias=bias, dtype=dtype, device=device)
        super().__init__(gate_up, down, activation)
