import copy
import dataclasses
import itertools

import pytest
import torch

from patrickstar.checkpoint.blocks import KEY, BlockedParameter, ComposedTensor, Held, composed, describe_blocks
from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.manifest import Manifest, StoredTensor
from patrickstar.tensor2d import MeshPlace, Placement, Split

SPLITS = {Split.BLOCKS: (8, 12), Split.COLUMNS: (12,), Split.ROWS: (12,), Split.WHOLE: (12,)}


def parameter_of(placement, names, shapes, rows=None, turned=False):
    return BlockedParameter(
        name="layer.weight",
        held=Held(placement.split.value),
        parts=placement.parts,
        is_turned=placement.transposed,
        rows=rows,
        sources=dict(zip(names, shapes, strict=True)),
        has_turned_sources=turned,
    )


@pytest.mark.parametrize("grid", list(itertools.product((1, 2), (1, 2, 3))), ids=str)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("parts", [(), (6, 6)])
def test_blocks_make_what_placements_sharded(grid, split, parts):
    place = MeshPlace(*grid)
    shape = (12, 24) if split is Split.BLOCKS else (12,)
    if split is Split.ROWS and parts and grid[0] == 3:
        return
    for transposed in (False, True) if split is Split.BLOCKS else (False,):
        placement = Placement(split, parts, transposed=transposed)
        whole = torch.randn(shape)
        parameter = parameter_of(placement, ["a", "b"], [(6, *shape[1:])] * 2)
        held = [dataclasses.replace(place, row=row, column=column) for row, column in parameter.held.places(grid)]
        made = parameter.assemble([placement.divide(whole, one) for one in held], grid)
        assert torch.equal(torch.cat([made["a"], made["b"]]), whole)
        assert BlockedParameter.from_json(parameter.to_json()) == parameter


def test_rows_of_zeros_and_turned_sources():
    place, whole = MeshPlace(2, 2), torch.randn(5, 6)
    placement = Placement(Split.BLOCKS, padded_to=6)
    blocks = [placement.divide(whole, one) for one in place.world_group()]
    for turned in (False, True):
        shape = (6, 5) if turned else (5, 6)
        parameter = parameter_of(placement, ["table"], [shape], rows=5, turned=turned)
        assert torch.equal(parameter.assemble(blocks, (2, 2))["table"], whole.t() if turned else whole)


def manifest_of(shapes, parameter, grid=(1, 2)):
    tensors = {}
    for name, shape in shapes.items():
        stored = StoredTensor(name=name, kind="master", shape=shape, dtype=torch.float32, order=None, shards=())
        tensors[stored.key] = stored
    return Manifest(num_ranks=2, files={}, tensors=tensors, state={KEY: describe_blocks(grid, [parameter])})


PARAMETER = parameter_of(Placement(Split.BLOCKS), ["a"], [(4, 6)])
SHAPES = {"layer.weight@0,0": (4, 3), "layer.weight@0,1": (4, 3), "other": (2,)}


def test_a_manifest_with_whole_tensors():
    found = composed(manifest_of(SHAPES, PARAMETER))
    assert {name for name, _ in found.tensors} == {"a", "other"} and KEY not in found.state
    assert isinstance(found.tensors["a", "value"], ComposedTensor)
    assert found.tensors["a", "value"].shape == (4, 6)


@pytest.mark.parametrize(
    ("shapes", "changes"),
    [
        ({"layer.weight@0,0": (4, 3)}, {}),
        ({**SHAPES, "layer.weight@0,1": (4, 2)}, {}),
        ({**SHAPES, "layer.weight@0,1": (5, 3)}, {}),
        ({**SHAPES, "a": (4, 6)}, {}),
        (SHAPES, {"held": "some"}),
        (SHAPES, {"sources": {}}),
        (SHAPES, {"sources": {"a": [4, -6]}}),
        (SHAPES, {"sources": {"a": [4, 6], "b": [4, 6]}}),
        (SHAPES, {"parts": [3, 2]}),
        (SHAPES, {"rows": "all"}),
        (SHAPES, {"name": 3}),
        (SHAPES, {"is_turned": True}),
    ],
)
def test_descriptions_that_do_not_fit(shapes, changes):
    manifest = manifest_of(shapes, PARAMETER)
    state = copy.deepcopy(dict(manifest.state))
    state[KEY]["parameters"][0].update(changes)
    with pytest.raises(CheckpointError):
        composed(dataclasses.replace(manifest, state=state))


@pytest.mark.parametrize("described", [None, [], {"grid": [2]}, {"grid": [0, 2], "parameters": []}, {"grid": [1, 2]}])
def test_no_description(described):
    manifest = manifest_of(SHAPES, PARAMETER)
    with pytest.raises(CheckpointError, match="none of ours"):
        composed(dataclasses.replace(manifest, state={KEY: described}))
