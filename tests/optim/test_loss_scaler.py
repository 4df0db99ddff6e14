import copy
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar import _C, CheckpointError
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.models import MODELS, Mlp
from tests.training import make_config

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


@settings(deadline=None, max_examples=150, derandomize=True)
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


CASE = MODELS["mlp"]


def start(precision="fp32", optimizer="AdamW", **params):
    config = make_config(precision, optimizer, use_cpu_embedding=True)
    config["optimizer"]["params"] |= params
    torch.manual_seed(0)
    engine, hybrid = initialize_engine(Mlp, 0, config)
    engine.train()
    step(engine, hybrid)
    return engine, hybrid


def step(engine, hybrid, seed=1):
    engine.backward(CASE.loss(engine(**CASE.batch(torch.Generator().manual_seed(seed)))))
    hybrid.step()


def everything(hybrid):
    return copy.deepcopy({"state": hybrid.state_dict(), "groups": [group["lr"] for group in hybrid.param_groups]})


def group(**options):
    return lambda state: state["param_groups"][0].update(options)


def entry(**values):
    def change(state):
        last = state["state"][max(state["state"])]
        for key, value in values.items():
            if value is None:
                del last[key]
            else:
                last[key] = value

    return change


def without(*keys):
    def change(state):
        for key in keys:
            del state[key]

    return change


def set_key(key, value):
    return lambda state: state.__setitem__(key, value)


WRONG = {
    "maximize": (group(maximize=True), "group 0 .* has maximize=True, which goes up the gradient"),
    "amsgrad": (group(amsgrad=True), "has amsgrad=True, which keeps the largest variance"),
    "differentiable": (group(differentiable=True), "has differentiable=True"),
    "a negative lr": (group(lr=-1e-3), "lr is -0.001; it must be a number of at least 0 and finite"),
    "an lr that is none": (group(lr=math.nan), "lr is nan; it must"),
    "an infinite lr": (group(lr=math.inf), "lr is inf; it must"),
    "an lr of several": (group(lr=torch.ones(2)), "lr is tensor.*it must be a number"),
    "an lr that is a text": (group(lr="0.1"), "lr is '0.1'; it must be a number"),
    "an lr that is missing": (group(lr=None), "lr is None"),
    "a long lr": (group(lr=10**400), "lr is an integer of 1329 bits"),
    "a beta of 1": (group(betas=(0.9, 1.0)), r"betas\[1\] is 1.0; it must be a number of at least 0 and less than 1"),
    "a negative beta": (group(betas=(-0.1, 0.9)), r"betas\[0\] is -0.1"),
    "three betas": (group(betas=(0.9, 0.9, 0.9)), "betas is .*; give two numbers"),
    "one beta": (group(betas=0.9), "betas is 0.9; give two numbers"),
    "a negative eps": (group(eps=-1e-8), "eps is -1e-08"),
    "an infinite decay": (group(weight_decay=math.inf), "weight_decay is inf"),
    "another formula": (group(bias_correction=False), "bias_correction=False, the engine's optimizer True"),
    "no exp_avg": (entry(exp_avg=None), r"state \d+ .* has no exp_avg; give"),
    "no exp_avg_sq": (entry(exp_avg_sq=None), r"state \d+ .* has no exp_avg_sq; give"),
    "no step": (entry(step=None), r"state \d+ .* has no step; give"),
    "a negative step": (entry(step=torch.tensor(-1.0)), r"step is tensor\(-1\.\); give a whole number of steps"),
    "a step that is none": (entry(step=math.nan), "step is nan; give a whole number"),
    "an infinite step": (entry(step=math.inf), "step is inf; give a whole number"),
    "half a step": (entry(step=1.5), "step is 1.5; give a whole number"),
    "a text for a step": (entry(step="3"), "step is '3'; give a whole number"),
    "two steps": (entry(step=torch.ones(2)), r"step is a tensor of torch.float32 of shape \(2,\)"),
    "more steps than there are": (entry(step=2**60), "step is 1152921504606846976; give a whole number"),
    "another shape": (entry(exp_avg=torch.zeros(3)), r"exp_avg has shape \(3,\), its parameter"),
    "another shape of the second": (entry(exp_avg_sq=torch.zeros(3)), r"exp_avg_sq has shape \(3,\), its parameter"),
    "a list": (entry(exp_avg=[0.0]), r"exp_avg is \[0\.0\]; give a dense tensor"),
    "integers": (entry(exp_avg=torch.zeros(3, dtype=torch.int64)), "exp_avg is a tensor of torch.int64"),
    "the meta device": (entry(exp_avg=torch.zeros(3, device="meta")), "exp_avg is on the meta device"),
    "a sparse tensor": (entry(exp_avg_sq=torch.zeros(3).to_sparse()), "give a dense tensor"),
    "an entry that is none": (lambda state: state["state"].__setitem__(0, 3), "state 0 .* has no step"),
    "no groups": (without("param_groups"), "has no param_groups; give the state_dict"),
    "no states": (without("state"), "has no state; give the state_dict"),
    "a group that is none": (set_key("param_groups", [3]), "group 0 of the state dict has no list params"),
    "other groups": (set_key("param_groups", []), "build the engine with the same model_parameters"),
    "another scaler": (set_key("loss_scaler", {"scale": 1.0}), "loss scaler's state .* cannot be set"),
    "an impossible scaler": (
        set_key("loss_scaler", {"scale": -1.0, "iteration": 1, "last_overflow_iteration": 0, "hysteresis_left": 1}),
        "the loss scaler's saved scale is -1",
    ),
}


def test_wrong_states_change_nothing():
    engine, hybrid = start("fp16")
    with engine:
        good = copy.deepcopy(hybrid.state_dict())
        step(engine, hybrid, seed=2)
        before = everything(hybrid)
        for name, (change, message) in WRONG.items():
            wrong = copy.deepcopy(good)
            change(wrong)
            with pytest.raises(ValueError, match=message) as caught:
                hybrid.load_state_dict(wrong)
            assert "\n" not in str(caught.value), name
            assert_same_bits(everything(hybrid), before, name)
        for wrong in (None, [], 3):
            with pytest.raises(ValueError, match="has no state"):
                hybrid.load_state_dict(wrong)
        hybrid.load_state_dict(good)
        assert_same_bits(hybrid.state_dict(), good)


def test_what_torch_says_otherwise_is_taken():
    engine, hybrid = start()
    with engine:
        state = copy.deepcopy(hybrid.state_dict())
        expected = copy.deepcopy(state)
        state["param_groups"][0].update(
            lr=torch.tensor(1e-3, dtype=torch.float64), betas=[torch.tensor(0.9, dtype=torch.float64), 0.999],
            foreach=None, fused=True, capturable=False, maximize=False, amsgrad=False, decoupled_weight_decay=True,
        )  # fmt: skip
        for values in state["state"].values():
            values["step"] = int(values["step"])
            values["max_exp_avg_sq"] = None
        state["state"][0] = {}
        hybrid.load_state_dict(state)
        loaded = hybrid.state_dict()
        assert loaded["param_groups"][0]["lr"] == 1e-3 and loaded["param_groups"][0]["betas"] == (0.9, 0.999)
        del expected["state"][0]
        assert_same_bits(loaded["state"], expected["state"])
        step(engine, hybrid)


def test_an_adamw_state_is_not_taken_for_adam():
    engine, hybrid = start(optimizer="Adam")
    with engine:
        state = copy.deepcopy(hybrid.state_dict())
        state["param_groups"][0]["decoupled_weight_decay"] = True
        with pytest.raises(ValueError, match='set optimizer.type to "AdamW"'):
            hybrid.load_state_dict(state)
        state["param_groups"][0]["weight_decay"] = 0.0
        hybrid.load_state_dict(state)
        assert hybrid.param_groups[0]["weight_decay"] == 0.0


def test_a_checkpoint_with_impossible_options_is_refused_before_it_is_loaded(tmp_path):
    engine, hybrid = start("fp16")
    with engine:
        for wrong in ({"lr": math.inf}, {"maximize": True}):
            kept = dict(hybrid.param_groups[0])
            hybrid.param_groups[0].update(wrong)
            engine.save_checkpoint(tmp_path, "wrong")
            hybrid.param_groups[0].clear()
            hybrid.param_groups[0].update(kept)
            before = everything(hybrid)
            with pytest.raises(CheckpointError, match=r"no checkpoint was loaded: .*parameter group 0.*load another"):
                engine.load_checkpoint(tmp_path, "wrong")
            assert_same_bits(everything(hybrid), before)
        step(engine, hybrid)


def test_model_parameters_with_impossible_options():
    for options, message in (
        ({"lr": math.inf}, r"model_parameters\[0\].lr is inf"),
        ({"lr": math.nan}, r"model_parameters\[0\].lr is nan"),
        ({"betas": (0.9,)}, r"model_parameters\[0\].betas is \(0.9,\)"),
        ({"eps": "small"}, r"model_parameters\[0\].eps is 'small'"),
    ):
        with pytest.raises(ValueError, match=message):
            initialize_engine(Mlp, 0, make_config(), model_parameters=[{"params": "*", **options}])
    engine, _ = start()
    engine.close()
