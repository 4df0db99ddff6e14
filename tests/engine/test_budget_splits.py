import itertools

import pytest

from patrickstar import _C, MemoryBudgetError
from patrickstar.config import Dialect, parse_config
from patrickstar.runtime import initialize_engine
from tests.models import MODELS, Case, gpt2, token_batch
from tests.training import assert_same, least_device_memory, least_named, make_config, taken_over, train, train_once

STEPS = 3
DEVICES = [1.0, 1.2, 1.6, 2.2, 3.2]
"""Shares of the least device memory that works when the host holds everything."""
SEVERAL = _C.Backwards.SEVERAL
SUMS = [1.02, 1.05, 1.1]
"""Shares of the need: the host's bytes plus the least device memory. No chunk is split."""
GPT2 = Case(lambda: gpt2(hidden=64, layers=4), token_batch)


class Splits:
    def __init__(self, case, config):
        self.case, self.config = case, config
        self.unlimited = train_once(case, config, steps=STEPS)
        self.least_device = least_device_memory(case, config, steps=STEPS)
        engine, _ = initialize_engine(case.build, 0, config)
        with engine:
            layout = engine._session.layout
            self.on_host = _C.initial_placement(layout, 2**60, 0)[1]
            self.largest = max(layout.chunk(index)["shard_numel"] for index in range(layout.num_chunks)) * 16

    def check(self, device_bytes, sum_bytes):
        host_bytes = sum_bytes - device_bytes
        if host_bytes <= 0:
            return False
        config = {**self.config, "device_memory": device_bytes, "host_memory": host_bytes}
        assert_same(train(self.case, config, steps=STEPS), self.unlimited)
        return True


@pytest.mark.parametrize(
    ("precision", "clipping"),
    [("bf16", 1.0), *(pytest.param(*rest, marks=pytest.mark.slow) for rest in (("fp32", 0.0), ("fp16", 1.0)))],
)
def test_every_split_trains(precision, clipping):
    splits = Splits(GPT2, make_config(precision, default_chunk_size=16 * 1024, gradient_clipping=clipping))
    need = splits.least_device + splits.on_host
    count = sum(splits.check(int(splits.least_device * d), int(need * s)) for d in DEVICES for s in SUMS)
    assert count >= 12


def test_gradients_with_memory_of_their_own():
    config = make_config("bf16", default_chunk_size=16 * 1024, gradient_clipping=0.05)
    config["optimizer"] |= {"master": "stochastic", "states": "bf16"}
    splits = Splits(GPT2, config)
    need = splits.least_device + splits.on_host
    count = sum(splits.check(int(splits.least_device * d), int(need * s)) for d in DEVICES for s in SUMS)
    assert count >= 9


@pytest.mark.parametrize("name", ["bert", "t5", "lora", "lstm", "shared", "frozen", "mixture_of_experts"])
def test_models(name):
    splits = Splits(MODELS[name], make_config("bf16", default_chunk_size=4 * 1024))
    need = splits.least_device + splits.on_host + splits.largest
    assert sum(splits.check(int(splits.least_device * d), need) for d in DEVICES[::2]) >= 2


@pytest.mark.parametrize("share", [1.0, 1.5, 2.0, 3.0])
def test_less_is_refused(share):
    splits = Splits(GPT2, make_config("bf16", default_chunk_size=16 * 1024))
    device_bytes = int(splits.least_device * share)

    def named(host_bytes):
        config = {**splits.config, "device_memory": device_bytes, "host_memory": host_bytes}
        with pytest.raises(MemoryBudgetError, match="optimizer states need .*; raise host_memory") as caught:
            initialize_engine(GPT2.build, 0, config)
        return least_named(caught.value)

    least = named(1)
    assert named(least - 1) == least
    config = {**splits.config, "device_memory": device_bytes, "host_memory": least}
    initialize_engine(GPT2.build, 0, config)[0].close()


@pytest.mark.parametrize(("device_share", "host_share"), [(2.0, 0.9), (2.5, 0.8)])
def test_updates_ahead_where_chunks_are_at_rest_on_both(device_share, host_share):
    config = make_config("bf16", default_chunk_size=16 * 1024, gradient_clipping=1e3)
    config["optimizer"]["speculation"] = "always"
    splits = Splits(GPT2, config)
    config["device_memory"] = int(splits.least_device * device_share)
    config["host_memory"] = int(16 * host_share * splits.unlimited.report["num_chunk_elements"]) + splits.largest
    run = train(GPT2, config, steps=8)
    report = run.report
    assert 0 < report["num_device_state_chunks"] < report["num_chunks"]
    assert report["num_speculated_updates"] == taken_over(report) > 7 * report["num_chunks"] / 3
    assert_same(run, train(GPT2, splits.config | {"device_memory": None, "host_memory": None}, steps=8))


def accumulating(config, **keys):
    keys = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0, **keys}
    return parse_config({**config, **keys}, Dialect.DEEPSPEED)


def test_accumulation_is_known_before_the_first_step():
    config = make_config("bf16", default_chunk_size=16 * 1024)
    unlimited = train(GPT2, config, steps=STEPS, accumulate=2)
    least_device = least_device_memory(GPT2, config, steps=STEPS, accumulate=2)
    engine, _ = initialize_engine(GPT2.build, 0, config)
    with engine:
        layout = engine._session.layout
        once, several = (_C.initial_placement(layout, 2**60, 0, known)[1] for known in (_C.Backwards.ONE, SEVERAL))
    elements = unlimited.report["num_chunk_elements"]
    assert 0 <= several - once - 6 * elements <= 8192 * unlimited.report["num_chunks"]  # whole pages
    count = 0
    for device_share, share in itertools.product(DEVICES[::2], SUMS[:1]):
        device_bytes = int(least_device * device_share)
        host_bytes = int((least_device + several) * share) - device_bytes
        if host_bytes > 0:
            limits = {"device_memory": device_bytes, "host_memory": host_bytes}
            run = train(GPT2, accumulating(config, **limits), steps=STEPS, accumulate=2)
            assert_same(run, unlimited)
            count += 1
    assert count >= 3
    small = {"device_memory": least_device, "host_memory": once}
    with pytest.raises(MemoryBudgetError, match=r"gradients that accumulate \(gradient_accumulation_steps\)") as caught:
        initialize_engine(GPT2.build, 0, accumulating(config, **small))
    least = least_named(caught.value)
    assert least > once
    initialize_engine(GPT2.build, 0, accumulating(config, **{**small, "host_memory": least}))[0].close()
