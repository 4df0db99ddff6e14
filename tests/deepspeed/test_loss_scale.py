import math

import pytest
import torch
from torch import nn

import patrickstar as deepspeed
from patrickstar import utils

INF, NAN = math.inf, math.nan


def engine_of(**more):
    torch.manual_seed(0)
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 1.5e-4}}, **more}
    return deepspeed.initialize(model=nn.Linear(10, 1), config=config)[:2]


def step(engine, value):
    engine.backward(engine(torch.ones(1, 10)).float().sum())
    for param in engine.parameters():
        utils.safe_set_full_grad(param, torch.full(param.shape, value))
    engine.step()


SCALES = {
    "it doubles after each window": (
        {"initial_scale_power": 8, "loss_scale_window": 2},
        [0.1, -0.1] * 5,
        [256, 256, 512, 512, 1024, 1024, 2048, 2048, 4096, 4096],
    ),
    "each overflow halves it down to 1": (
        {"initial_scale_power": 3, "loss_scale_window": 2, "hysteresis": 1},
        [INF, -INF, NAN, NAN],
        [4, 2, 1, 1],
    ),
    "down to the least": (
        {"initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 2.0},
        [INF, -INF, NAN, NAN],
        [8, 4, 2, 2],
    ),
    "a window begins after an overflow": (
        {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1},
        [INF, NAN, 0.1, 0.1, 0.1, INF],
        [128, 64, 64, 64, 128, 64],
    ),
    "the first overflow is tolerated": ({"initial_scale_power": 8}, [INF, INF, INF], [256, 128, 64]),
}


@pytest.mark.parametrize("case", SCALES)
def test_dynamic(case):
    options, gradients, scales = SCALES[case]
    engine, optimizer = engine_of(fp16={"enabled": True, **options})
    with engine:
        scaler = optimizer.loss_scaler
        assert optimizer.dynamic_loss_scale and scaler.dynamic and scaler.dynamic_loss_scale
        assert (engine.loss_scale(), engine.dynamic_loss_scale()) == (0.0, True)
        power = options["initial_scale_power"]
        assert scaler.cur_scale == engine.initial_dynamic_scale() == 2**power
        assert scaler.scale_window == options.get("loss_scale_window", 1000)
        assert scaler.min_loss_scale == scaler.min_scale == options.get("min_loss_scale", 1.0)
        for index, (gradient, scale) in enumerate(zip(gradients, scales, strict=True)):
            step(engine, gradient)
            assert (scaler.cur_scale, scaler.loss_scale) == (scale, scale)
            assert (optimizer.loss_scale, optimizer.cur_scale, optimizer.loss_scale_config.cur_scale) == (scale,) * 3
            assert scaler.cur_iter == index + 1
            assert optimizer.overflow == (not math.isfinite(gradient))
            assert optimizer.overflow != engine.was_step_applied()
        overflows = [index for index, gradient in enumerate(gradients) if not math.isfinite(gradient)]
        assert engine.skipped_steps == len(overflows)
        assert scaler.last_overflow_iter == (overflows[-1] if overflows else -1)


def test_static_and_none():
    engine, optimizer = engine_of(fp16={"enabled": True, "loss_scale": 138.0})
    with engine:
        assert (optimizer.loss_scale, optimizer.dynamic_loss_scale, engine.loss_scale()) == (138.0, False, 138.0)
        assert (engine.dynamic_loss_scale(), optimizer.loss_scaler.use_grad_scaling) == (False, True)
        step(engine, INF)
        assert (optimizer.cur_scale, engine.was_step_applied()) == (138.0, False)
    for precision in ({}, {"bf16": {"enabled": True}}):
        engine, optimizer = engine_of(**precision)
        with engine:
            scaler = optimizer.loss_scaler
            assert (optimizer.cur_scale, optimizer.dynamic_loss_scale) == (1.0, False)
            assert (scaler.cur_scale, scaler.dynamic, scaler.use_grad_scaling) == (1.0, False, False)
            step(engine, NAN)
            assert (scaler.cur_scale, scaler.cur_iter, engine.skipped_steps) == (1.0, 0, 1)
