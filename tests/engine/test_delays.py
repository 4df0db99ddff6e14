import time

import pytest

from tests.engine.test_equality import WIDE
from tests.models import MODELS
from tests.training import assert_same, least_device_memory, make_config, train, train_once

pytestmark = pytest.mark.slow


def delayed(seed: int, speculation: str, **config):
    result = make_config("bf16", default_chunk_size=4096, **config)
    result["optimizer"] |= {"speculation": speculation}
    result["optimizer"]["params"]["use_hybrid_adam"] = False
    return {**result, "delays": {"max_random_us": 2000, "seed": seed}}


@pytest.mark.parametrize("speculation", ["never", "always", "commit"])
@pytest.mark.parametrize("name", ["mlp", "gpt2", "shared", "mixture_of_experts"])
def test_random_delays_change_no_number(name, speculation):
    case = MODELS[name]
    expected = train_once(case, make_config("bf16"), steps=4)
    least = least_device_memory(case, make_config("bf16", default_chunk_size=4096), steps=4)
    for seed, budget in ((1, least), (2, 2 * least), (3, None)):
        run = train(case, {**delayed(seed, speculation), "device_memory": budget}, steps=4)
        assert_same(run, expected)


@pytest.mark.parametrize("clipping", [0.05, 100.0])
def test_random_delays_with_clipping_and_accumulation(clipping):
    expected = train_once(WIDE, make_config("bf16", gradient_clipping=clipping), steps=4, accumulate=2)
    for seed in (1, 2):
        config = delayed(seed, "always", gradient_clipping=clipping, device_memory="4MiB")
        config["delays"]["link_gbps"] = 1.0
        assert_same(train(WIDE, config, steps=4, accumulate=2), expected)


def test_the_simulated_link_takes_its_time():
    case = MODELS["mlp"]
    config = delayed(0, "never", device_memory=least_device_memory(case, make_config("bf16", default_chunk_size=4096)))
    config["delays"] = {"link_gbps": 0.01, "link_latency_us": 500}
    begin = time.perf_counter()
    run = train(case, config, steps=5)
    seconds = time.perf_counter() - begin
    report = run.report
    slower_way = max(report["uploaded_bytes"], report["downloaded_bytes"])
    print(f"{slower_way} bytes one way in {seconds:.3f} s")
    assert slower_way > 0
    assert seconds >= slower_way / 0.01e9
    assert_same(run, train(case, make_config("bf16"), steps=5))
