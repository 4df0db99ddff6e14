import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar import _C

LossScaler = _C.optim.LossScaler


class DeepSpeedScaler:
    """DynamicLossScaler.update_scale of DeepSpeed 0.19.8 (deepspeed/runtime/fp16/loss_scaler.py), without its messages
    and its exception at the minimum (Copyright Microsoft Corporation, Apache-2.0).
    """

    def __init__(self, init_scale, scale_window, min_scale, delayed_shift, consecutive_hysteresis):
        self.cur_scale = init_scale
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = 2.0
        self.scale_window = scale_window
        self.min_scale = min_scale
        self.delayed_shift = delayed_shift
        self.cur_hysteresis = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis

    def update_scale(self, overflow):
        if overflow:
            if self.delayed_shift == 1 or self.cur_hysteresis == 1:
                self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            stable_interval = (self.cur_iter - self.last_overflow_iter) - 1
            if (stable_interval > 0) and (stable_interval % self.scale_window == 0):
                if not self.consecutive_hysteresis:
                    self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1


OPTIONS = st.fixed_dictionaries(
    {
        "initial_scale_power": st.integers(0, 20),
        "scale_window": st.integers(1, 6),
        "min_scale": st.sampled_from([0.25, 0.5, 1.0]),
        "hysteresis": st.integers(1, 4),
        "consecutive_hysteresis": st.booleans(),
    }
)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(options=OPTIONS, overflows=st.lists(st.booleans(), max_size=80))
def test_follows_deepspeed(options, overflows):
    scaler = LossScaler(**options)
    reference = DeepSpeedScaler(2.0 ** options["initial_scale_power"], options["scale_window"], options["min_scale"],
                                options["hysteresis"], options["consecutive_hysteresis"])  # fmt: skip
    assert scaler.is_dynamic
    for overflow in overflows:
        scaler.update(overflow)
        reference.update_scale(overflow)
        assert scaler.scale == reference.cur_scale
        assert scaler.is_at_minimum == (reference.cur_scale == options["min_scale"])
        assert scaler.state() == {
            "scale": reference.cur_scale,
            "iteration": reference.cur_iter,
            "last_overflow_iteration": reference.last_overflow_iter,
            "hysteresis_left": reference.cur_hysteresis,
        }


def test_defaults_are_deepspeeds():
    scaler = LossScaler()
    assert scaler.scale == 2.0**16
    scaler.update(True)
    assert scaler.scale == 2.0**16, "hysteresis 2 forgives the first overflow"
    scaler.update(True)
    assert scaler.scale == 2.0**15
    for _ in range(1000):
        scaler.update(False)
    assert scaler.scale == 2.0**15
    scaler.update(False)
    assert scaler.scale == 2.0**16, "more than 1000 steps without overflow double it"


def test_hysteresis_is_not_the_scale_factor():
    # The first PatrickStar passed hysteresis as scale factor.
    scaler = LossScaler(hysteresis=5, initial_scale_power=10)
    for _ in range(5):
        scaler.update(True)
    assert scaler.scale == 2.0**9


def test_a_static_scale_never_changes():
    scaler = LossScaler(loss_scale=128.5)
    for overflow in (True, False) * 2000:
        scaler.update(overflow)
    assert scaler.scale == 128.5
    assert not scaler.is_dynamic
    assert not scaler.is_at_minimum
    scaler.set_state(**LossScaler().state())
    assert scaler.scale == 128.5


@settings(deadline=None, max_examples=100, derandomize=True)
@given(options=OPTIONS, seed=st.integers(0, 2**31), moment=st.integers(0, 40))
def test_resumes_exactly(options, seed, moment):
    overflows = [random.Random(seed + i).random() < 0.3 for i in range(80)]
    straight, first, second = LossScaler(**options), LossScaler(**options), LossScaler(**options)
    for overflow in overflows[:moment]:
        straight.update(overflow)
        first.update(overflow)
    second.set_state(**first.state())
    for overflow in overflows[moment:]:
        straight.update(overflow)
        second.update(overflow)
        assert second.state() == straight.state()


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"loss_scale": -1.0}, ["loss_scale is -1", "at least 0", "dynamic"]),
        ({"loss_scale": math.nan}, ["loss_scale is nan", "finite"]),
        ({"initial_scale_power": 128}, ["initial_scale_power is 128", "0 to 127"]),
        ({"scale_window": 0}, ["scale_window is 0", "at least 1"]),
        ({"hysteresis": 0}, ["hysteresis is 0", "at least 1"]),
        ({"min_scale": 0.0}, ["min_scale is 0", "above 0"]),
        ({"min_scale": 8.0, "initial_scale_power": 2}, ["min_scale is 8", "at most the initial scale 4", "raise"]),
    ],
)
def test_options_out_of_range_are_refused(options, parts):
    with pytest.raises(ValueError) as error:
        LossScaler(**options)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"scale": math.inf}, "scale is inf"),
        ({"scale": 0.0}, "scale is 0"),
        ({"iteration": -1}, "last_overflow_iteration"),
        ({"last_overflow_iteration": 7, "iteration": 7}, "last_overflow_iteration is 7"),
        ({"hysteresis_left": 0}, "hysteresis_left is 0"),
    ],
)
def test_impossible_states_are_refused_and_leave_the_scaler_alone(change, part):
    scaler = LossScaler()
    before = scaler.state()
    with pytest.raises(ValueError, match=part):
        scaler.set_state(**{**before, **change})
    assert scaler.state() == before
