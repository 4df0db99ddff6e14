import pytest

from tests.bits import assert_same_bits
from tests.engine import test_writes_in_use as in_use
from tests.module import test_put_back as put_back
from tests.training import assert_same, train

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


@pytest.mark.parametrize("name", put_back.SCHEMES)
def test_masters_are_kept(name):
    ways, config = put_back.WAYS, put_back.SCHEMES[name]
    assert_same_bits(put_back.states(config, ways), put_back.states(config, [None] * len(ways)))


@pytest.mark.parametrize("name", in_use.SCHEMES)
def test_parameters_are_written_while_their_chunk_is_in_use(name):
    config = {key: value for key, value in in_use.SCHEMES[name].items() if key != "device_memory"}
    run = train(in_use.case_of(clamps=True), config, steps=4)
    assert_same(run, train(in_use.case_of(clamps=False), config, steps=4, before_step=in_use.clamp_all))
