"""Values of a divided model by the names and in the shapes of the model that was divided.

names = DividedNames.of(module, model, before, group)
for part in names.parts:
    block = part.block(read)                   # of whole parameters, by their names
    wholes = part.wholes(blocks)               # of the blocks of all ranks
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
class DividedPart:
    """One parameter of a divided model: this rank's block of whole ones, one behind the other."""

    name: str
    """In the divided module."""
    layer: Layer2D
    key: str
    """In its layer."""
    sources: tuple[str, ...]
    """The names of the whole ones in the module before it was divided."""

    @property
    def param(self) -> nn.Parameter:
        """The block."""
        return self.layer.get_parameter(self.key)

    @property
    def placement(self) -> Placement:
        """How it follows from the whole ones."""
        return self.layer.placements[self.key]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the whole ones, by name."""
        return dict(zip(self.sources, self.source.shapes, strict=True))

    @property
    def source(self) -> Source:
        """What it was made of."""
        return self.layer.sources[self.key]

    def block(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """This rank's block of whole parameters, which ``read`` gives by name."""
        wholes = [read(name) for name in self.sources]
        wholes = [whole.t() if self.source.is_transposed and whole.dim() == 2 else whole for whole in wholes]
        joined = wholes[0] if len(wholes) == 1 else torch.cat(wholes)
        return self.placement.divide(joined, self.layer.group.place)

    def wholes(self, blocks: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The whole parameters by name, of the blocks of all ranks in their order."""
        whole = self.placement.assemble(blocks, self.layer.group.place, self.layer.whole_rows.get(self.key))
        parts = whole.split(self.source.sizes)
        turned = [part.t() if self.source.is_transposed and part.dim() == 2 else part for part in parts]
        return {name: part.contiguous() for name, part in zip(self.sources, turned, strict=True)}


class DividedNames:
    """The names of a module's parameters before it was divided.

    Attributes:
        parts: what has their values now, in the order of the module.
        tied: further names of parameters, and the one that is among the sources of a part.
    """

    def __init__(self, group: MeshGroup, parts: list[DividedPart], names: Sequence[str], tied: Mapping[str, str]):
        self._group = group
        self.parts = parts
        self.tied = dict(tied)
        self._names = list(names)

    @classmethod
    def of(
        cls, module: nn.Module, model: nn.Module, before: Mapping[str, nn.Parameter], group: MeshGroup
    ) -> DividedNames:
        """Of the divided ``model``, which ``module`` is or contains; ``before``: the parameters that ``module`` had, by
        all of their names.
        """
        prefix = next(name for name, child in module.named_modules() if child is model)
        prefix = f"{prefix}." if prefix else ""
        parts = [
            DividedPart(f"{path}.{key}", layer, key, tuple(prefix + name for name in source.names))
            for path, layer in module.named_modules()
            if isinstance(layer, Layer2D)
            for key, source in layer.sources.items()
        ]
        known = {before[name]: name for part in parts for name in part.sources}
        return cls(group, parts, list(before), {name: known[p] for name, p in before.items() if name != known[p]})

    @property
    def of_params(self) -> dict[nn.Parameter, DividedPart]:
        """The part that each of the module's parameters is, as it is now."""
        return {part.param: part for part in self.parts}

    def wholes_of(
        self, part: DividedPart, read: Callable[[nn.Parameter], torch.Tensor], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Whole tensors on the CPU by the names before, of what ``read`` gives of the block: a tensor of its shape. All
        ranks of the mesh call it together; blocks meet on ``device``, where the lines between ranks are.
        """
        blocks = [block.cpu() for block in self._group.everybody.gather(read(part.param).to(device))]
        with _C.HostAllocations():
            return part.wholes(blocks)

    def named(self, wholes: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """These in the order of the module before, with all names of each."""
        for name in self._names:
            yield name, wholes[self.tied.get(name, name)]


class _DividedValues:
    """This rank's blocks of a model's values, read by the names of the divided module."""

    def __init__(self, values: TensorValues, names: DividedNames):
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
        """The name under which it has values; empty: none."""
        return next((name for name in (source, *self._further.get(source, ())) if name in self._values), "")


def divide_attached_values(module: nn.Module, names: DividedNames, values: TensorValues | None) -> None:
    """Values that were attached to ``module`` before it was divided, by its names then, are read by blocks.

    Raises:
        ValueError: some of its parameters are on the meta device, and have no values.
    """
    if values is not None:
        divided = _DividedValues(values, names)
        attach_values(module, divided)
    missing = [part.name for part in names.parts if part.param.is_meta and (values is None or part.name not in divided)]
    if missing:
        raise ValueError(
            f"{missing[0]} is on the meta device without values, and ranks of a mesh would draw others for each block; "
            "build the model on the CPU, or with patrickstar.from_pretrained"
        )
