import pytest

from tests.engine.test_visits import WAYS, config_of, visiting
from tests.gpu.test_equality import MIB, WIDE
from tests.training import assert_same, train, visits

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

STEPS = 3
IN_TURN = visiting(lambda step, chunk: (step + chunk) % 2 == 0, piece_numel=MIB // 4)
ALL = visiting(lambda step, chunk: True, piece_numel=MIB // 4)
SCARCE = {"8 bits": 320 * MIB, "8 bits without masters": 320 * MIB}  # values leave, and visitors still have room


@pytest.mark.parametrize("way", WAYS)
def test_no_number_changes(way):
    config = config_of(**WAYS[way]) | {"default_chunk_size": MIB}
    at_home = train(WIDE, config, steps=STEPS)
    for choose, memory in ((ALL, None), (IN_TURN, SCARCE.get(way, 448 * MIB))):
        run = train(WIDE, config | {"device_memory": memory}, steps=STEPS, before_step=choose)
        assert_same(run, at_home)
        assert visits(run.report) > STEPS
