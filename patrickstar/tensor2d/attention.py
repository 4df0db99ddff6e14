"""Attention on a mesh: heads over columns, samples over rows. Only the linear layers communicate."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from patrickstar.tensor2d.group import MeshGroup, MeshPlace
from patrickstar.tensor2d.linear import Linear2D
from patrickstar.tensor2d.panels import Cut, check_divides

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of each position, [b/r or 1, s, head_dim] each."""


class Heads(nn.Module):
    """Attention of one rank's heads; one layer computes their queries, keys and values. A subclass names the layer and
    the dimension of the mesh that shards heads.
    """

    _layer: ClassVar[Callable[..., nn.Module]]
    _cut: ClassVar[Cut]

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
        self.heads, self.key_heads = heads_here(heads, key_heads, group.place, self._cut)
        self.head_dim = features // heads if head_dim is None else head_dim
        self.is_causal, self.scale, self.dropout = is_causal, scale, dropout
        parts = qkv_parts(heads, key_heads, self.head_dim)
        self.qkv = self._layer(features, sum(parts), group, bias=bias, parts=parts, dtype=dtype, device=device)

    def forward(
        self, hidden: torch.Tensor, mask: torch.Tensor | None = None, rotary: Rotary | None = None
    ) -> torch.Tensor:
        """Input of ``qkv`` -> [b', s, heads * head_dim], for the b' samples and s tokens of ``qkv``'s output.

        Args:
            hidden: the activations.
            mask: for ``scaled_dot_product_attention``, [b' or 1, 1, s, s]; None: causal, or no mask.
            rotary: rotary positions of queries and keys.
        """
        sizes = [self.heads * self.head_dim, *[self.key_heads * self.head_dim] * 2]
        parts = self.qkv(hidden).split(sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        if rotary is not None:
            q, k = (_turn(part, *rotary) for part in (q, k))
        out = nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.is_causal and mask is None,
            scale=self.scale,
            enable_gqa=self.heads != self.key_heads,
        )
        return out.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """:class:`Heads` and an output layer, of the classes that a subclass names."""

    _heads: ClassVar[type[Heads]]
    _out_layer: ClassVar[Callable[..., nn.Module]]

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
        self.attend = self._heads(
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
        out_bias = bias if out_bias is None else out_bias
        self.out = self._out_layer(
            heads * self.attend.head_dim, features, group, bias=out_bias, dtype=dtype, device=device
        )

    def forward(
        self, hidden: torch.Tensor, mask: torch.Tensor | None = None, rotary: Rotary | None = None
    ) -> torch.Tensor:
        """:meth:`Heads.forward`, followed by the output layer."""
        return self.out(self.attend(hidden, mask, rotary))


class Heads2D(Heads):
    """Heads over columns, samples over rows: [b/r, s, h/c] -> [b/r, s, heads/c * head_dim].

    Args:
        features: h, of the activations.
        heads: heads of all columns; columns divide them.
        group: the mesh.
        key_heads: key/value heads, which divide ``heads`` and are divided by columns; None: as many as heads.
        head_dim: None: h / heads.
        bias: queries, keys and values have one.
        is_causal: without a mask, a query sees no later keys.
        scale: factor of scores; None: 1 / sqrt(head_dim).
        dropout: probability of dropout in training. Each rank draws for its own heads: seed ranks differently.
        dtype: of the parameters.
        device: of the parameters.

    Raises:
        ValueError: heads, key heads and columns do not fit.
    """

    _layer = Linear2D
    _cut = "columns"


class Attention2D(Attention):
    """:class:`Heads2D` and the output layer: [b/r, s, h/c] -> [b/r, s, h/c]. Arguments are those of :class:`Heads2D`,
    and ``out_bias`` (None: as ``bias``).
    """

    _heads = Heads2D
    _out_layer = Linear2D


def heads_here(heads: int, key_heads: int, place: MeshPlace, by: Cut, what: str = "attention") -> tuple[int, int]:
    """Numbers of heads and key/value heads of one rank, sharded over columns or rows (``by``). Errors begin with
    ``what``.

    Raises:
        ValueError: they are not divisible, or key heads do not divide heads.
    """
    if heads % key_heads:
        raise ValueError(f"{what} has {heads} heads and {key_heads} of keys, which must divide them")
    check_divides(f"{what}: heads", heads, place, by)
    check_divides(f"{what}: heads of keys and values", key_heads, place, by)
    ranks = getattr(place, by)
    return heads // ranks, key_heads // ranks


def qkv_parts(heads: int, key_heads: int, head_dim: int) -> list[int]:
    """Features of all queries, keys and values: the parts of the fused output."""
    return [number * head_dim for number in (heads, key_heads, key_heads)]


def _turn(part: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary positions that pair the first half of a head's dimensions with the second, as in Llama."""
    first, second = part.chunk(2, dim=-1)
    return part * cosines[:, None] + torch.cat([-second, first], dim=-1) * sines[:, None]
