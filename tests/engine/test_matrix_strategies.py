import types

import pytest
import torch

from patrickstar.config import parse_config
from patrickstar.config.dialects import Dialect
from patrickstar.parallel.matrix_strategies import OneDimension, TwoDimensions, choose_way
from patrickstar.tensor2d import MeshGroup
from patrickstar.tensor2d.lines import Line
from tests.ranks.sharded import Model

WIDE = {"n_embd": 256}


def line(size):
    found = Line()
    found.size = size
    return found


def chosen(model, rows, columns, **config):
    matrices = {"rows": rows, "columns": columns, "mode": config.pop("mode", "auto")}
    parsed = parse_config({**config, "tensor_parallel": matrices}, Dialect.DEEPSPEED)
    mesh = types.SimpleNamespace(world_group=types.SimpleNamespace(members=tuple(range(rows * columns))))
    group = MeshGroup(line(rows), line(columns), line(rows * columns))
    with torch.device("meta"):
        return choose_way(parsed, mesh, group, model.build())


@pytest.mark.parametrize(
    ("model", "mesh", "config", "way", "why"),
    [
        (Model("gpt2"), (1, 2), {"train_micro_batch_size_per_gpu": 4}, OneDimension, "positions of the model, 4 x 64"),
        (Model("gpt2"), (2, 2), {"train_batch_size": 4}, TwoDimensions, "256 tokens are 8 times the hidden size"),
        (Model("gpt2", WIDE), (2, 2), {"train_batch_size": 4}, OneDimension, "256 tokens are 1 times the hidden size"),
        (Model("gpt2"), (1, 2), {}, TwoDimensions, "not known without train_micro_batch_size_per_gpu"),
        (Model("bert"), (1, 2), {"train_batch_size": 4}, OneDimension, "positions of the model, 4 x 64"),
        (Model("llama"), (1, 4), {"train_batch_size": 4}, TwoDimensions, "1 x 4 (heads: 4, of keys 2)"),
        (Model("gpt2"), (1, 2), {"mode": "1d"}, OneDimension, ""),
        (Model("gpt2"), (2, 2), {"mode": "2d"}, TwoDimensions, ""),
    ],
)
def test_the_way_that_receives_least_is_taken(model, mesh, config, way, why):
    found = chosen(model, *mesh, **config)
    assert type(found.way) is way
    assert why in found.reason and bool(found.reason) == bool(why)
    rows, columns = mesh if way is TwoDimensions else (mesh[0] * mesh[1], 1)
    assert (found.way.group.place.rows, found.way.group.place.columns) == (rows, columns)
