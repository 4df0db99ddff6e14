"""The tokens of each rank under context parallelism."""

from __future__ import annotations

import dataclasses
import enum

import torch


class Mode(enum.Enum):
    """Context-parallel attention modes (patrickstar/sequence/__init__.py)."""

    RSA = "rsa"
    RING = "ring"
    ZIGZAG = "zigzag"
    ULYSSES = "ulysses"
    HYBRID = "hybrid"


@dataclasses.dataclass(frozen=True, order=True)
class Slice:
    """Contiguous tokens of the sequence, from ``start`` to before ``stop``."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


def slices_of_rank(rank: int, size: int, local_length: int, mode: Mode) -> tuple[Slice, ...]:
    """The tokens of ``rank``, in local order: one slice, or with ``zigzag`` the slices ``rank`` and ``2 * size - 1 -
    rank`` of ``2 * size`` equal ones.

    Raises:
        ValueError: zigzag, and the rank has an odd number of tokens.
    """
    if mode is not Mode.ZIGZAG:
        return (Slice(rank * local_length, (rank + 1) * local_length),)
    if local_length % 2:
        raise ValueError(
            f"zigzag: each rank has {local_length} tokens, which are not two equal slices; pad the sequence to a "
            f"multiple of {2 * size} tokens"
        )
    half = local_length // 2
    return tuple(Slice(index * half, (index + 1) * half) for index in (rank, 2 * size - 1 - rank))


def positions_of_rank(rank: int, size: int, local_length: int, mode: Mode | str) -> torch.Tensor:
    """Positions in the whole sequence of the tokens of ``rank``: int64, [local_length]."""
    slices = slices_of_rank(rank, size, local_length, Mode(mode))
    return torch.cat([torch.arange(part.start, part.stop, device="cpu") for part in slices])
