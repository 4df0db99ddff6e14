import collections
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.checkpoint import CheckpointError
from patrickstar.checkpoint.codec import decode, encode

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(st.sampled_from(["$tuple", "$float", "a"]), inner)
        | st.dictionaries(st.integers(), st.integers()).map(collections.Counter)
    ),
    max_leaves=20,
)


def through_json(value):
    return decode(json.loads(json.dumps(encode(value, "it"), allow_nan=False)), "it")


def types(value):
    if isinstance(value, dict):
        return type(value), [(types(key), types(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [types(item) for item in value]
    return type(value)


@given(VALUES)
def test_what_is_encoded_comes_back(value):
    result = through_json(value)
    assert result == value
    assert types(result) == types(value)


def test_nan_and_signed_zero():
    assert math.isnan(through_json(float("nan")))
    assert math.copysign(1, through_json(-0.0)) == -1


def cyclic():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0, {"b": torch.ones(2)}]}, r"client_state\['a'\]\[1\]\['b'\] is a torch.Tensor.*tolist"),
        ({"model": object()}, r"client_state\['model'\] is a builtins.object"),
        ({"s": {1, 2}}, r"client_state\['s'\] is a builtins.set"),
        ({"f": cyclic()}, "contains itself"),
    ],
)
def test_what_cannot_be_held_is_named(value, message):
    with pytest.raises(CheckpointError, match=message):
        encode(value, "client_state")


@pytest.mark.parametrize(
    "value",
    [
        {"$pickle": "x"},
        {"$tuple": 3},
        {"$tuple": [], "a": 1},
        {"$float": "1e999"},
        {"$items": [[1]]},
        {"$items": [[[], 1]]},
    ],
)
def test_what_was_never_encoded_is_refused(value):
    with pytest.raises(CheckpointError, match="nothing that was saved"):
        decode([value], "client_state")


@pytest.mark.parametrize("name", ["MultiStepLR", "LambdaLR", "CosineAnnealingLR", "OneCycleLR", "ReduceLROnPlateau"])
def test_schedulers(name):
    arguments = {
        "MultiStepLR": {"milestones": [2, 3]},
        "LambdaLR": {"lr_lambda": lambda step: 1 / (1 + step)},
        "CosineAnnealingLR": {"T_max": 9},
        "OneCycleLR": {"max_lr": 1.0, "total_steps": 9},
        "ReduceLROnPlateau": {},
    }[name]

    def make():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
        return optimizer, getattr(torch.optim.lr_scheduler, name)(optimizer, **arguments)

    def run(optimizer, scheduler, steps):
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    optimizer, scheduler = make()
    run(optimizer, scheduler, 1)
    state, options = through_json(scheduler.state_dict()), through_json(optimizer.state_dict()["param_groups"][0])
    expected = run(optimizer, scheduler, 4)
    optimizer, scheduler = make()
    optimizer.param_groups[0].update({key: value for key, value in options.items() if key != "params"})
    scheduler.load_state_dict(state)
    assert run(optimizer, scheduler, 4) == expected
