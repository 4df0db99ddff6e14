"""Products over a mesh of GPUs, over NCCL and through the host where ranks share one, against one process."""

import os

import pytest
import torch

from patrickstar.ranks.mesh import Mesh, MeshRanks
from patrickstar.tensor2d import MeshGroup
from tests.distributed import run_ranks
from tests.gpu.test_exchanges import on_gpus, open_on, run  # noqa: F401
from tests.gpu.test_ranks import NUM_RANKS, see_gpus
from tests.tensor2d.on_meshes import open_mesh
from tests.tensor2d.test_products import LIMITS, errors_of_products

pytestmark = pytest.mark.gpu


def over_own_groups(device_index, axis):
    with open_on(device_index) as ranks:
        group = MeshGroup.of_ranks(MeshRanks(ranks, Mesh(**{axis: len(ranks.members)})))
        return errors_of_products(group, ranks.context.device)


def over_torch(rows, columns):
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return errors_of_products(open_mesh(rows, columns, "nccl"), device)


def wrong(errors):
    return {key: error for key, error in errors.items() if not error <= LIMITS[key[1]]}


@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_products_over_the_lines_of_an_engine(on_gpus, axis):  # noqa: F811
    for errors in run(on_gpus, over_own_groups, axis):
        assert wrong(errors) == {}


@pytest.mark.parametrize(
    ("rows", "columns"),
    [mesh for mesh in ((1, 2), (2, 1), (2, 2), (1, 4)) if mesh[0] * mesh[1] <= NUM_RANKS],
)
def test_products_over_torch(rows, columns):
    for errors in run_ranks(rows * columns, over_torch, rows, columns, timeout_seconds=300, environment=see_gpus):
        assert wrong(errors) == {}
