import collections
import decimal
import fractions
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patrickstar.config import Dialect, make_loss_scaler, parse_config, resolve_batch_sizes
from patrickstar.config.keys import all_keys
from patrickstar.machine.budgets import make_budgets
from patrickstar.machine.engine_options import make_engine_options

CPU = torch.device("cpu")


class Odd:
    def __repr__(self):
        return "two\nlines"


def contains_itself(make):
    value = make()
    value.update(optimizer=value) if isinstance(value, dict) else value.append(value)
    return value


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"optimizer": value}
    return value


STRANGE = [
    math.nan, math.inf, -math.inf, 1e300, 5e-324, -0.0, 10**400, -(10**400), 10**5000, 2**31, 2**53, 2**62, 2**64,
    "9" * 500 + "GiB", "1" * 400 + ".5GB", "9" * 5000, "٣GiB", "", "a\nb", "\0", "\ud800", "auto", "nvme", "AdamW",
    b"x", 1j, object(), Odd(), Odd, len, {1, 2}, frozenset(), range(3), collections.Counter(),
    decimal.Decimal("NaN"), decimal.Decimal("sNaN"), decimal.Decimal("1e999999"), fractions.Fraction(10**400),
    np.float32(1), np.int64(3), np.array([1, 2]), torch.tensor(1.0), torch.ones(2), torch.float16,
    [math.nan] * 2, [10**400] * 2, {"enabled": torch.ones(2)}, {"enabled": np.array([1, 2])}, {"type": 3}, {3: 4},
    {b"x": 1}, {Odd(): 1}, {"x\ny": 1}, {10**5000: 1}, {"type": "WarmupLR", "params": {"warmup_num_steps": 10**400}},
    contains_itself(dict), contains_itself(list), nested(100_000),
]  # fmt: skip
PATHS = sorted({key.path for key in all_keys()})


def config_of(path, value):
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def check(config, dialect):
    try:
        parsed = parse_config(config, dialect)
        make_loss_scaler(parsed)
        make_engine_options(parsed, CPU, make_budgets(parsed, CPU), 0, (0, 1))
        resolve_batch_sizes(parsed, 2)
    except ValueError as error:
        assert type(error) is ValueError
        first, *rest = str(error).splitlines()
        assert not rest or first == f"the configuration has {len(rest)} problems:"
        assert all(0 < len(line) < 500 for line in (first, *rest))


def test_strange_values_of_every_key():
    of_special_kinds = ["optimizer", "optimizer.params.lr", "optimizer.params.betas", "device_memory", "bf16", "plan"]
    of_special_kinds += ["fp16.initial_scale_power", "default_chunk_size", "scheduler", "zero_optimization", "amp"]
    of_special_kinds += ["csv_monitor", "train_batch_size", "communication_data_type", "host_threads.num_threads"]
    places = [(path, index) for path in of_special_kinds for index in range(len(STRANGE))]
    places += [(path, (7 * number) % len(STRANGE)) for number, path in enumerate(PATHS)]
    for path, index in places:
        for dialect in Dialect:
            check(config_of(path, STRANGE[index]), dialect)


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=4),
        st.binary(max_size=2),
        st.integers(0, len(STRANGE) - 1).map(lambda index: STRANGE[index]),
    ),  # fmt: skip
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3),
    max_leaves=4,
)


class Built(dict):
    pass


@settings(deadline=None, max_examples=120, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    items=st.lists(st.tuples(st.sampled_from(PATHS), VALUES), max_size=4),
    others=st.dictionaries(st.one_of(st.text(max_size=4), st.integers(), st.binary(), st.none()), VALUES, max_size=2),
    dialect=st.sampled_from(Dialect),
)
def test_any_values_together(items, others, dialect):
    config = Built(others)
    for path, value in items:
        *sections, name = path.split(".")
        place = config
        for section in sections:
            place[section] = place = place[section] if isinstance(place.get(section), Built) else Built()
        place[name] = value
    check(config, dialect)


MESSAGES = [
    ({"optimizer": {"params": {"lr": 10**400}}}, "optimizer.params.lr is an integer of 1329 bits; give a finite"),
    ({"optimizer": {"params": {"betas": [0.9, 10**400]}}}, r"betas\[1\] is an integer of 1329 bits; give a finite"),
    ({"device_memory": "9" * 500}, "device_memory is '999.*; give bytes as a positive integer .*, at most 4611"),
    ({"device_memory": 2**63}, "device_memory is 9223372036854775808; give bytes"),
    ({"delays": {"seed": 2**64}}, "delays.seed is 18446744073709551616; give an integer of at most 4611"),
    ({"fp16": {"initial_scale_power": 2**40}}, "initial_scale_power is 1099511627776; it must be at most 127"),
    ({"host_threads": {"num_threads": 2**40}}, "num_threads is 1099511627776; it must be at most 4096"),
    ({"rank_timeout_seconds": 1e300}, r"rank_timeout_seconds is 1e\+300; it must be at most 1e\+09"),
    (contains_itself(dict), "config contains itself, or is nested in more than 32 levels"),
    ({"amp": contains_itself(list)}, "config contains itself, or is nested in more than 32 levels"),
    (nested(33), "config contains itself, or is nested in more than 32 levels"),
    ({"a\nb": 1}, r"unknown key 'a\\nb'"),
]


def test_messages():
    for config, message in MESSAGES:
        with pytest.raises(ValueError, match=message) as caught:
            parse_config(config)
        assert "\n" not in str(caught.value)


def test_what_is_there_twice_is_nested_once():
    device = {"device": "cpu"}
    shared = {"offload_param": device, "offload_optimizer": device}
    assert parse_config({"zero_optimization": shared}).zero_optimization.offload_param.device == "cpu"


FILES = [b"[" * 100_000, b'{"optimizer":' * 100_000, b"\xff\xfe", b'{"lr": ' + b"9" * 5000 + b"}", b"null", b'"x"', b""]


def test_files(tmp_path):
    path = tmp_path / "config.json"
    for content in FILES:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"config\.json|config is a"):
            parse_config(path)
    path.write_text(json.dumps({"gradient_clipping": 0.5}))
    assert parse_config(path).gradient_clipping == 0.5
    with pytest.raises(ValueError, match="config is 'a.*', which cannot be read"):
        parse_config("a\0b")
