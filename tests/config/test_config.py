import collections
import copy
import decimal
import fractions
import json
import logging
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patrickstar.config import (
    Config,
    Dialect,
    HostAffinity,
    OptimizerType,
    log_accepted_options,
    make_loss_scaler,
    parse_bytes,
    parse_config,
    resolve_batch_sizes,
)
from patrickstar.config.keys import all_keys
from patrickstar.integrations.decided_config import ranks_per_sample
from patrickstar.machine.budgets import make_budgets
from patrickstar.machine.engine_options import make_engine_options


def test_defaults():
    config = parse_config(None)
    tracer = config.client.mem_tracer
    assert (
        tracer.warmup_gpu_chunk_mem_ratio,
        tracer.overall_gpu_mem_ratio,
        tracer.overall_cpu_mem_ratio,
        tracer.margin_use_ratio,
    ) == (0.1, None, None, None)
    assert (tracer.use_fake_dist, tracer.with_static_partition) == (False, False)
    assert config.compute_dtype == torch.float32
    assert config == parse_config({}) == parse_config(Config())


def test_every_key_is_accepted():
    config = parse_config(
        {
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 1, "betas": [0.8, 0.9], "eps": 0, "weight_decay": 0.1, "use_hybrid_adam": False},
            },
            "fp16": {
                "enabled": False,
                "loss_scale": 128,
                "initial_scale_power": 4,
                "loss_scale_window": 7,
                "hysteresis": 1,
                "min_loss_scale": 0.5,
            },
            "bf16": {"enabled": True},
            "gradient_clipping": 1,
            "default_chunk_size": 65536,
            "release_after_init": True,
            "use_cpu_embedding": True,
            "client": {
                "mem_tracer": {
                    "use_async_mem_monitor": False,
                    "warmup_gpu_chunk_mem_ratio": 0.2,
                    "overall_gpu_mem_ratio": 0.5,
                    "overall_cpu_mem_ratio": 1.0,
                    "margin_use_ratio": 0.7,
                    "use_fake_dist": True,
                    "with_static_partition": True,
                },
                "opts": {"with_mem_saving_comm": True, "with_mem_cache": True, "with_async_move": True},
            },
            "device_memory": "24GiB",
            "host_memory": 10**9,
            "host_threads": {"num_threads": 3, "affinity": "pinned", "num_sharing_processes": 2},
        }
    )
    assert config.optimizer.type is OptimizerType.ADAMW
    assert config.optimizer.params.betas == (0.8, 0.9)
    assert config.compute_dtype == torch.bfloat16
    assert config.fp16 is None
    assert config.device_memory == 24 * 2**30
    assert config.host_threads.affinity is HostAffinity.PINNED


@pytest.mark.parametrize(
    ("value", "expected"),
    [("24GiB", 24 * 2**30), ("1.5 GB", 1_500_000_000), ("512mib", 512 * 2**20), ("4096", 4096), (7, 7)],
)
def test_bytes(value, expected):
    assert parse_bytes(value, "device_memory") == expected


@pytest.mark.parametrize("value", ["24 gigs", "GiB", "-1GiB", 0, -5, 1.5, True, "", "1e9"])
def test_bad_bytes(value):
    with pytest.raises(ValueError, match="device_memory"):
        parse_config({"device_memory": value})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optimiser": {}}, "unknown key optimiser: did you mean optimizer?"),
        ({"optimizer": {"type": "Adam", "param": {}}}, "unknown key optimizer.param: did you mean optimizer.params?"),
        ({"optimizer": {"params": {"learning_rate": 1}}}, "unknown key optimizer.params.learning_rate"),
        (
            {"client": {"mem_tracer": {"overall_gpu_ratio": 0.5}}},
            "did you mean client.mem_tracer.overall_gpu_mem_ratio",
        ),
        ({"device_mem": 1}, "did you mean device_memory"),
        ({"optimizer": {"type": "AdmW"}}, "did you mean 'AdamW'"),
        ({"optimizer": {"type": "RMSprop"}}, "optimizer.type is 'RMSprop'"),
        ({"optimizer": {"type": "Lion", "params": {"eps": 1}}}, "params.eps is 1.0, which Lion does not have"),
        ({"optimizer": {"params": {"momentum": 0.9}}}, "momentum is 0.9, which neither Adam nor AdamW has"),
        ({"optimizer": {"type": "sgd", "params": {"nesterov": True}}}, "nesterov=True with momentum 0 and"),
        ({"optimizer": {"type": "SGD", "params": {"dampening": 1.5}}}, "dampening is 1.5; it must be at most 1"),
        ({"optimizer": {"master": "stochastic", "speculation": "commit"}}, "for bfloat16 parameters; enable bf16"),
        ({"optimizer": {"master": "stochastic", "speculation": "always"}, "bf16": {}}, "no master is updated in place"),
        ({"optimizer": {"params": {"lr": -1}}}, "optimizer.params.lr is -1"),
        ({"optimizer": {"params": {"lr": "fast"}}}, "optimizer.params.lr is 'fast'"),
        ({"optimizer": {"params": {"lr": float("nan")}}}, "optimizer.params.lr is nan"),
        ({"optimizer": {"params": {"betas": (0.9, 1.0)}}}, r"betas\[1\] is 1.0"),
        ({"optimizer": {"params": {"betas": 0.9}}}, "betas is 0.9"),
        ({"optimizer": {"params": {"use_hybrid_adam": 2}}}, "use_hybrid_adam is 2; it is a switch"),
        ({"tensor_parallel": {"rows": 2, "tp": {"tp_size": 2}}}, "2 x 2, and tensor_parallel.tp.tp_size is 2, which"),
        (
            {"tensor_parallel": {"columns": 2, "mode": "1d"}, "sequence_parallel": {"size": 2}},
            'which divides sequences over its columns, and sequence_parallel.size is 2; set the mode to "2d"',
        ),
        (
            {"tensor_parallel": {"rows": 2, "columns": 3, "mode": "1d"}},
            '2 x 3, and tensor_parallel.mode is "1d", which has no rows; give rows 1 and columns 6',
        ),
        ({"optimizer": "Adam"}, "optimizer is 'Adam'; it is a section"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled"),
        ({"fp16": {"hysteresis": 0}}, "hysteresis"),
        ({"fp16": {"loss_scale": -2}}, "loss_scale"),
        ({"default_chunk_size": 0}, "default_chunk_size is 0"),
        ({"default_chunk_size": 1.5}, "default_chunk_size is 1.5; give an integer"),
        ({"client": {"mem_tracer": {"margin_use_ratio": 1.5}}}, "margin_use_ratio is 1.5"),
        ({"client": {"mem_tracer": {"overall_cpu_mem_ratio": 0}}}, "overall_cpu_mem_ratio is 0"),
        ({"gradient_clipping": float("inf")}, "gradient_clipping is inf"),
        ({"host_threads": {"affinity": "spread"}}, 'affinity is \'spread\'; give "auto", "pinned" or "free"'),
        ({"host_threads": {"num_threads": -1}}, "host_threads.num_threads is -1; it must be at least 0"),
        ({"host_threads": {"num_threads": 1.5}}, "host_threads.num_threads is 1.5; give an integer"),
        ({"host_threads": {"num_sharing_processes": 0}}, "host_threads.num_sharing_processes is 0"),
        ({"host_threads": {"num_thread": 1}}, "did you mean host_threads.num_threads?"),
        ({"optimizer": {"speculation": "maybe"}}, 'give "auto", "always", "never" or "commit"'),
        ([], "config is a list"),
        ({3: 4}, "unknown key 3"),
    ],
)
def test_errors(config, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        parse_config(config)


def test_numbers_in_quotes_are_numbers():
    quoted = {
        "optimizer": {"params": {"lr": "1e-4", "betas": ["0.8", ".95"], "weight_decay": "0"}},
        "fp16": {"initial_scale_power": "16", "loss_scale_window": "1e3", "loss_scale": "-0.0"},
        "gradient_clipping": "1.",
        "default_chunk_size": "33554432",
        "delays": {"seed": "9007199254740993"},
    }
    plain = {
        "optimizer": {"params": {"lr": 1e-4, "betas": [0.8, 0.95], "weight_decay": 0}},
        "fp16": {"initial_scale_power": 16, "loss_scale_window": 1000, "loss_scale": 0},
        "gradient_clipping": 1,
        "default_chunk_size": 33554432,
        "delays": {"seed": 9007199254740993},
    }
    assert parse_config(quoted) == parse_config(plain)


@pytest.mark.parametrize("text", ["", "1e-4 ", "0x10", "1_000", "1,5", "nan", "inf", "1e999", "٣", "one", "True"])
def test_other_texts_are_no_numbers(text):
    with pytest.raises(ValueError, match="lr is .*; give a finite number"):
        parse_config({"optimizer": {"params": {"lr": text}}})
    for value in ("1.5", text):
        with pytest.raises(ValueError, match="default_chunk_size is .*; give an integer"):
            parse_config({"default_chunk_size": value})


def test_accepted_options_are_named_once(caplog):
    with caplog.at_level(logging.INFO, logger="patrickstar"):
        log_accepted_options(parse_config({"client": {"opts": {"with_mem_cache": True, "with_async_move": True}}}))
        log_accepted_options(parse_config(None))
    assert [record.getMessage() for record in caplog.records] == [
        "accepted without effect (docs/config.md says why): client.opts.with_mem_cache, client.opts.with_async_move"
    ]


def test_nothing_is_logged_by_default(caplog):
    with caplog.at_level(logging.INFO):
        log_accepted_options(parse_config({"client": {"mem_tracer": {"use_async_mem_monitor": True}}}))
    assert not caplog.records


def test_a_configuration_is_immutable_and_can_be_copied_and_pickled():
    config = parse_config({"aio": {"queue_depth": 3}, "checkpoint": {"writer": {"type": "MOCK"}}, "fp16": {}})
    for other in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other == config
        assert type(other.checkpoint.writer) is type(config.checkpoint.writer)
    for section in (config, config.fp16, config.aio, config.checkpoint.writer):
        with pytest.raises(ValueError, match="frozen"):
            setattr(section, next(iter(type(section).model_fields)), 1)


@pytest.mark.parametrize(
    ("config", "columns", "num_ranks"),
    [
        ({}, 1, 1),
        ({"tensor_parallel": {"rows": 3, "columns": 2}}, 2, 6),
        ({"tensor_parallel": {"autotp_size": 0}}, 1, 1),
        ({"tensor_parallel": {"autotp_size": 4}}, 4, 4),
        ({"tensor_parallel": {"tp": {"tp_size": 2}}}, 2, 2),
        ({"sequence_parallel": {"size": 3}}, 1, 3),
        ({"sequence_parallel_size": 2}, 1, 2),
    ],
)
def test_ranks_that_are_given_the_same_batches(config, columns, num_ranks):
    parsed = parse_config(config)
    assert (parsed.tensor_parallel.columns, parsed.ranks_per_sample) == (columns, num_ranks)
    assert ranks_per_sample(config) == num_ranks


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
