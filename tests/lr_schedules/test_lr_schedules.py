"""Schedules against closed forms in float64 (interpolation between knots), in a run and beyond its end."""

import itertools
import math

import numpy as np
import pytest
import torch

from patrickstar.lr_schedules import SCHEDULES, OneCycle, WarmupCosineLR, WarmupLR, make_scheduler
from patrickstar.runtime import initialize_engine
from tests.models import MODELS
from tests.training import make_config

OWN = (3e-4, 1e-2)
"""The learning rates of the two groups that optimizers here have."""


def make_optimizer(lrs=OWN, cls=torch.optim.AdamW, **options):
    return cls([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs], **options)


def run(scheduler, num_steps):
    """Learning rates and first betas of the optimizer's steps, [steps, groups] each."""
    lrs, moms = [], []
    for _ in range(num_steps):
        groups = scheduler.optimizer.param_groups
        lrs.append([float(group["lr"]) for group in groups])
        moms.append([group["betas"][0] for group in groups])
        assert scheduler.get_last_lr() == scheduler.get_lr() == lrs[-1]
        scheduler.step()
    return np.array(lrs), np.array(moms)


def between(shares, low, high):
    """Values at ``shares`` [steps] of the way from ``low`` to ``high`` (one for each group, or one for all)."""
    low, high = (np.broadcast_to(np.asarray(value, dtype=np.float64), (2,)) for value in (low, high))
    return low + np.outer(shares, high - low)


def iterations(num_steps):
    return np.arange(-1, num_steps - 1, dtype=np.float64)


def rise(i, n, kind):
    i, n = np.clip(i, 0, None), max(2, n)
    rising = np.interp(i, [0, n], [0, 1]) if kind == "linear" else np.log2(i + 1) / np.log2(n)
    return np.where(i < n, rising, np.nan)


def test_range_test():
    for staircase in (False, True):
        params = {"lr_range_test_step_size": 7, "lr_range_test_step_rate": 1.5, "lr_range_test_staircase": staircase}
        lrs, _ = run(
            make_scheduler(make_optimizer(), "LRRangeTest", params | {"lr_range_test_min_lr": [1e-5, 2e-5]}), 60
        )
        done = np.arange(60)
        intervals = done // 7 if staircase else done / 7
        np.testing.assert_allclose(lrs, np.outer(1 + 1.5 * intervals, [1e-5, 2e-5]), rtol=1e-13)


def test_warmups():
    for kind, num_warmup in itertools.product(["log", "linear"], [0, 1, 2, 20]):
        i, n, total = iterations(90), max(2, num_warmup), 60
        params = {"warmup_num_steps": num_warmup, "warmup_type": kind}

        lrs, _ = run(make_scheduler(make_optimizer(), "WarmupLR", params | {"warmup_min_lr": [0, 1e-5]}), 90)
        up = rise(i, n, kind)
        np.testing.assert_allclose(lrs, between(np.where(i < n, up, 1), [0, 1e-5], OWN), rtol=1e-13)

        limits = {"warmup_min_lr": 1e-6, "warmup_max_lr": [1e-3, 2e-3], "total_num_steps": total}
        lrs, _ = run(make_scheduler(make_optimizer(), "WarmupDecayLR", params | limits), 90)
        down = np.interp(i, [n, total], [1, 0])
        np.testing.assert_allclose(lrs, between(np.where(i < n, up, down), 1e-6, [1e-3, 2e-3]), rtol=1e-12)

        ratios = {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.05, "total_num_steps": total}
        lrs, _ = run(make_scheduler(make_optimizer(), "WarmupCosineLR", params | ratios), 90)
        angle = np.interp(i, [n - 1, total - 1], [0, np.pi / 2])
        shares = np.where(i < n, 0.1 + 0.9 * up, 0.05 + 0.95 * np.cos(angle) ** 2)
        shares[0] = 0
        np.testing.assert_allclose(lrs, between(shares, 0, OWN), rtol=1e-12)


def test_defaults_are_deepspeeds():
    lrs, _ = run(make_scheduler(make_optimizer(), "WarmupDecayLR", {"total_num_steps": 1500}), 1500)
    i = iterations(1500)
    shares = np.where(i < 1000, rise(i, 1000, "log"), np.interp(i, [1000, 1500], [1, 0]))
    np.testing.assert_allclose(lrs, between(shares, 0, 0.001), rtol=1e-12)
    lrs, _ = run(make_scheduler(make_optimizer(), "LRRangeTest"), 2001)
    assert (lrs[0] == 1e-3).all() and (lrs[2000] == 2e-3).all()
    lrs, moms = run(make_scheduler(make_optimizer(), "OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.4}), 4200)
    assert math.isclose(lrs[2000, 0], 0.4) and (lrs[4000:] == 0.1).all()
    assert math.isclose(moms[2000, 0], 0.8) and math.isclose(moms[4100, 0], 0.9)


def test_one_cycle():
    for (up, down), decay_step_size in itertools.product([(10, None), (7, 13), (5, 0)], [0, 4]):
        params = {"cycle_min_lr": [1e-4, 2e-4], "cycle_max_lr": 1e-3, "cycle_first_step_size": up, "decay_lr_rate": 0.3}
        params |= {"cycle_second_step_size": down, "decay_step_size": decay_step_size, "decay_mom_rate": 1e-3}
        optimizer = make_optimizer()
        lrs, moms = run(OneCycle(optimizer, **params), 60)
        down = up if down is None else down
        t = np.arange(60)
        height = np.interp(t, [0, up, up + down] if down else [0, up], [0, 1, 0] if down else [0, 1])
        height[up + down :] = 0
        intervals = np.clip(t - up - down, 0, None) / decay_step_size if decay_step_size else np.zeros(60)
        expected = between(height, [1e-4, 2e-4], 1e-3) / (1 + 0.3 * intervals)[:, None]
        np.testing.assert_allclose(lrs, expected, rtol=1e-12)
        expected = between(height, 0.9, 0.8) * (1 + 1e-3 * intervals)[:, None]
        expected[0] = 0.8  # DeepSpeed begins there
        np.testing.assert_allclose(moms, expected, rtol=1e-12)
        assert all(group["betas"][1] == 0.99 for group in optimizer.param_groups)


def test_one_cycle_in_stairs():
    params = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 6, "cycle_second_step_size": 4}
    lrs, _ = run(
        OneCycle(make_optimizer(), **params, cycle_first_stair_count=3, cycle_second_stair_count=2, cycle_min_mom=0.5),
        11,
    )
    thirds = [0, 0, 1 / 3, 1 / 3, 2 / 3, 2 / 3, 1]
    np.testing.assert_allclose(lrs[:, 0], [*thirds, 0.5, 0.5, 0, 0], rtol=1e-15)


PARAMS = {
    "LRRangeTest": {"lr_range_test_step_size": 5},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 6, "decay_step_size": 3},
    "WarmupLR": {"warmup_num_steps": 8},
    "WarmupDecayLR": {"warmup_num_steps": 8, "total_num_steps": 20},
    "WarmupCosineLR": {"warmup_num_steps": 8, "total_num_steps": 20},
}


def test_a_resumed_run_has_the_same_numbers():
    for name in SCHEDULES:
        whole = [values.tolist() for values in run(make_scheduler(make_optimizer(), name, PARAMS[name]), 30)]
        for at in (0, 1, 7, 8, 25):
            saved = make_scheduler(make_optimizer(), name, PARAMS[name])
            run(saved, at)
            assert saved.state_dict() == {"last_batch_iteration": at - 1}
            first, last = make_optimizer(), make_optimizer()
            first.load_state_dict(saved.optimizer.state_dict())
            after = make_scheduler(first, name, PARAMS[name])
            before = make_scheduler(last, name, PARAMS[name])
            for scheduler in (after, before):
                scheduler.load_state_dict(saved.state_dict())
            last.load_state_dict(saved.optimizer.state_dict())
            resumed = [after, before]
            if at > 0:
                own = make_optimizer()
                resumed.append(make_scheduler(own, name, PARAMS[name] | {"last_batch_iteration": at - 1}))
            for scheduler in resumed:
                assert [values.tolist() for values in run(scheduler, 30 - at)] == [values[at:] for values in whole]


def test_the_engines_optimizer_steps_with_the_schedule():
    case = MODELS["mlp"]
    torch.manual_seed(0)
    module = case.build()
    plain = torch.optim.AdamW(module.parameters())
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(case.build, 0, make_config(gradient_clipping=0.0))
    with engine:
        for group in plain.param_groups:
            group.update({key: optimizer.param_groups[0][key] for key in ("lr", "betas", "eps", "weight_decay")})
        params = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3, "decay_step_size": 2}
        schedules = [OneCycle(each, **params, decay_lr_rate=1.0) for each in (optimizer, plain)]
        generator = torch.Generator().manual_seed(1)
        for _ in range(8):
            batch = case.batch(generator)
            engine.backward(engine(**batch)["loss"])
            plain.zero_grad()
            module(**batch)["loss"].backward()
            for each in (optimizer, plain, *schedules):
                each.step()
        assert optimizer.state_dict()["param_groups"][0]["betas"] == schedules[0].get_mom()[0]
        state = engine.state_dict()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


def test_tensor_learning_rates_are_filled_in_place():
    lr = torch.tensor(0.5)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = WarmupCosineLR(optimizer, total_num_steps=5, warmup_num_steps=2, warmup_type="linear")
    for _ in range(2):
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert scheduler.get_last_lr() == [0.25]


def test_types_of_torch_and_mistakes(caplog):
    scheduler = make_scheduler(make_optimizer(), "StepLR", {"step_size": 3})
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    assert isinstance(WarmupLR(make_optimizer()), torch.optim.lr_scheduler.LRScheduler)
    wrong = [
        ("WarmupLr", {}, "did you mean 'WarmupLR'"),
        ("WarmupLR", {"warmup_steps": 3}, "warmup_steps: did you mean 'warmup_num_steps'"),
        ("WarmupLR", {"warmup_type": "lin"}, "did you mean 'linear'"),
        ("WarmupLR", {"warmup_num_steps": -1}, "at least 0"),
        ("WarmupLR", {"warmup_num_steps": "auto"}, "'auto'; give a whole number"),
        ("WarmupLR", {"warmup_max_lr": [1e-3]}, "warmup_max_lr has 1 values and the optimizer 2"),
        ("WarmupLR", {"warmup_max_lr": "auto"}, "'auto'; give a number"),
        ("WarmupDecayLR", {}, "total_num_steps is missing"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 0}, "more than 0"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_min_mom": 1.0}, "must stay below 1"),
    ]
    for name, params, message in wrong:
        with pytest.raises(ValueError, match=message):
            make_scheduler(make_optimizer(), name, params)
    sgd = make_optimizer(cls=torch.optim.SGD)
    assert OneCycle(sgd, 0.1, 1.0).get_mom() is None
    assert "SGD has no betas" in caplog.text
