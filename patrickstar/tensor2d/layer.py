"""The base class of layers on a mesh, with the placement and source of each parameter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import nn

from patrickstar.tensor2d.division import Placement, Split
from patrickstar.tensor2d.group import MeshGroup


@dataclasses.dataclass(frozen=True)
class Source:
    """Origin of a parameter: whole parameters of another model, concatenated."""

    names: tuple[str, ...]
    """Their names in that model."""
    sizes: tuple[int, ...]
    """Their sizes along the first dimension (second, if transposed)."""
    shapes: tuple[tuple[int, ...], ...]
    """Their shapes."""
    is_transposed: bool = False
    """True if that model stores [in, out]."""


class Layer2D(nn.Module):
    """A module whose parameters are this rank's shards of whole ones. Every rank has the same parameters, of the same
    shapes.

    Attributes:
        group: the mesh.
        placements: placement of each of the module's own parameters, by name.
        whole_rows: number of real rows of each parameter with padding rows.
        sources: origin of each parameter that replaces another model's, by name.
    """

    def __init__(self, group: MeshGroup):
        super().__init__()
        self.group = group
        self.placements: dict[str, Placement] = {}
        self.whole_rows: dict[str, int] = {}
        self.sources: dict[str, Source] = {}

    def add_parameter(
        self, name: str, shape: tuple[int, ...], placement: Placement, dtype: torch.dtype | None, device: object
    ) -> None:
        """Registers a parameter of this rank's ``shape``, without values."""
        self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))  # type: ignore[arg-type]
        self.placements[name] = placement

    def sharded_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters with a placement, by name. A tied one is in each layer that has it."""
        return {name: self.get_parameter(name) for name in self.placements}

    @torch.no_grad()
    def clear_padding(self) -> None:
        """Zeroes this rank's part of the padding rows."""
        for name, real in self.whole_rows.items():
            parameter, placement = self._parameters.get(name), self.placements[name]
            if parameter is None:
                continue
            is_last = placement.transposed or placement.split is Split.COLUMNS
            dim, index = (-1, self.group.place.column) if is_last else (0, self.group.place.row)
            size = parameter.shape[dim]
            begin = min(max(real - index * size, 0), size)
            parameter.narrow(dim, begin, size - begin).zero_()

    def take(self, name: str, theirs: Mapping[str, torch.Tensor], *, is_transposed: bool = False) -> None:
        """Fills parameter ``name`` from concatenated whole parameters of another model, given by their names there. If
        they are on the meta device, only their origin is recorded.

        Raises:
            ValueError: shapes do not fit, or some are trained and others frozen.
        """
        self._check_trained(theirs)
        wholes = [whole.t() if is_transposed and whole.dim() == 2 else whole for whole in theirs.values()]
        self.sources[name] = Source(
            names=tuple(theirs),
            sizes=tuple(len(whole) for whole in wholes),
            shapes=tuple(tuple(whole.shape) for whole in theirs.values()),
            is_transposed=is_transposed,
        )
        if not any(whole.is_meta for whole in wholes):
            self.load_whole({name: torch.cat([whole.detach() for whole in wholes])})
        self.get_parameter(name).requires_grad_(all(whole.requires_grad for whole in theirs.values()))

    def _check_trained(self, theirs: Mapping[str, torch.Tensor]) -> None:
        frozen = [name for name, whole in theirs.items() if not whole.requires_grad]
        trained = [name for name, whole in theirs.items() if whole.requires_grad]
        if frozen and trained:
            raise ValueError(
                f"{', '.join(frozen)} is frozen and {', '.join(trained)} is trained, and they become one parameter of "
                f"a {type(self).__name__}; train or freeze all of them"
            )

    @torch.no_grad()
    def load_whole(self, values: Mapping[str, torch.Tensor]) -> None:
        """Loads this rank's shards of whole parameters, which have the shapes of PyTorch's own layer.

        Raises:
            ValueError: a parameter has another shape, or does not exist.
        """
        for name, whole in values.items():
            parameter = self._parameters.get(name)
            if parameter is None:
                raise ValueError(
                    f"{type(self).__name__} has no parameter {name!r}; it has {', '.join(self._parameters)}"
                )
            part = self.placements[name].divide(whole, self.group.place)
            if part.shape != parameter.shape:
                raise ValueError(
                    f"{type(self).__name__}.{name}: a whole tensor of {list(whole.shape)} gives blocks of "
                    f"{list(part.shape)}; the layer has {list(parameter.shape)}"
                )
            parameter.copy_(part)


def load_whole(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """:meth:`Layer2D.load_whole` for all values, by ``model``'s parameter names.

    Raises:
        ValueError: a name belongs to no parameter of a :class:`Layer2D`, or a shape does not fit.
    """
    for name, whole in values.items():
        path, _, own = name.rpartition(".")
        try:
            module = model.get_submodule(path)
        except AttributeError:
            module = None
        if not isinstance(module, Layer2D):
            raise ValueError(f"{type(model).__name__} has no parameter {name!r} that is sharded over a mesh")
        module.load_whole({own: whole})


def whole_values(
    model: nn.Module, of: Callable[[nn.Parameter], torch.Tensor] = lambda parameter: parameter
) -> dict[str, torch.Tensor]:
    """All-gathers each parameter of a :class:`Layer2D` in ``model``, whole, to every rank. All ranks of the mesh must
    call it at the same point.

    Args:
        model: a tied parameter appears under each of its names.
        of: the tensor to gather for a parameter, of its shape: itself, its gradient or an optimizer state.
    """
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, Layer2D):
            for name, parameter in module.sharded_parameters().items():
                blocks = module.group.world_group.gather(of(parameter).detach())
                whole = module.placements[name].assemble(blocks, module.group.place, module.whole_rows.get(name))
                found[f"{prefix}.{name}" if prefix else name] = whole
    return found


def source_values(
    model: nn.Module, of: Callable[[nn.Parameter], torch.Tensor] = lambda parameter: parameter
) -> dict[str, torch.Tensor]:
    """:func:`whole_values` by the names and in the shapes of the replaced model."""
    sources = {
        f"{prefix}.{name}" if prefix else name: source
        for prefix, module in model.named_modules()
        if isinstance(module, Layer2D)
        for name, source in module.sources.items()
    }
    found = {}
    for name, whole in whole_values(model, of).items():
        if name in sources:
            source = sources[name]
            for theirs, part in zip(source.names, whole.split(source.sizes), strict=True):
                found[theirs] = part.t() if source.is_transposed and part.dim() == 2 else part
    return found


@torch.no_grad()
def match_replicas(model: nn.Module) -> None:
    """Broadcasts parameters that a column's ranks replicate from its first row. All ranks must call it once after
    drawing initial values.
    """
    for module in model.modules():
        if not isinstance(module, Layer2D) or module.group.along_rows.size == 1:
            continue
        for name, parameter in module.sharded_parameters().items():
            if module.placements[name].split is Split.COLUMNS:
                module.group.along_rows.broadcast(parameter.data, 0).wait()
