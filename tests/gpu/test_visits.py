"""Updates that a real GPU makes for the host ([Note: visits], csrc/engine/visits.h): the same bits."""

from __future__ import annotations

import pytest

from tests.engine.test_visits import WAYS, config_of, visiting
from tests.gpu.test_equality import MIB, WIDE
from tests.training import assert_same, train

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

STEPS = 3
IN_TURN = visiting(lambda step, chunk: (step + chunk) % 2 == 0, piece_numel=MIB // 4)
ALL = visiting(lambda step, chunk: True)


@pytest.mark.parametrize("way", WAYS)
def test_no_number_changes(way):
    config = config_of(**WAYS[way]) | {"default_chunk_size": MIB}
    at_home = train(WIDE, config, steps=STEPS)
    for choose, memory in ((ALL, None), (IN_TURN, 320 * MIB)):
        run = train(WIDE, config | {"device_memory": memory}, steps=STEPS, before_step=choose)
        assert_same(run, at_home)
        assert run.report["num_visits"] > STEPS
