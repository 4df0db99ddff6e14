"""Parameters of which each rank of a mesh stored a block, read as whole tensors.

A mesh of r rows and c columns stores up to r x c tensors of such a parameter, named ``<name>@<row>,<column>``. The
manifest's state describes under ``blocks`` how to assemble them, in this order: join blocks by columns and rows,
transpose if they were stored transposed, reorder interleaved parts, drop padding rows, and split into the whole
tensors.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.manifest import Manifest, StoredTensor

KEY = "blocks"
"""Key in a manifest's state."""


class Held(enum.Enum):
    """Sharding of a parameter over a mesh."""

    BLOCKS = "blocks"
    """Rank (i, j) has block (i, j) of a matrix."""
    COLUMNS = "columns"
    """The last dimension is sharded over columns and replicated over rows; the first row stores it."""
    ROWS = "rows"
    """The first dimension is sharded over rows and replicated over columns; the first column stores it."""
    WHOLE = "whole"
    """All ranks have it; the first one stores it."""

    def stored_by(self, row: int, column: int) -> tuple[int, int]:
        """(row, column) of the rank that stores the part of the rank at ``row`` and ``column``."""
        return row if self in (Held.BLOCKS, Held.ROWS) else 0, column if self in (Held.BLOCKS, Held.COLUMNS) else 0

    def places(self, grid: tuple[int, int]) -> list[tuple[int, int]]:
        """(row, column) of the ranks that store a part, in rank order."""
        everywhere = [(row, column) for row in range(grid[0]) for column in range(grid[1])]
        return [place for place in everywhere if self.stored_by(*place) == place]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockedParameter:
    """One parameter, and the whole tensors that it was made of."""

    name: str
    """Its name in the sharded model."""
    held: Held
    parts: tuple[int, ...]
    """Sizes of concatenated parts of the first dimension, of each of which a column (a row, with ``held`` rows) has
    some; empty: one part.
    """
    is_turned: bool
    """True if blocks are of the transposed matrix."""
    rows: int | None
    """Size of the first dimension without padding rows; None: no padding."""
    sources: Mapping[str, tuple[int, ...]]
    """Shapes of the whole tensors by name, concatenated along the first dimension."""
    has_turned_sources: bool
    """True if these are matrices concatenated along the second dimension instead."""

    def names(self, grid: tuple[int, int]) -> list[str]:
        """Names of the stored blocks, in rank order."""
        return [block_name(self.name, *place) for place in self.held.places(grid)]

    def assemble(self, blocks: Sequence[torch.Tensor], grid: tuple[int, int]) -> dict[str, torch.Tensor]:
        """The whole tensors, by name, from the blocks of :meth:`names`.

        Raises:
            RuntimeError, ValueError: shapes do not fit.
        """
        columns = grid[1] if self.held in (Held.BLOCKS, Held.COLUMNS) else 1
        lines = [torch.cat(list(blocks[i : i + columns]), dim=-1) for i in range(0, len(blocks), columns)]
        whole = torch.cat(lines)
        whole = whole.t() if self.is_turned else whole
        if self.parts:
            number = grid[0] if self.held is Held.ROWS else grid[1]
            if sum(self.parts) != len(whole) or any(part % number for part in self.parts):
                raise ValueError(f"parts of {list(self.parts)} rows in {number} columns are not {len(whole)} rows")
            pieces = whole.split([part // number for part in self.parts] * number)
            count = len(self.parts)
            whole = torch.cat([piece for part in range(count) for piece in pieces[part::count]])
        whole = whole if self.rows is None else whole[: self.rows]
        turned = {name: self.has_turned_sources and len(shape) == 2 for name, shape in self.sources.items()}
        sizes = [shape[1] if turned[name] else shape[0] for name, shape in self.sources.items()]
        pieces = zip(self.sources, whole.split(sizes), strict=True)
        return {name: (piece.t() if turned[name] else piece).contiguous() for name, piece in pieces}

    def to_json(self) -> dict[str, Any]:
        """The description in JSON's types."""
        return {
            "name": self.name,
            "held": self.held.value,
            "parts": list(self.parts),
            "is_turned": self.is_turned,
            "rows": self.rows,
            "sources": {name: list(shape) for name, shape in self.sources.items()},
            "has_turned_sources": self.has_turned_sources,
        }

    @classmethod
    def from_json(cls, value: Any) -> BlockedParameter:
        """Parses :meth:`to_json`'s result.

        Raises:
            CheckpointError: it is malformed.
        """
        types = {
            "name": str,
            "held": str,
            "parts": list,
            "is_turned": bool,
            "sources": dict,
            "has_turned_sources": bool,
        }
        is_described = isinstance(value, dict) and all(type(value.get(key)) is kind for key, kind in types.items())
        if not is_described or value["held"] not in {held.value for held in Held}:
            raise CheckpointError("its description of blocks is none of ours")
        rows = value.get("rows")
        shapes = list(value["sources"].values())
        numbers = [*value["parts"], *([] if rows is None else [rows])]
        numbers += [size for shape in shapes if isinstance(shape, list) for size in shape]
        if not shapes or not all(isinstance(shape, list) and shape for shape in shapes):
            raise CheckpointError(f"{value['name'][:200]}: the tensors that its blocks are of have no shapes")
        if any(type(number) is not int or number < 0 for number in numbers):
            raise CheckpointError(f"{value['name'][:200]}: its blocks are of sizes that are no numbers")
        return cls(
            name=value["name"],
            held=Held(value["held"]),
            parts=tuple(value["parts"]),
            is_turned=value["is_turned"],
            rows=rows,
            sources={name: tuple(shape) for name, shape in value["sources"].items()},
            has_turned_sources=value["has_turned_sources"],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComposedTensor(StoredTensor):
    """A whole tensor of which blocks are stored; ``shards`` are those of all blocks."""

    blocks: tuple[StoredTensor, ...]
    of: BlockedParameter
    grid: tuple[int, int]

    def compose(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Assembles this tensor, and others from the same blocks, by name, from the values of :attr:`blocks`."""
        return self.of.assemble(values, self.grid)


def block_name(name: str, row: int, column: int) -> str:
    """Name under which a rank stores its block of a parameter."""
    return f"{name}@{row},{column}"


def describe_blocks(grid: tuple[int, int], parameters: Sequence[BlockedParameter]) -> dict[str, Any]:
    """The value under :data:`KEY` in a manifest's state, in JSON's types."""
    return {"grid": list(grid), "parameters": [parameter.to_json() for parameter in parameters]}


def composed(manifest: Manifest) -> Manifest:
    """The manifest with whole tensors in place of blocks, and without their description.

    Raises:
        CheckpointError: blocks are missing, or differ in shape from their description.
    """
    if KEY not in manifest.state:
        return manifest
    described = manifest.state[KEY]
    grid = described.get("grid") if isinstance(described, dict) else None
    is_grid = isinstance(grid, list) and len(grid) == 2 and all(type(size) is int and size > 0 for size in grid)
    if not is_grid or not isinstance(described.get("parameters"), list):
        raise CheckpointError("its description of blocks is none of ours")
    tensors = dict(manifest.tensors)
    for value in described["parameters"]:
        parameter = BlockedParameter.from_json(value)
        names = parameter.names(tuple(grid))
        for role in sorted({role for name, role in manifest.tensors if name == names[0]}):
            blocks = [tensors.pop((name, role), None) for name in names]
            for whole in _composed_of(parameter, tuple(grid), blocks):
                if whole.key in tensors:
                    raise CheckpointError(f"{whole} is there twice")
                tensors[whole.key] = whole
    state = {key: value for key, value in manifest.state.items() if key != KEY}
    return dataclasses.replace(manifest, tensors=tensors, state=state)


def _composed_of(
    parameter: BlockedParameter, grid: tuple[int, int], blocks: Sequence[StoredTensor | None]
) -> Iterator[ComposedTensor]:
    present = [block for block in blocks if block is not None]
    if len(present) < len(blocks) or len({(block.dtype, block.kind) for block in present}) > 1:
        raise CheckpointError(f"{parameter.name}: some of its {len(blocks)} blocks are missing or of another dtype")
    try:
        made = parameter.assemble([torch.empty(block.shape, device="meta") for block in present], grid)
    except (RuntimeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{parameter.name}: its blocks do not fit together: {error}") from error
    for name, shape in parameter.sources.items():
        if tuple(made[name].shape) != shape:
            raise CheckpointError(f"{parameter.name}: its blocks make {list(made[name].shape)} of {name}, not {shape}")
        yield ComposedTensor(
            name=name,
            kind=present[0].kind,
            shape=shape,
            dtype=present[0].dtype,
            order=None,
            shards=tuple(shard for block in present for shard in block.shards),
            blocks=tuple(present),
            of=parameter,
            grid=grid,
        )
    if sum(map(math.prod, parameter.sources.values())) > sum(block.numel for block in present):
        raise CheckpointError(f"{parameter.name}: its blocks have fewer elements than what they are of")
