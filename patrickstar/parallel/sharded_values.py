"""Values of a tensor-parallel model under the names and in the shapes of the model before sharding.

names = ShardedNames.of(module, model, before, group)
for part in names.parts:
    block = part.block(read)                   # this rank's block of the full parameters, read by name
    wholes = part.wholes(blocks)               # the full parameters, from the blocks of all ranks
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from patrickstar import _C
from patrickstar.module.materialize import TensorValues, attach_values
from patrickstar.tensor2d import Layer2D, MeshGroup, Placement
from patrickstar.tensor2d.layer import Source


@dataclasses.dataclass(frozen=True)
class ShardedPart:
    """One parameter of a sharded model: this rank's block of one or several concatenated full parameters."""

    name: str
    """Name in the sharded module."""
    layer: Layer2D
    key: str
    """Name in its layer."""
    sources: tuple[str, ...]
    """Names of the full parameters in the module before sharding."""

    @property
    def param(self) -> nn.Parameter:
        """The local block."""
        return self.layer.get_parameter(self.key)

    @property
    def placement(self) -> Placement:
        """The block's placement on the mesh."""
        return self.layer.placements[self.key]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the full parameters by name."""
        return dict(zip(self.sources, self.source.shapes, strict=True))

    @property
    def source(self) -> Source:
        """The full parameters' layout in the block."""
        return self.layer.sources[self.key]

    def block(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """This rank's block of the full parameters, which ``read`` returns by name."""
        wholes = [read(name) for name in self.sources]
        wholes = [whole.t() if self.source.is_transposed and whole.dim() == 2 else whole for whole in wholes]
        joined = wholes[0] if len(wholes) == 1 else torch.cat(wholes)
        return self.placement.divide(joined, self.layer.group.place)

    def wholes(self, blocks: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The full parameters by name, from the blocks of all ranks in rank order."""
        whole = self.placement.assemble(blocks, self.layer.group.place, self.layer.whole_rows.get(self.key))
        parts = whole.split(self.source.sizes)
        turned = [part.t() if self.source.is_transposed and part.dim() == 2 else part for part in parts]
        return {name: part.contiguous() for name, part in zip(self.sources, turned, strict=True)}


class ShardedNames:
    """Names of a module's parameters before sharding.

    Attributes:
        parts: the local blocks, in the module's order.
        tied: further names of tied parameters; each maps to the name among the sources of a part.
    """

    def __init__(self, group: MeshGroup, parts: list[ShardedPart], names: Sequence[str], tied: Mapping[str, str]):
        self._group = group
        self.parts = parts
        self.tied = dict(tied)
        self._names = list(names)

    @classmethod
    def of(
        cls, module: nn.Module, model: nn.Module, before: Mapping[str, nn.Parameter], group: MeshGroup
    ) -> ShardedNames:
        """Names of the sharded ``model``.

        Args:
            module: is ``model`` or contains it.
            model: sharded.
            before: the parameters of ``module`` before sharding, under all of their names.
            group: the ranks of the mesh.
        """
        prefix = next(name for name, child in module.named_modules() if child is model)
        prefix = f"{prefix}." if prefix else ""
        parts = [
            ShardedPart(f"{path}.{key}", layer, key, tuple(prefix + name for name in source.names))
            for path, layer in module.named_modules()
            if isinstance(layer, Layer2D)
            for key, source in layer.sources.items()
        ]
        known = {before[name]: name for part in parts for name in part.sources}
        return cls(group, parts, list(before), {name: known[p] for name, p in before.items() if name != known[p]})

    @property
    def of_params(self) -> dict[nn.Parameter, ShardedPart]:
        """The part of each parameter that the module has now."""
        return {part.param: part for part in self.parts}

    def wholes_of(
        self, part: ShardedPart, read: Callable[[nn.Parameter], torch.Tensor], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Full tensors on the CPU by their names before sharding. Collective over all ranks of the mesh.

        Args:
            part: of the module.
            read: returns a tensor of the block's shape for the local parameter.
            device: where blocks are all-gathered; the mesh's communicators use it.
        """
        blocks = [block.cpu() for block in self._group.world_group.gather(read(part.param).to(device))]
        with _C.HostAllocations():
            return part.wholes(blocks)

    def named(self, wholes: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The full tensors in the module's order before sharding, under all names of each."""
        for name in self._names:
            yield name, wholes[self.tied.get(name, name)]


class _ShardedValues:
    """This rank's blocks of a model's values, read by the names of the sharded module."""

    def __init__(self, values: TensorValues, names: ShardedNames):
        self._values = values
        self._parts = {part.name: part for part in names.parts}
        self._further: dict[str, list[str]] = {}
        for name, known in names.tied.items():
            self._further.setdefault(known, []).append(name)

    def __contains__(self, name: str) -> bool:
        part = self._parts.get(name)
        return name in self._values if part is None else all(self._key(source) for source in part.sources)

    def read(self, name: str) -> torch.Tensor:
        part = self._parts.get(name)
        return (
            self._values.read(name) if part is None else part.block(lambda source: self._values.read(self._key(source)))
        )

    def _key(self, source: str) -> str:
        """A name with a value for ``source``; empty: none has one."""
        return next((name for name in (source, *self._further.get(source, ())) if name in self._values), "")


def divide_attached_values(module: nn.Module, names: ShardedNames, values: TensorValues | None) -> None:
    """Lets values that were attached to ``module`` before sharding be read as blocks.

    Raises:
        ValueError: a parameter on the meta device has no values.
    """
    if values is not None:
        sharded = _ShardedValues(values, names)
        attach_values(module, sharded)
    missing = [part.name for part in names.parts if part.param.is_meta and (values is None or part.name not in sharded)]
    if missing:
        raise ValueError(
            f"{missing[0]} is on the meta device without values, and ranks of a mesh would draw others for each block; "
            "build the model on the CPU, or with patrickstar.from_pretrained"
        )
