"""What the configuration says of a run's ranks: the mesh that they are, and how they share calls of the module."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from patrickstar.config import Config
from patrickstar.engine.calls import Calls, OwnCalls
from patrickstar.engine.divided_sequences import DividedSequences
from patrickstar.ranks.mesh import Mesh, MeshRanks


def mesh_of(config: Config, num_ranks: int) -> Mesh:
    """The mesh that the configuration asks for.

    Raises:
        ValueError: the ranks cannot be divided so; the message names what would do.
    """
    size = config.sequence_parallel.size
    Mesh(data=max(num_ranks // size, 1), sequence=size).check(num_ranks)
    return Mesh(data=num_ranks // size, sequence=size)


def make_calls(
    module: nn.Module, config: Config, mesh: MeshRanks, meet: Callable[[], object], num_steps: Callable[[], int]
) -> Calls:
    """Of an engine with ``config``; all ranks call it at the same point. The arguments are those of
    :class:`~patrickstar.engine.divided_sequences.DividedSequences`.

    Raises:
        ValueError: the model's calls cannot be divided.
    """
    if config.sequence_parallel.size > 1:
        return DividedSequences(module, config, mesh, meet, num_steps)
    return OwnCalls()
