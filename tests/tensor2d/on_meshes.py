import os

import torch
import torch.distributed as dist

from patrickstar.ranks.mesh import Mesh
from patrickstar.tensor2d import MeshGroup, assemble_activation
from tests.distributed import run_ranks


def open_mesh(rows, columns, backend="gloo"):
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        dist.init_process_group(backend)
    return MeshGroup.of_torch(Mesh(rows=rows, columns=columns))


def on_mesh(rows, columns, function, *args):
    if rows * columns == 1:
        return [function(rows, columns, *args)]
    return run_ranks(rows * columns, function, rows, columns, *args, timeout_seconds=100)


def blocks_of_all(block, group):
    return group.world_group.gather(block.detach())


def whole_activation(block, group):
    return assemble_activation(blocks_of_all(block, group), group.place)


def gap(found, expected):
    """The largest difference, in units of the largest value (at least 0.01)."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=0.01)).item()


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
