"""Shards a batch of whole sequences over ranks.

Sequences are padded at the end until all ranks have equally many tokens. Attention learns of the padding by the length
(:class:`patrickstar.sequence.masking.Masking`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from patrickstar.sequence.group import HybridGroup, SequenceGroup
from patrickstar.sequence.layout import Mode, Slice, slices_of_rank


@dataclasses.dataclass(frozen=True)
class Division:
    """Sharding of sequences of ``length`` tokens over ``size`` ranks; this is rank ``rank``."""

    rank: int
    size: int
    mode: Mode
    length: int

    @property
    def local_length(self) -> int:
        """Tokens of each rank, padding included."""
        unit = 2 if self.mode is Mode.ZIGZAG else 1
        return -(-self.length // (self.size * unit)) * unit

    @property
    def padded_length(self) -> int:
        """Tokens of all ranks, padding included."""
        return self.size * self.local_length

    def slices(self, rank: int | None = None) -> tuple[Slice, ...]:
        """Slices of this or another rank, in local order."""
        return slices_of_rank(self.rank if rank is None else rank, self.size, self.local_length, self.mode)

    def padded(self, tensor: torch.Tensor, fill: float, dim: int = 1) -> torch.Tensor:
        """Appends ``fill`` up to the padded length."""
        missing = self.padded_length - tensor.shape[dim]
        if missing == 0:
            return tensor
        after = [0, 0] * (tensor.dim() - 1 - dim % tensor.dim())
        return F.pad(tensor, [*after, 0, missing], value=fill)

    def local(self, tensor: torch.Tensor, fill: float, dim: int = 1) -> torch.Tensor:
        """This rank's shard of a tensor that has all tokens along ``dim``."""
        tensor = self.padded(tensor, fill, dim)
        parts = [tensor.narrow(dim, part.start, part.length) for part in self.slices()]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)

    def whole(self, parts: Sequence[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """Reassembles all ranks' shards in sequence order, without padding."""
        pieces = []
        for rank, part in enumerate(parts):
            begin = 0
            for piece in self.slices(rank):
                pieces.append((piece.start, part.narrow(dim, begin, piece.length)))
                begin += piece.length
        pieces.sort(key=lambda piece: piece[0])
        return torch.cat([piece for _, piece in pieces], dim).narrow(dim, 0, self.length)


class WholeSum(torch.autograd.Function):
    """Sum of the ranks' losses, with the same bits on all ranks; the gradient is that of this rank's part.

    Each rank has the loss of its own tokens, divided by the divisor of the whole loss. The loss is their sum, and the
    ranks' gradients add up to its gradient. So each rank calls backward on the sum, which computes its own part.
    """

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: SequenceGroup | HybridGroup) -> torch.Tensor:
        """``part`` has one element."""
        parts = gathered_parts(part.detach().reshape(1), group)
        total = torch.zeros_like(part)  # no view: it may be changed in place
        for other in parts:
            total += other.reshape(part.shape)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        """Passes the gradient to this rank's part."""
        return grad, None


class WholeTokens(torch.autograd.Function):
    """All-gathers the tokens in order. The gradient of a rank's tokens is summed over all ranks (a reduce-scatter)."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: SequenceGroup | HybridGroup, division: Division, dim: int
    ) -> torch.Tensor:
        """``tensor`` has this rank's tokens along ``dim``."""
        ctx.group, ctx.division, ctx.dim = group, division, dim
        return division.whole(gathered_parts(tensor, group), dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        """Sends each rank its slice and sums the slices received."""
        division, dim = ctx.division, ctx.dim
        others = [dataclasses.replace(division, rank=rank).local(grad, 0.0, dim) for rank in range(division.size)]
        parts = exchanged(others, ctx.group)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total, None, None, None


class LikeWholeTokens(torch.autograd.Function):
    """:class:`WholeTokens` for a loss that every rank computes equally from all tokens. The gradient of a rank's tokens
    is that of its own loss; each rank computes its part (:class:`WholeSum`).
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: SequenceGroup | HybridGroup, division: Division, dim: int
    ) -> torch.Tensor:
        """``tensor`` has this rank's tokens along ``dim``."""
        ctx.division, ctx.dim = division, dim
        return division.whole(gathered_parts(tensor, group), dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        """The slice for this rank's tokens."""
        return ctx.division.local(grad, 0.0, ctx.dim), None, None, None


def gathered_parts(tensor: torch.Tensor, group: SequenceGroup | HybridGroup) -> list[torch.Tensor]:
    """All-gathers tensors of equal shape; the result is ordered by rank."""
    return exchanged([tensor] * group.size, group)


def exchanged(parts: Sequence[torch.Tensor], group: SequenceGroup | HybridGroup) -> list[torch.Tensor]:
    """All-to-all: part i goes to rank i; the result has one tensor per sending rank."""
    group.meet()
    if isinstance(group, SequenceGroup):
        return group.all_to_all(parts)
    # Along the ring first, to the destination's row, then within the row.
    ring, heads = group.ring.size, group.heads.size
    rows = [torch.stack([parts[i * heads + j] for j in range(heads)]) for i in range(ring)]
    came = group.ring.all_to_all(rows)
    columns = [torch.stack([came[i][j] for i in range(ring)]) for j in range(heads)]
    found = group.heads.all_to_all(columns)
    return [found[j][i] for i in range(ring) for j in range(heads)]
