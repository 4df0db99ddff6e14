"""The seam between checkpoints and whoever holds tensors: what a rank has, and what it wants back.

Vocabulary:
  tensor    a parameter, one of its optimizer states, a buffer, or the state of a random number generator; named by its
            parameter's name and its kind.
  shard     the elements [begin, end) of a tensor, flattened in its order.
  order     the tensor's dimensions from the slowest to the fastest in memory. None is (0, 1, 2, ...): row-major.

Checkpoints know nothing of ranks beyond this: any ranks may hold any ranges, as long as all of them together hold every
element once. They are stored as they are held and read by ranges, so whoever loads may hold other ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Literal, Protocol, get_args

import torch

Kind = Literal["master", "exp_avg", "exp_avg_sq", "momentum_buffer", "frozen", "managed", "buffer", "rng"]
KINDS: tuple[Kind, ...] = get_args(Kind)

STATE_KINDS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""States of optimizers by PyTorch's names: Adam's momentum and variance, of which Lion has the former; SGD's momentum.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorRange:
    """The elements [begin, end) of a flattened tensor."""

    name: str
    """The parameter's or buffer's name in the user's module."""
    kind: Kind
    """``master``: the float32 value of a trainable parameter in a chunk; one of :data:`STATE_KINDS`: a state of it;
    ``frozen``: the compute value of a frozen one; ``managed``: a parameter that stays with PyTorch; ``buffer``;
    ``rng``: a random number generator's state.
    """
    shape: tuple[int, ...]
    """Shape of the whole tensor, not of the range."""
    dtype: torch.dtype
    """The dtype in which this rank holds or wants the elements."""
    begin: int
    """Index of the first element in the flattened tensor."""
    end: int
    """One past the last element."""
    order: tuple[int, ...] | None = None
    """In which the tensor is flattened; see the module's docstring."""

    @property
    def key(self) -> tuple[str, str]:
        """What a tensor is found by; see :func:`role`."""
        return self.name, role(self.kind)

    @property
    def numel(self) -> int:
        """Number of elements in the range; may be 0."""
        return self.end - self.begin

    @property
    def num_bytes(self) -> int:
        """Size of the range's elements in bytes, in :attr:`dtype`."""
        return self.numel * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.begin == 0 and self.end == math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.kind} of {self.name} [{self.begin}:{self.end}]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorShard(TensorRange):
    """A range that a rank holds."""

    read: Callable[[], torch.Tensor]
    """Gives its elements: a one-dimensional, contiguous CPU tensor of ``dtype``, valid until the next shard is read."""


class ShardSource(Protocol):
    """Gives one rank's part of the tensors when a checkpoint is saved."""

    def shards(self) -> Iterable[TensorShard]:
        """All its shards. Values are read later, one at a time. What several ranks hold alike, one of them gives."""


class ShardSink(Protocol):
    """Takes one rank's part of the tensors when a checkpoint is loaded."""

    def wanted(self) -> Iterable[TensorRange]:
        """Every tensor of the model, with the range that it holds; an empty one where others hold it all. A moment
        that is not stored, that of a parameter never updated, is not written.
        """

    def write(self, wanted: TensorRange, values: torch.Tensor) -> None:
        """Takes the elements of one of them: a one-dimensional CPU tensor whose memory is used again afterwards, of the
        stored dtype, which may be another floating point one than that which is wanted.
        """


def role(kind: str) -> str:
    """Kinds of one role hold the same tensor: a parameter's value may be stored trainable and wanted frozen."""
    return kind if kind in STATE_KINDS or kind == "rng" else "value"


def is_row_major(shape: tuple[int, ...], order: tuple[int, ...] | None) -> bool:
    """Whether a tensor flattened in ``order`` is flattened row-major."""
    if order is None:
        return True
    dims = [dim for dim in order if shape[dim] != 1]
    return dims == sorted(dims)


def row_major(values: torch.Tensor, shape: tuple[int, ...], order: tuple[int, ...] | None) -> torch.Tensor:
    """The elements of a whole tensor, flattened in ``order``, as a tensor of its shape."""
    if order is None:
        return values.view(shape)
    inverse = [order.index(dim) for dim in range(len(order))]
    return values.view([shape[dim] for dim in order]).permute(inverse)


def flattened(values: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """The elements of a tensor in ``order``."""
    return (values if order is None else values.permute(order)).reshape(-1)
