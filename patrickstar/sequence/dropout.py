"""Dropout that depends on where in the whole attention matrix an element lies, not on who computes it.

[Note: dropout by position] Whether a probability is dropped is a function of the seed and of its sequence in the batch,
head, query and key. So any number of ranks, in any mode, drop what one rank drops, and backward needs no state.
"""

from __future__ import annotations

import dataclasses

import torch

_KEY = 0x548C9DECBCE65297  # of the form that the generator's author asks for: all digits differ, no zeros
_TO_UNIT = 1.0 / 2**32


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Of attention's probabilities.

    Attributes:
        p: share that is dropped, 0 to less than 1.
        seed: of the step and layer, the same on all ranks.
        num_heads: of the model; a rank may have a part of them.
        first_head: of those that are here, in the model.
    """

    p: float
    seed: int
    num_heads: int
    first_head: int = 0

    def factors(self, batch: int, heads: int, queries: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype):
        """What probabilities are multiplied by: 0 or 1 / (1 - p), [batch, heads, queries, keys].

        ``queries`` and ``keys`` are positions in the whole sequence.
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
