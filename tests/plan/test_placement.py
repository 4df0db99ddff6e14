"""How many chunks have their states on the device, by what is left there and on the host."""

from __future__ import annotations

import pytest

from patrickstar import _C

NUM_CHUNKS, NUMEL, TIDE = 64, 1024, 10**6
STATES, VALUES = 12 * NUMEL, 2 * NUMEL
HOME, GRADIENT = STATES + VALUES, VALUES
ALL_VALUES = NUM_CHUNKS * VALUES
IN_PLACE = 20  # chunks whose states have room beside all values
MARGIN = ALL_VALUES + 2 * GRADIENT + IN_PLACE * STATES


@pytest.fixture(scope="module")
def layout():
    one_each = [NUMEL] * NUM_CHUNKS, [_C.DType.BFLOAT16] * NUM_CHUNKS, [True] * NUM_CHUNKS
    layout = _C.Layout.pack(*one_each, NUMEL)
    assert layout.num_chunks == NUM_CHUNKS
    return layout


def num_on_device(layout, host_bytes):
    budget = _C.DeviceBudget()
    budget.limit_bytes, budget.follows_tide, budget.margin_use_ratio = TIDE + MARGIN, True, 1.0
    budget.host_limit_bytes = host_bytes
    moment = {"phase": _C.Phase.FORWARD, "tide_peak_bytes": TIDE, "accesses": []}
    return _C.num_device_state_chunks(layout, [moment], budget)


def host_bytes_ahead(layout, num_on_device):
    """What the host takes with new values of all its chunks beside the old ones."""
    return _C.reserved_gradient_bytes(layout) + (NUM_CHUNKS - num_on_device) * (HOME + VALUES)


def test_no_more_than_beside_all_values_where_the_host_has_room(layout):
    assert num_on_device(layout, 2**40) == IN_PLACE
    assert num_on_device(layout, host_bytes_ahead(layout, IN_PLACE)) == IN_PLACE


def test_gradients_leave_the_device_where_all_updates_can_start_in_backward_then(layout):
    for count in (IN_PLACE + 1, IN_PLACE + 6):
        assert num_on_device(layout, host_bytes_ahead(layout, count)) == count
        assert num_on_device(layout, host_bytes_ahead(layout, count) - 1) == count + 1


def test_gradients_stay_on_the_device_where_updates_wait_for_the_norm_all_the_same(layout):
    """Fewer than without gradients, which would go to the host and come back."""
    count = num_on_device(layout, 0)
    assert count > IN_PLACE
    assert count * (STATES + GRADIENT) < MARGIN < (count + 8) * (STATES + GRADIENT)
    most = max(c for c in range(NUM_CHUNKS) if num_on_device(layout, host_bytes_ahead(layout, c)) == c)
    assert count < most
    assert most * STATES < MARGIN
