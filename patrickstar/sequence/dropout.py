"""Dropout as a function of an element's position in the whole attention matrix, independent of the rank.

[Note: dropout by position] Dropout of a probability is a function of the seed, its sequence in the batch, head, query
and key. So any number of ranks, in any mode, drops what one rank would drop, and backward needs no state.
"""

from __future__ import annotations

import dataclasses

import torch

_KEY = 0x548C9DECBCE65297  # digits as the generator's author requires: all differ, no zeros
_TO_UNIT = 1.0 / 2**32


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Dropout of attention probabilities.

    Attributes:
        p: probability of dropout, 0 <= p < 1.
        seed: seed of the step and layer, equal on all ranks.
        num_heads: heads of the model; a rank may have some of them.
        first_head: model index of the first local head.
    """

    p: float
    seed: int
    num_heads: int
    first_head: int = 0

    def factors(self, batch: int, heads: int, queries: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype):
        """Factors of the probabilities: 0 or 1 / (1 - p), [batch, heads, queries, keys]. ``queries`` and ``keys`` are
        positions in the whole sequence.
        """
        device = queries.device
        sequence = torch.arange(batch, device=device) * self.num_heads
        head = self.first_head + torch.arange(heads, device=device)
        row = (sequence[:, None] + head)[:, :, None] * 2**31 + queries
        # Two rounds of hashing: a row's stream, then the key within it.
        stream = _squares32(row, self.seed)
        uniform = _squares32((stream << 31)[..., None] + keys, self.seed + 1)
        keep = uniform.to(torch.float64) * _TO_UNIT >= self.p
        return keep.to(dtype) / (1.0 - self.p)


def _squares32(counter: torch.Tensor, seed: int) -> torch.Tensor:
    """32 random bits for each counter (int64): Widynski, *Squares: A Fast Counter-Based RNG*, arXiv 2004.06278."""
    key = _as_int64(_KEY * (2 * seed + 1))
    x = counter * key
    y = x
    z = y + key
    for term in (y, z, y):
        x = x * x + term
        x = (_shifted(x)) | (x << 32)
    return _shifted(x * x + z)


def _shifted(x: torch.Tensor) -> torch.Tensor:
    return (x >> 32) & 0xFFFFFFFF


def _as_int64(value: int) -> int:
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value
