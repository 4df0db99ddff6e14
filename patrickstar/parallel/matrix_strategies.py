"""Strategies of tensor parallelism: SUMMA on a 2D mesh, or Megatron's one dimension. An engine uses one of them.

chosen = choose_way(config, mesh, group, model)        # `tensor_parallel.mode`
chosen.way.divide(model)
calls = chosen.way.calls(mesh)
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from torch import nn

from patrickstar.config import Config, MatrixMode
from patrickstar.config.batch_sizes import resolve_batch_sizes
from patrickstar.parallel.calls import Calls
from patrickstar.parallel.shared_calls import RowCalls, SharedCalls
from patrickstar.ranks.mesh import MeshRanks
from patrickstar.tensor2d import MeshGroup, parallelize
from patrickstar.tensor2d.cost import Mode
from patrickstar.tensor2d.model_cost import choose_for
from patrickstar.tensor2d.one_dimension import tall_group
from patrickstar.tensor2d.sharded_models import find_1d_structure, parallelize_1d
from patrickstar.tensor2d.structure import find_structure


class Way(Protocol):
    """A strategy that shards a model's matrices over the ranks of a mesh."""

    group: MeshGroup
    """The ranks, at the mesh coordinates of their blocks."""
    shown: str
    """The mesh as text for logs."""
    mode: MatrixMode
    """The strategy's value in the configuration."""

    def check(self, model: nn.Module) -> None:
        """Raises ValueError, which names a module, if ``model`` has no form over the mesh."""
        ...

    def divide(self, model: nn.Module) -> None:
        """Replaces the matrices of a Hugging Face model by this rank's blocks.

        Raises:
            ValueError: the model has no form over the mesh, or a size is not divisible.
        """
        ...

    def calls(self, mesh: MeshRanks) -> Calls:
        """How the ranks share calls of the sharded model."""
        ...


class TwoDimensions:
    """2D blocks, multiplied by SUMMA (:func:`patrickstar.tensor2d.parallelize`)."""

    mode = MatrixMode.TWO

    def __init__(self, group: MeshGroup):
        self.group = group
        self.shown = f"over {group.place.rows} x {group.place.columns}"

    def check(self, model: nn.Module) -> None:
        """See :class:`Way`."""
        find_structure(model)

    def divide(self, model: nn.Module) -> None:
        """See :class:`Way`."""
        parallelize(model, self.group)

    def calls(self, mesh: MeshRanks) -> Calls:
        """Rows of the mesh shard the batch."""
        return RowCalls(mesh, self.group)


class OneDimension:
    """Megatron's pairs of column-parallel and row-parallel layers, with sequence parallelism between pairs
    (:func:`patrickstar.tensor2d.sharded_models.parallelize_1d`).

    Args:
        group: of all ranks of the mesh.
    """

    mode = MatrixMode.ONE

    def __init__(self, group: MeshGroup):
        self._line = group.world_group
        self.group = tall_group(self._line)
        self.shown = f"in one dimension over {self._line.size}"

    def check(self, model: nn.Module) -> None:
        """See :class:`Way`."""
        find_1d_structure(model)

    def divide(self, model: nn.Module) -> None:
        """See :class:`Way`."""
        parallelize_1d(model, self._line)

    def calls(self, mesh: MeshRanks) -> Calls:
        """The model itself shards sequences."""
        return SharedCalls(mesh)


@dataclasses.dataclass(frozen=True)
class ChosenWay:
    """A strategy and the reason for it."""

    way: Way
    reason: str = ""
    """Empty if the configuration asked for this strategy."""


def choose_way(config: Config, mesh: MeshRanks, group: MeshGroup, model: nn.Module) -> ChosenWay:
    """The strategy that ``tensor_parallel.mode`` asks for. Deterministic, without communication.

    Values are sharded before the first forward. So ``"auto"`` counts the tokens of the configured micro-batch size and
    of all positions of the model. If either is unknown it chooses two dimensions, which accept every sequence length.

    Args:
        config: of the engine.
        mesh: of the run.
        group: the ranks that share matrices.
        model: of Hugging Face, not sharded yet.
    """
    mode = config.tensor_parallel.mode
    if mode is not MatrixMode.AUTO:
        return ChosenWay(_WAYS[Mode(mode.value)](group))
    if config.sequence_parallel.size > 1:
        why = "the sequences are divided by sequence_parallel, which one dimension would divide once more"
        return ChosenWay(TwoDimensions(group), why)
    try:
        find_1d_structure(model)
    except ValueError as error:  # two dimensions say it too, if it holds for them
        return ChosenWay(TwoDimensions(group), str(error))
    batch, length = _micro_batch(config, mesh), getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if batch is None or length is None:
        missing = "train_micro_batch_size_per_gpu" if batch is None else "the model's max_position_embeddings"
        why = f'the tokens of a forward are not known without {missing}, and mode "2d" takes any number of them'
        return ChosenWay(TwoDimensions(group), why)
    try:
        choice = choose_for(
            model,
            batch=batch,
            length=length,
            ranks=group.place.size,
            mesh=group.place,
            element_bytes=config.compute_dtype.itemsize,
        )
    except ValueError as error:  # two dimensions say which sizes would do
        return ChosenWay(TwoDimensions(group), str(error))
    counted = f"counted with the micro-batch size and all positions of the model, {batch} x {length}"
    return ChosenWay(_WAYS[choice.mode](group), f"{counted}: {choice.reason}")


_WAYS = {Mode.ONE: OneDimension, Mode.TWO: TwoDimensions}


def _micro_batch(config: Config, mesh: MeshRanks) -> int | None:
    if config.train_batch_size is None and config.train_micro_batch_size_per_gpu is None:
        return None
    num_ranks = len(mesh.world_group.members) // config.ranks_per_sample
    return resolve_batch_sizes(config, num_ranks).micro_batch_size
