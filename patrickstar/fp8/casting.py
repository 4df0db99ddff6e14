"""Casts of bfloat16 matrices to 8-bit floating point (``csrc/fp8/cuda_kernels.h``).

    codes = cast(x, Block.STRIP, Sides.BOTH)

A block of elements shares a scale, a power of two: the least with which its largest magnitude is representable. A
block with an infinity or a NaN has the scale NaN. The CPU gives the GPU's bits. Rows are padded with zeros to a
multiple of 128, so that tokens can be summed over. A cast is an operator of PyTorch, which ``torch.compile`` and the
meta device know.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from patrickstar import _C

TILE = 128
"""Rows and columns of a matrix are multiples of it, rows after padding."""


class Block(enum.IntEnum):
    """Elements that share a scale; values as in the core."""

    STRIP = 0
    """128 elements along the dimension that a product sums over."""
    SQUARE = 1
    """128 x 128 elements; a transposed matrix has the same scales."""
    LINE = 2
    """All elements along the dimension that a product sums over."""
    MATRIX = 3
    """All elements."""


class Format(enum.IntEnum):
    """Format of a code; values as in the core."""

    E4M3 = 0
    E5M2 = 1

    @property
    def dtype(self) -> torch.dtype:
        """PyTorch's name."""
        return torch.float8_e4m3fn if self is Format.E4M3 else torch.float8_e5m2


class Sides(enum.Enum):
    """Results of a cast. Properties, since ``torch.compile`` of PyTorch 2.11 cannot trace operators of flags."""

    PLAIN = 1
    TRANSPOSED = 2
    BOTH = 3

    @property
    def has_plain(self) -> bool:
        """True if the matrix itself is among them."""
        return self is not Sides.TRANSPOSED

    @property
    def has_transposed(self) -> bool:
        """True if the transposed matrix is among them."""
        return self is not Sides.PLAIN

    @property
    def other(self) -> Sides:
        """The transposed side of a plain one, and the reverse."""
        return {Sides.PLAIN: Sides.TRANSPOSED, Sides.TRANSPOSED: Sides.PLAIN}[self]


class Codes(NamedTuple):
    """A matrix in 8 bits, whose products sum over its columns."""

    values: Tensor
    """``[rows, columns]``, row-major."""
    scales: Tensor
    """float32. STRIP: ``[columns / 128, rows]``. SQUARE: ``[rows / 128, columns / 128]``. LINE: ``[rows]``. MATRIX:
    ``[1]``.
    """
    block: Block

    def dequantized(self) -> Tensor:
        """The float32 values."""
        by = self.scales
        if self.block is Block.STRIP:
            by = by.t().repeat_interleave(TILE, 1)
        elif self.block is Block.SQUARE:
            by = by.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
        elif self.block is Block.LINE:
            by = by.unsqueeze(1)
        return self.values.float() * by


def cast(x: Tensor, block: Block, sides: Sides, format: Format = Format.E4M3) -> tuple[Codes | None, Codes | None]:
    """``x`` and its transposed matrix in 8 bits, as far as ``sides`` names them.

    Args:
        x: ``[..., columns]``, bfloat16, columns a multiple of 128. Its other dimensions are rows.
    """
    x = x.contiguous()
    if not x.is_cuda or _are_casts_seen():
        found = _cast(x.flatten(0, -2), block.value, sides.value, format.value)
    elif torch._C._len_torch_dispatch_stack() > 0:
        with torch._C._DisableTorchDispatch():
            found = _cast_on_gpu(x, block, sides, format)
    else:
        found = _cast_on_gpu(x, block, sides, format)
    plain, scales, transposed, transposed_scales = found
    return (
        None if sides is Sides.TRANSPOSED else Codes(plain, scales, block),
        None if sides is Sides.PLAIN else Codes(transposed, transposed_scales, block),
    )


def are_operators_seen() -> bool:
    """True for a compiler or a dispatch mode. Otherwise kernels are called directly: dispatching an operator to Python
    takes longer.
    """
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _are_casts_seen() -> bool:
    """:func:`are_operators_seen`; dispatch modes with ``sees_casts = False`` do not count."""
    if torch.compiler.is_compiling():
        return True
    for i in range(torch._C._len_torch_dispatch_stack()):
        if getattr(torch._C._get_dispatch_stack_at(i), "sees_casts", True):
            return True
    return False


def mode_of_products() -> TorchDispatchMode | None:
    """The dispatch mode, if it is the only one and has ``sees_casts = False``."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() != 1:
        return None
    mode = torch._C._get_dispatch_stack_at(0)
    return None if getattr(mode, "sees_casts", True) else mode


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Context in which the GPU of ``x`` is the current one."""
    return nullcontext() if x.device.index == torch.cuda.current_device() else torch.cuda.device(x.device)


def stream_of(x: Tensor) -> int:
    """Address of the current stream on the GPU of ``x``."""
    return torch._C._cuda_getCurrentRawStream(x.device.index)


_Found = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _scales_shape(rows: int, columns: int, block: Block) -> tuple[int, ...]:
    if block is Block.LINE:
        return (rows,)
    if block is Block.MATRIX:
        return (1,)
    return (columns // TILE, rows) if block is Block.STRIP else (rows // TILE, columns // TILE)


def _empty(x: Tensor, rows: int, columns: int, block: Block, sides: Sides, format: Format) -> _Found:
    """The four results; None where ``sides`` leaves them out."""
    rows += -rows % TILE
    dtype = format.dtype
    plain = scales = transposed = transposed_scales = None
    if sides is not Sides.TRANSPOSED:
        plain = x.new_empty(rows, columns, dtype=dtype)
        scales = x.new_empty(*_scales_shape(rows, columns, block), dtype=torch.float32)
    if sides is not Sides.PLAIN:
        transposed = x.new_empty(columns, rows, dtype=dtype)
        transposed_scales = x.new_empty(*_scales_shape(columns, rows, block), dtype=torch.float32)
    return plain, scales, transposed, transposed_scales


def _results(x: Tensor, found: Sequence[Tensor | None], format: int) -> tuple[Tensor, ...]:
    """Results of the operator: what is left out has no elements."""
    dtypes = (Format(format).dtype, torch.float32) * 2
    return tuple(x.new_empty(0, dtype=dtypes[i]) if result is None else result for i, result in enumerate(found))


_library = torch.library.Library("patrickstar", "FRAGMENT")  # registered directly: custom_op takes 100 us a call
_library.define("cast_fp8(Tensor x, int block, int sides, int format) -> (Tensor, Tensor, Tensor, Tensor)")
_cast = torch.ops.patrickstar.cast_fp8.default


@torch.library.impl(_library, "cast_fp8", "CPU")
def _(x: Tensor, block: int, sides: int, format: int) -> tuple[Tensor, ...]:
    wanted = Sides(sides)
    padded = functional.pad(x.float(), (0, 0, 0, -x.size(0) % TILE))
    found: list[Tensor | None] = []
    for is_there, matrix in ((wanted.has_plain, padded), (wanted.has_transposed, padded.t())):
        found += cast_on_host(matrix, Block(block), Format(format)) if is_there else (None, None)
    return _results(x, found, format)


def cast_on_host(x: Tensor, block: Block, format: Format) -> tuple[Tensor, Tensor]:
    """Codes and scales of float32 copies of bfloat16 values."""
    rows, columns = x.shape
    shape, dims = {
        Block.STRIP: ((rows, columns // TILE, TILE), (2,)),
        Block.SQUARE: ((rows // TILE, TILE, columns // TILE, TILE), (1, 3)),
        Block.LINE: ((rows, columns), (1,)),
        Block.MATRIX: ((rows, columns), (0, 1)),
    }[block]
    blocks = x.reshape(shape)
    scales = _scales_of(blocks.abs().amax(dims, keepdim=True), format)
    codes = (blocks * (1 / scales)).to(format.dtype).reshape(rows, columns).contiguous()
    found = scales.squeeze(2).t() if block is Block.STRIP else scales
    return codes, found.reshape(_scales_shape(rows, columns, block)).contiguous()


def _scales_of(largest: Tensor, format: Format) -> Tensor:
    """Scales for blocks with the largest magnitudes ``largest``, float32 copies of bfloat16 values."""
    bits = largest.contiguous().view(torch.int32) >> 16
    exponent = (bits >> 7) - (8 if format is Format.E4M3 else 15) + ((bits & 0x7F) > 0x60)
    scales = (exponent.clamp(min=1).to(torch.int32) << 23).view(torch.float32)
    scales = torch.where(bits >= 0x7F80, torch.nan, scales)  # an infinity, or a NaN
    return torch.where(bits == 0, 1.0, scales)


@torch.library.impl(_library, "cast_fp8", "Meta")
def _(x: Tensor, block: int, sides: int, format: int) -> tuple[Tensor, ...]:
    return _results(x, _empty(x, *x.shape, Block(block), Sides(sides), Format(format)), format)


@torch.library.impl(_library, "cast_fp8", "CUDA")
def _(x: Tensor, block: int, sides: int, format: int) -> tuple[Tensor, ...]:
    return _results(x, _cast_on_gpu(x, Block(block), Sides(sides), Format(format)), format)


def _cast_on_gpu(x: Tensor, block: Block, sides: Sides, format: Format) -> _Found:
    columns = x.size(-1)
    num_rows = x.numel() // columns
    found = _empty(x, num_rows, columns, block, sides, format)
    rows = num_rows + -num_rows % TILE
    largest = None
    if block is Block.LINE:
        largest = x.new_empty(rows + columns, dtype=torch.int32)
    elif block is Block.MATRIX:
        largest = x.new_empty(1, dtype=torch.int32)
    addresses = [0 if memory is None else memory.data_ptr() for memory in (*found, largest)]
    with device_of(x):
        _C.fp8.cuda_cast(
            x.data_ptr(), num_rows, rows, columns, block.value, format.value, *addresses, stream_of(x)
        )  # fmt: skip
    return found
