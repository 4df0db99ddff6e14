"""States that pass through a real GPU: the same numbers, and the share that measured speeds give it."""

from __future__ import annotations

import pytest

from tests.gpu.test_equality import WIDE
from tests.training import assert_same, make_config, train

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]
MIB = 2**20


def on_host(streaming, speculation="auto", **config):
    result = make_config("bf16", default_chunk_size=4 * MIB, **config)
    result["optimizer"]["params"]["use_hybrid_adam"] = False
    result["optimizer"] |= {"streaming": streaming, "speculation": speculation}
    return result


@pytest.mark.parametrize("speculation", ["never", "always", "commit"])
def test_who_updates_changes_no_number(speculation):
    expected = train(WIDE, on_host("never", "never"), steps=8)
    for streaming in ("always", "auto"):
        run = train(WIDE, on_host(streaming, speculation), steps=8)
        print(f"{streaming}: {run.report['num_streamed_updates']} updates streamed")
        if streaming == "always":
            assert run.report["num_streamed_updates"] > 0
        assert_same(run, expected)


def test_random_delays():
    expected = train(WIDE, on_host("never", "never", gradient_clipping=0.1), steps=5)
    for seed in (1, 2):
        config = on_host("always", "always", gradient_clipping=0.1, device_memory=400 * MIB)
        run = train(WIDE, {**config, "delays": {"max_random_us": 2000, "seed": seed}}, steps=5)
        assert run.report["num_streamed_updates"] > 0
        assert_same(run, expected)
