import os

import pytest
import torch

from patrickstar.ranks.mesh import Mesh, MeshRanks
from patrickstar.tensor2d import MeshGroup, clip_grad_norm, divide_batch, orders
from tests.distributed import run_ranks
from tests.gpu.test_exchanges import on_gpus, open_on, run  # noqa: F401
from tests.gpu.test_ranks import NUM_RANKS, see_gpus
from tests.tensor2d.models import MODELS, batch, make_loss, plain_loss
from tests.tensor2d.on_meshes import open_mesh
from tests.tensor2d.test_layers import NORM_LIMITS, norm_gaps
from tests.tensor2d.test_models import build, compare_once
from tests.tensor2d.test_products import LIMITS, errors_of_products

pytestmark = pytest.mark.gpu

MOST_LINE_RANKS = 3  # the models have 6 heads and samples of 6 tokens


def add_up_in_float32():
    """cuBLAS may add parts of a 16-bit product in 16 bits, one rounding more than the tolerances allow."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def over_own_groups(device_index, axis):
    add_up_in_float32()
    with open_on(device_index) as ranks:
        group = MeshGroup.of_ranks(MeshRanks(ranks, Mesh(**{axis: len(ranks.members)})))
        device = ranks.context.device
        return errors_of_products(group, device), {name: compare_once(name, group, device)[0] for name in MODELS}


def over_torch(rows, columns):
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    add_up_in_float32()
    group = open_mesh(rows, columns, "nccl")
    return errors_of_products(group, device), {name: compare_once(name, group, device)[0] for name in MODELS}


def over_torch_in_pieces(rows, columns):
    orders._FILLING, orders._TILE = 1, 1
    return over_torch(rows, columns)


def train(group, device):
    ours, theirs = build("llama", torch.bfloat16, group, device)
    theirs = theirs.to(device)
    ids, labels = (part.to(device) for part in batch())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in (theirs, ours)]
    losses = []
    for _ in range(10):
        expected = plain_loss(theirs, ids, labels)[1]
        found = make_loss(group)(ours(divide_batch(ids, group.place)), divide_batch(labels, group.place))
        for value in (expected, found):
            value.backward()
        clip_grad_norm(ours, 0.5, group)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append((expected.item(), found.item()))
    return losses


def train_over_own_groups(device_index, axis):
    with open_on(device_index) as ranks:
        group = MeshGroup.of_ranks(MeshRanks(ranks, Mesh(**{axis: len(ranks.members)})))
        return train(group, ranks.context.device)


def check(errors, by_model):
    assert {key: error for key, error in errors.items() if not error <= LIMITS[key[1]]} == {}
    for name, gaps in by_model.items():
        assert {key: value for key, value in gaps.items() if not value <= 1e-10} == {}, name


def of_line(on_gpus):  # noqa: F811
    num_ranks, *where = on_gpus
    return min(num_ranks, MOST_LINE_RANKS), *where


@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_products_and_models_over_the_lines_of_an_engine(on_gpus, axis):  # noqa: F811
    for found in run(of_line(on_gpus), over_own_groups, axis):
        check(*found)


@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_training_in_bfloat16_as_one_process(on_gpus, axis):  # noqa: F811
    of_all = run(of_line(on_gpus), train_over_own_groups, axis)
    print(of_all[0])
    assert len({tuple(found for _, found in losses) for losses in of_all}) == 1
    assert all(found == pytest.approx(expected, rel=0.03) for expected, found in of_all[0])
    assert of_all[0][-1][1] < of_all[0][0][1] - 0.1


MESHES = [mesh for mesh in ((1, 2), (2, 1), (2, 2), (1, 3)) if mesh[0] * mesh[1] <= NUM_RANKS] or [(1, 1)]


@pytest.mark.parametrize(("rows", "columns"), MESHES)
def test_products_and_models_over_torch(rows, columns):
    for found in run_ranks(rows * columns, over_torch, rows, columns, timeout_seconds=300, environment=see_gpus):
        check(*found)


@pytest.mark.parametrize(("rows", "columns"), MESHES)
def test_products_in_pieces_over_torch(rows, columns):
    for found in run_ranks(
        rows * columns, over_torch_in_pieces, rows, columns, timeout_seconds=300, environment=see_gpus
    ):
        check(*found)


@pytest.mark.parametrize("dtype", NORM_LIMITS)
def test_norms_that_columns_divide(dtype):
    assert {key: value for key, value in norm_gaps(dtype, "cuda").items() if not value <= NORM_LIMITS[dtype]} == {}
