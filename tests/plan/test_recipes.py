import pytest

from patrickstar import _C

AHEADS = (_C.Ahead.NOTHING, _C.Ahead.PARAM, _C.Ahead.EVERYTHING)
SCALES = (_C.ExpectedScale.EXACT, _C.ExpectedScale.BETWEEN)


def starts(states, start, scale, dtype=_C.DType.BFLOAT16):
    return [_C.earliest_recipe(True, dtype, states, start, ahead, scale).name for ahead in AHEADS]


@pytest.mark.parametrize("scale", SCALES)
def test_what_does_not_depend_on_memory(scale):
    host, disk, after = _C.Tier.HOST, _C.Tier.DISK, _C.UpdateStart.AFTER_NORM
    for start in (after, _C.UpdateStart.SPECULATIVE, _C.UpdateStart.COMMITTED):
        on_device = "DEVICE_PROMISED" if start == _C.UpdateStart.COMMITTED else "DEVICE"
        assert starts(_C.Tier.DEVICE, start, scale) == [on_device] * 3
        frozen = _C.earliest_recipe(False, _C.DType.BFLOAT16, host, start, _C.Ahead.EVERYTHING, scale)
        assert frozen == _C.Recipe.NEVER
    assert starts(host, after, scale) == ["HOST", "HOST_TWO_PASSES", "HOST_TWO_PASSES"]
    assert starts(disk, after, scale) == starts(disk, _C.UpdateStart.SPECULATIVE, scale) == ["DISK"] * 3
    assert starts(host, _C.UpdateStart.COMMITTED, scale) == ["HOST_PROMISED"] * 3
    assert starts(disk, _C.UpdateStart.COMMITTED, scale) == ["DISK_PROMISED"] * 3


def test_speculative_updates_begin_as_far_as_there_is_memory():
    exact, between = ((_C.Tier.HOST, _C.UpdateStart.SPECULATIVE, scale) for scale in SCALES)
    assert starts(*exact) == ["HOST", "HOST_TWO_PASSES_AHEAD", "HOST_AHEAD"]
    assert starts(*between) == ["HOST", "HOST_TWO_PASSES_AHEAD", "HOST_TWO_PASSES_AHEAD"]


def test_in_32_bits_none_begins_while_clipping_acts():
    exact, between = ((_C.Tier.HOST, _C.UpdateStart.SPECULATIVE, scale) for scale in SCALES)
    assert starts(*exact, _C.DType.FLOAT32) == starts(*exact)
    assert starts(*between, _C.DType.FLOAT32) == ["HOST", "HOST_TWO_PASSES", "HOST_TWO_PASSES"]


def test_new_parameters_of_all_come_before_new_states_of_any():
    numel = 1024
    layout = _C.Layout.pack([numel] * 3, [_C.DType.BFLOAT16] * 3, [True, False, True], numel)
    values, states = 2 * numel, 12 * numel

    def chosen(room, homes=(_C.Tier.HOST,) * 3):
        return [ahead.name for ahead in _C.choose_ahead(layout, list(homes), room)]

    assert chosen(values - 1) == ["NOTHING"] * 3
    assert chosen(values) == ["PARAM", "NOTHING", "NOTHING"]
    assert chosen(2 * values + states - 1) == ["PARAM", "NOTHING", "PARAM"]
    assert chosen(2 * values + states) == ["EVERYTHING", "NOTHING", "PARAM"]
    elsewhere = (_C.Tier.DEVICE, _C.Tier.HOST, _C.Tier.DISK)
    assert chosen(2**40, elsewhere) == ["NOTHING"] * 3
