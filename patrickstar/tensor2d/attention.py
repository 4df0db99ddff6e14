"""Attention on a mesh: heads over columns, samples over rows, so that nothing travels but in the linear layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from patrickstar.tensor2d.group import MeshGroup
from patrickstar.tensor2d.linear import Linear2D
from patrickstar.tensor2d.panels import check_divides

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of each position, [b/r or 1, s, head_dim] each."""

Extend = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [b/r, key heads/c, s, head_dim] into those of all tokens so far."""


class Heads2D(nn.Module):
    """Queries, keys and values of one product, and the attention of this column's heads, without a layer behind it.

    Args:
        features: h, of the activations.
        heads: of all columns, which divide it.
        group: the mesh.
        key_heads: of keys and values, which divides ``heads``; columns divide it; None: as many.
        head_dim: None: h / heads.
        bias: of queries, keys and values.
        is_causal: whether a query sees no later keys, where no mask says what it sees.
        scale: of scores; None: 1 / sqrt(head_dim).
        dropout: share of probabilities that are dropped in training. Ranks draw each for themselves: seed them
            differently.
        dtype: of the parameters.
        device: of the parameters.

    Raises:
        ValueError: heads, key heads and columns do not go together.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        group: MeshGroup,
        *,
        key_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        is_causal: bool = True,
        scale: float | None = None,
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
        device: object = None,
    ):
        super().__init__()
        key_heads = heads if key_heads is None else key_heads
        if heads % key_heads:
            raise ValueError(f"attention has {heads} heads and {key_heads} of keys, which must divide them")
        check_divides("attention: heads", heads, group.place, "columns")
        check_divides("attention: heads of keys and values", key_heads, group.place, "columns")
        self.head_dim = features // heads if head_dim is None else head_dim
        self.heads, self.key_heads = heads // group.place.columns, key_heads // group.place.columns
        self.is_causal, self.scale, self.dropout = is_causal, scale, dropout
        parts = [number * self.head_dim for number in (heads, key_heads, key_heads)]
        self.qkv = Linear2D(features, sum(parts), group, bias=bias, parts=parts, dtype=dtype, device=device)

    def forward(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None = None,
        rotary: Rotary | None = None,
        extend: Extend | None = None,
    ) -> torch.Tensor:
        """[b/r, s, h/c] -> [b/r, s, heads/c * head_dim].

        Args:
            hidden: the activations.
            mask: of ``scaled_dot_product_attention``, [b/r or 1, 1, s, s]; None: causal, or everything.
            rotary: turns queries and keys.
            extend: gives keys and values of earlier tokens too; a single query sees all of them.
        """
        sizes = [self.heads * self.head_dim, *[self.key_heads * self.head_dim] * 2]
        parts = self.qkv(hidden).split(sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        if rotary is not None:
            q, k = (_turn(part, *rotary) for part in (q, k))
        if extend is not None:
            k, v = extend(k, v)
        out = nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.is_causal and mask is None and q.shape[2] > 1,
            scale=self.scale,
            enable_gqa=self.heads != self.key_heads,
        )
        return out.transpose(1, 2).flatten(2)


class Attention2D(nn.Module):
    """:class:`Heads2D` and the linear layer behind it: [b/r, s, h/c] -> [b/r, s, h/c]. Arguments are those of
    :class:`Heads2D`, and ``out_bias`` (None: as ``bias``).
    """

    def __init__(
        self,
        features: int,
        heads: int,
        group: MeshGroup,
        *,
        key_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        is_causal: bool = True,
        scale: float | None = None,
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
        device: object = None,
    ):
        super().__init__()
        self.attend = Heads2D(
            features,
            heads,
            group,
            key_heads=key_heads,
            head_dim=head_dim,
            bias=bias,
            is_causal=is_causal,
            scale=scale,
            dropout=dropout,
            dtype=dtype,
            device=device,
        )
        width = heads * self.attend.head_dim
        out_bias = bias if out_bias is None else out_bias
        self.out = Linear2D(width, features, group, bias=out_bias, dtype=dtype, device=device)

    def forward(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None = None,
        rotary: Rotary | None = None,
        extend: Extend | None = None,
    ) -> torch.Tensor:
        """As :meth:`Heads2D.forward`."""
        return self.out(self.attend(hidden, mask, rotary, extend))


def _turn(part: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary positions, the second half of a head's dimensions paired with the first, as in Llama."""
    first, second = part.chunk(2, dim=-1)
    return part * cosines[:, None] + torch.cat([-second, first], dim=-1) * sines[:, None]
