"""Interface between checkpoints and the holders of tensors: the shards that a rank has, and those that it wants.

Vocabulary:
  tensor    a parameter, one of its optimizer states, a buffer, or the state of a random number generator; named by its
  parameter's name and its kind.
  shard     the elements [begin, end) of a tensor, flattened in its order.
  order     the tensor's dimensions from the slowest to the fastest in memory. None is (0, 1, 2, ...): row-major.

Any ranks may hold any ranges, as long as all together hold every element once. Ranges are stored as they are held; a
load may use other ranges.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, get_args

import torch

from patrickstar.checkpoint.encoding import Encoding

Kind = Literal["master", "exp_avg", "exp_avg_sq", "momentum_buffer", "frozen", "managed", "buffer", "rng"]
KINDS: tuple[Kind, ...] = get_args(Kind)

STATE_KINDS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""States of optimizers by PyTorch's names: Adam's momentum and variance (Lion has the former), and SGD's momentum."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorRange:
    """The elements [begin, end) of a flattened tensor."""

    name: str
    """The parameter's or buffer's name in the user's module."""
    kind: Kind
    """``master``: the float32 value of a trainable chunked parameter; one of :data:`STATE_KINDS`: one of its states;
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
    """Order of dimensions in which the tensor is flattened; see the module's docstring."""

    @property
    def key(self) -> tuple[str, str]:
        """Key of the tensor in a manifest; see :func:`role`."""
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
        """True for the whole tensor."""
        return self.begin == 0 and self.end == math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.kind} of {self.name} [{self.begin}:{self.end}]"


@dataclasses.dataclass(frozen=True)
class ShardCopy:
    """Elements of a shard in memory of their own."""

    data: memoryview
    """Their bytes, valid until :attr:`release`."""
    crc: int
    """CRC-32C of :attr:`data` when it was copied."""
    release: Callable[[], None]
    """Gives the memory back; any thread may call it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorShard(TensorRange):
    """A range that a rank holds."""

    read: Callable[[], torch.Tensor]
    """Returns its elements: a one-dimensional, contiguous CPU tensor of :attr:`stored_dtype`, valid until the next
    shard is read.
    """
    encoding: Encoding | None = None
    """Form of its bytes, if they are not elements of ``dtype``."""
    copies: Sequence[ShardCopy] | None = None
    """Copies of its elements, in order, each to be released once; None: :attr:`read` returns the elements."""
    place: Any = None
    """The array that holds the elements, all of them; for the holder alone."""

    @property
    def num_bytes(self) -> int:
        """Size of the shard's bytes."""
        return self.encoding.num_bytes(self.numel) if self.encoding else super().num_bytes

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of :attr:`read`'s result: bytes, if the shard has an encoding."""
        return torch.uint8 if self.encoding else self.dtype


class ShardSource(Protocol):
    """Provides one rank's part of the tensors for saving."""

    def shards(self) -> Iterable[TensorShard]:
        """All its shards; values are read later, one at a time. Tensors that several ranks replicate must come from one
        of them.
        """


class ShardSink(Protocol):
    """Takes one rank's part of the tensors in loading."""

    def wanted(self) -> Iterable[TensorRange]:
        """Every tensor of the model, with the range that this rank holds; empty if others hold all of it. An optimizer
        state that is not stored (the parameter was never updated) is not written.
        """

    def write(self, wanted: TensorRange, values: torch.Tensor) -> None:
        """Takes the elements of one range: a one-dimensional CPU tensor, whose memory is reused after the call. Its
        dtype is the stored one, possibly another floating point dtype than the wanted one.
        """


def role(kind: str) -> str:
    """The role of a kind. Kinds of one role hold the same tensor: a value may be stored as trainable and wanted as
    frozen.
    """
    return kind if kind in STATE_KINDS or kind == "rng" else "value"


def is_row_major(shape: tuple[int, ...], order: tuple[int, ...] | None) -> bool:
    """True if ``order`` flattens a tensor row-major."""
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
