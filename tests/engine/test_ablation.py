import pytest

from patrickstar import _C
from tests.models import MODELS
from tests.training import assert_same, make_host_config, promised, taken_over, train


@pytest.fixture
def left_out():
    yield _C.leave_out
    _C.leave_out([])


@pytest.mark.parametrize("speculation", ["always", "commit"])
def test_bits_do_not_depend_on_a_mechanism(left_out, speculation):
    clipping = {"gradient_clipping": 0.1} if speculation == "always" else {}
    config = make_host_config("bf16", device_memory=2**20, default_chunk_size=2048, **clipping)
    config["optimizer"]["speculation"] = speculation
    expected = train(MODELS["llama"], config, steps=4)
    assert taken_over(expected.report) + promised(expected.report) > 0
    for mechanism in _C.Mechanism.__members__.values():
        left_out([mechanism])
        assert_same(train(MODELS["llama"], config, steps=4), expected)
