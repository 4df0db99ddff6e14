"""The device mesh that a configuration asks for, and how its ranks share calls of the module."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from patrickstar.config import Config
from patrickstar.parallel.calls import Calls
from patrickstar.parallel.sharded_matrices import Matrices
from patrickstar.parallel.sharded_sequences import ShardedSequences
from patrickstar.ranks.mesh import Mesh, MeshRanks
from patrickstar.sequence.survey import Survey


def mesh_of(config: Config, num_ranks: int) -> Mesh:
    """The mesh that the configuration asks for.

    Raises:
        ValueError: the number of ranks does not fit; the message names numbers that do.
    """
    matrices = config.tensor_parallel
    shares = {"sequence": config.sequence_parallel.size, "rows": matrices.rows, "columns": matrices.columns}
    mesh = Mesh(data=max(num_ranks // config.ranks_per_sample, 1), **shares)
    mesh.check(num_ranks)
    return mesh


def make_calls(
    module: nn.Module,
    config: Config,
    mesh: MeshRanks,
    matrices: Matrices,
    meet: Callable[[], object],
    num_steps: Callable[[], int],
    survey: Survey,
) -> Calls:
    """The calls of an engine with ``config``. Collective over all ranks; arguments as in ``ShardedSequences``.

    Raises:
        ValueError: the model's calls cannot be sharded.
    """
    if config.sequence_parallel.size > 1:
        return ShardedSequences(module, config, mesh, meet, num_steps, matrices.calls(meet), survey)
    return matrices.calls(meet)
