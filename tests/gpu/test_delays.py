import pytest

from tests.gpu.test_equality import MIB, WIDE
from tests.training import assert_same, make_config, train

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


@pytest.mark.parametrize("speculation", ["never", "always", "commit"])
def test_random_delays_change_no_number(speculation):
    expected = train(WIDE, make_config("bf16", default_chunk_size=4 * MIB), steps=6)
    config = make_config("bf16", default_chunk_size=4 * MIB, device_memory=400 * MIB)
    config["optimizer"] |= {"speculation": speculation}
    for seed in (1, 2):
        run = train(WIDE, {**config, "delays": {"max_random_us": 3000, "seed": seed}}, steps=6)
        assert run.report["uploaded_bytes"] > 0
        assert_same(run, expected)
