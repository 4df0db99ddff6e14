import functools

import pytest

from patrickstar import _C
from tests import schemes
from tests.engine.test_equality import WIDE
from tests.training import assert_same, least_device_memory, round_trips, train

STEPS = 4
PIECE = 1024  # elements, of chunks of 4096


def config_of(**more):
    return schemes.config_of(**{"on_device": False, "speculation": "commit", "default_chunk_size": 4096, **more})


@functools.cache
def expected(**kwargs):
    return train(WIDE, config_of(**kwargs), steps=STEPS)


def visiting(which, piece_numel=PIECE):
    def choose(engine, step):
        count = engine._session.layout.num_chunks
        engine._session.runtime.set_round_trips(
            [step > 0 and which(step, chunk) for chunk in range(count)], piece_numel
        )

    return choose


ALL = visiting(lambda step, chunk: True)
IN_TURN = visiting(lambda step, chunk: (step + chunk) % 2 == 0)  # each chunk is updated by both sides

WAYS = {
    "float32": {"precision": "fp32"},
    "split masters": {},
    "8 bits": {"states": "8bit"},
    "bfloat16": {"states": "bf16"},
    "8 bits without masters": {"states": "8bit", "master": "stochastic"},
    "Lion": {"rule": "Lion"},
    "SGD": {"rule": "SGD"},
}


@pytest.mark.parametrize("way", WAYS)
def test_no_number_changes(way):
    settled = expected(**WAYS[way])
    for choose in (ALL, IN_TURN):
        run = train(WIDE, config_of(**WAYS[way]), steps=STEPS, before_step=choose)
        assert_same(run, settled)
        assert round_trips(run.report) > STEPS


@pytest.mark.parametrize("way", ["split masters", "8 bits"])
def test_values_that_the_device_has_do_not_go_up(way):
    costs = []

    def round_trip(engine, step):
        costs[:] = _C.round_trip_costs(engine._session.layout)
        ALL(engine, step)

    run = train(WIDE, config_of(**WAYS[way]), steps=STEPS, before_step=round_trip)
    assert round_trips(run.report) == (STEPS - 1) * len(costs)
    states = sum(up_bytes - value_bytes for up_bytes, _, value_bytes in costs)
    values = expected(**WAYS[way]).report["uploaded_bytes"]
    assert run.report["uploaded_bytes"] == values + (STEPS - 1) * states
    assert all(0 < value_bytes < up_bytes for up_bytes, _, value_bytes in costs)


@pytest.mark.parametrize("way", ["float32", "8 bits"])
def test_delays_show_no_wait_that_is_missing(way):
    delays = {"max_random_us": 500, "seed": 1}
    run = train(WIDE, config_of(**WAYS[way], delays=delays), steps=STEPS, before_step=IN_TURN)
    assert_same(run, expected(**WAYS[way]))


def test_updates_behind_the_norm_are_made_at_rest():
    clipped = {"speculation": "never", "gradient_clipping": 0.05}
    run = train(WIDE, config_of(**clipped), steps=STEPS, before_step=ALL)
    assert_same(run, expected(**clipped))
    assert round_trips(run.report) == 0


def test_where_the_device_has_no_room_the_host_updates():
    config = config_of(states="8bit")
    least = least_device_memory(WIDE, config)
    run = train(WIDE, {**config, "device_memory": least}, steps=STEPS, before_step=ALL)
    assert_same(run, expected(states="8bit"))
