import argparse
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import patrickstar as deepspeed
from patrickstar import _C, StateError, utils
from patrickstar.config import fill_auto
from tests.bits import assert_same_bits
from tests.config.test_public_configs import TRAINER

SMALL = {"device_memory": 60_000, "default_chunk_size": 1024}


class Net(nn.Module):
    """5 k parameters: 83 kB of model data in float32."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.layers(x).float(), y)


def net():
    torch.manual_seed(0)
    return Net()


def data(count=64):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(count, 16, generator=generator), torch.randint(0, 10, (count,), generator=generator)
    )


def config(**more):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.95], "weight_decay": 0.1}},
        **SMALL,
        **more,
    }


def warmup(step):
    """WarmupLR's rate, linear from 0 over 4 steps; as with DeepSpeed the first two steps have the first rate."""
    return 0.01 * min(1.0, max(step - 1, 0) / 4)


def plain_run(steps, num_ranks=1, clipping=0.5, lr_of=lambda step: 0.01):
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
    samplers = [DistributedSampler(data(), num_ranks, rank) for rank in range(num_ranks)]
    loaders = [iter(DataLoader(data(), batch_size=4, sampler=sampler)) for sampler in samplers]
    losses, norms = [], []
    for step in range(steps):
        for _ in range(2):
            for loader in loaders:
                loss = module(*next(loader))
                (loss / 2 / num_ranks).backward()
                losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), clipping or math.inf)))
        for group in optimizer.param_groups:
            group["lr"] = lr_of(step)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, module.state_dict()


def test_a_typical_script(tmp_path):
    scheduler = {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"},
    }
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config(scheduler=scheduler, zero_optimization=zero, steps_per_print=2)))

    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path), "--local_rank", "0"])
    model = net()
    parameters = filter(lambda p: p.requires_grad, model.parameters())
    engine, optimizer, loader, schedule = deepspeed.initialize(
        args=args, model=model, model_parameters=parameters, training_data=data()
    )
    losses, norms, applied, rates = [], [], [], []
    for i, (x, y) in enumerate(loader):
        loss = engine(x.to(engine.local_rank) if torch.cuda.is_available() else x, y)
        engine.backward(loss)
        assert engine.is_gradient_accumulation_boundary() == (i % 2 == 1)
        rates += engine.get_lr() if i % 2 == 1 else []
        engine.step()
        losses.append(loss.item())
        applied.append(engine.was_step_applied())
        if i % 2 == 1:
            norms.append(engine.get_global_grad_norm())
        if i == 9:
            break
    assert engine.optimizer is optimizer
    assert engine.lr_scheduler is schedule
    assert applied == [False, True] * 5
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (5, 10, 40)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (8, 2)
    assert engine.report()["device_peak_bytes"] <= SMALL["device_memory"]
    assert rates == pytest.approx([warmup(step) for step in range(5)])
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.destroy()
    expected = plain_run(5, lr_of=warmup)
    assert losses == pytest.approx(expected[0], rel=1e-6)
    assert norms == pytest.approx(expected[1], rel=1e-6)
    for name, value in expected[2].items():
        torch.testing.assert_close(state[f"{name}"], value, rtol=1e-5, atol=1e-7)


def test_the_engine_stands_for_its_module():
    model = net()
    model.purpose = "testing"
    engine, *_ = deepspeed.initialize(model=model, config=config())
    with engine:
        assert engine.module is model
        assert type(model) is Net
        assert engine.purpose == "testing"
        assert engine.layers is model.layers
        with pytest.raises(AttributeError, match="nothing_of_that_name"):
            _ = engine.nothing_of_that_name


def test_a_users_optimizer_and_schedule():
    runs = []
    for through_engine in (False, True):
        model = net()
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0, "lr": 0.02},
        ]
        optimizer = torch.optim.Adam(groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.7**step)
        batches = [batch for batch in DataLoader(data(), batch_size=4)][:6]
        for batch in batches[:2]:  # before it is given to anybody
            model(*batch).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if not through_engine:
            for batch in batches[2:]:
                model(*batch).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # DeepSpeed's default
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            runs.append((schedule.get_last_lr(), model.state_dict()))
            continue
        engine, ours, loader, same_schedule = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, config={"train_batch_size": 4, **SMALL}
        )
        with engine:
            assert loader is None
            assert same_schedule is schedule
            assert schedule.optimizer is ours
            for batch in batches[2:]:
                engine.backward(engine(*batch))
                engine.step()
            runs.append((engine.get_lr(), engine.state_dict()))
    assert runs[0][0] == pytest.approx(runs[1][0])
    for name, value in runs[0][1].items():
        torch.testing.assert_close(runs[1][1][name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "scheduler", [None, {"type": "OneCycle", "params": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.02}}]
)
def test_resume(tmp_path, scheduler):
    more = {"scheduler": scheduler} if scheduler else {}
    states, rates = [], []
    batches = [batch for batch in DataLoader(data(), batch_size=4)]
    for resumed in (False, True):
        engine, *_ = deepspeed.initialize(
            model=net(), config=config(**more, device_memory=80_000 if resumed else 60_000)
        )
        with engine:
            assert engine.load_checkpoint(tmp_path / "nowhere") == (None, None)
            if resumed:
                path, client_state = engine.load_checkpoint(tmp_path)
                assert path == str(tmp_path / "global_step2")
                assert client_state == {"epoch": 3}
                assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 4, 16)
            for index, batch in enumerate(batches[4 if resumed else 0 : 8]):
                engine.backward(engine(*batch))
                engine.step()
                if not resumed and index == 3:
                    assert engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
            states.append(engine.state_dict())
            rates.append(engine.get_lr())
    assert rates[0] == rates[1]
    assert_same_bits(*states)


def test_the_bounds_of_a_step():
    engine, optimizer, _, _ = deepspeed.initialize(model=net(), config=config())
    batches = [batch for batch in DataLoader(data(), batch_size=4)]
    with engine:
        assert engine.get_global_grad_norm() is None
        with pytest.raises(StateError, match="before backward"):
            engine.step()
        loss = engine(*batches[0])
        returned = engine.backward(loss)
        assert returned.item() == pytest.approx(loss.item() / 2)
        with engine.no_sync(), pytest.raises(StateError, match="no_sync"):
            engine.step()
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        assert engine.was_step_applied()
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(engine(*batches[1]))
        engine.step()
        assert not engine.was_step_applied()
        engine.zero_grad()
        with pytest.raises(ValueError, match="multiple of micro-batch x ranks, 4"):
            engine.set_train_batch_size(6)
        engine.set_train_batch_size(12)
        assert engine.gradient_accumulation_steps() == 3
    plain = net()
    (plain(*batches[0]) / 2).backward()
    assert optimizer._session.outcome.grad_norm == pytest.approx(
        float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0)), rel=1e-6
    )


def test_a_refused_load_leaves_the_step_as_it_is(tmp_path):
    engine, *_ = deepspeed.initialize(model=net(), config=config())
    batches = [batch for batch in DataLoader(data(), batch_size=4)]
    with engine:
        engine.save_checkpoint(tmp_path)
        engine.backward(engine(*batches[0]))
        with pytest.raises(StateError, match="between backward and step"):
            engine.load_checkpoint(tmp_path)
        engine.step()
        assert not engine.was_step_applied()
        engine.backward(engine(*batches[1]))
        engine.step()
        assert engine.was_step_applied()


def test_whole_values():
    plain, batches = net(), [batch for batch in DataLoader(data(), batch_size=4)]
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
    engine, *_ = deepspeed.initialize(model=net(), config=config(gradient_clipping=0.0, gradient_accumulation_steps=1))
    utils = deepspeed.utils
    with engine:
        param, own = engine.module.layers[0].weight, plain.layers[0].weight
        with pytest.raises(StateError, match="no"):
            utils.safe_get_full_grad(param)
        with _C.HostAllocations():
            plain(*batches[0]).backward()
        engine.backward(engine(*batches[0]))
        torch.testing.assert_close(utils.safe_get_full_grad(param), own.grad, rtol=1e-5, atol=1e-8)
        own.grad.mul_(2)
        utils.safe_set_full_grad(param, own.grad)
        engine.step()
        with _C.HostAllocations():
            reference.step()
        expected = math.sqrt(sum(float(p.grad.double().square().sum()) for p in plain.parameters()))
        assert engine.get_global_grad_norm() == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(utils.safe_get_full_fp32_param(param), own.detach(), rtol=1e-5, atol=1e-7)
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                utils.safe_get_full_optimizer_state(param, key), reference.state[own][key], rtol=1e-5, atol=1e-9
            )
        utils.safe_set_full_optimizer_state(param, torch.full_like(own, 0.5).detach(), "exp_avg")
        assert bool((utils.safe_get_full_optimizer_state(param, "exp_avg") == 0.5).all())
        utils.safe_set_full_fp32_param(param, torch.ones(64, 16))
        assert bool((param == 1).all())
        with pytest.raises(ValueError, match=r"\(3,\).*\(64, 16\)"):
            utils.safe_set_full_fp32_param(param, torch.ones(3))
        with pytest.raises(ValueError, match="exp_avg and exp_avg_sq"):
            utils.safe_get_full_optimizer_state(param, "momentum")


def test_gathered_parameters():
    engine, *_ = deepspeed.initialize(model=net(), config=config(bf16={"enabled": True}))
    with engine:
        param = engine.module.layers[0].weight
        before = engine.state_dict()["layers.0.weight"].clone()
        with deepspeed.zero.GatheredParameters(engine.module.parameters()):
            assert type(param) is nn.Parameter
            assert param.data_ptr() != 0
            with torch.no_grad():
                param.fill_(7.0)
        assert_same_bits(engine.state_dict()["layers.0.weight"], before)
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0), torch.no_grad():
            param[3, 5] = 2.5
        after = engine.state_dict()["layers.0.weight"]
        assert after[3, 5] == 2.5
        after[3, 5] = before[3, 5]
        assert_same_bits(after, before)
        engine.backward(engine(*next(iter(DataLoader(data(), batch_size=4)))))
        engine.step()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_save_16bit_model(tmp_path, name):
    engine, *_ = deepspeed.initialize(model=net(), config=config(bf16={"enabled": True}))
    with engine:
        engine.save_16bit_model(tmp_path, name)
        full = engine.state_dict()
    if name.endswith(".bin"):
        saved = torch.load(tmp_path / name, weights_only=True)
    else:
        from safetensors.torch import load_file

        saved = load_file(tmp_path / name)
    assert_same_bits(saved, {key: value.bfloat16() for key, value in full.items()})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": None}, "no configuration"),
        ({"config": {}, "config_params": {}}, "several configurations"),
        ({"config": {"train_batch_size": 4}, "model": None}, "needs one model"),
        ({"config": {"train_batch_size": 4}, "mpu": object()}, "mpu"),
        ({"config": {"train_batch_size": 5, "train_micro_batch_size_per_gpu": 2}}, "train_batch_size is 5"),
        ({"config": {"train_batch_size": 4, "optimizer": {"typ": "Adam"}}}, "unknown key optimizer.typ: did you mean"),
        ({"config": {"train_batch_size": 4}, "training_data": 3}, "training_data is a int"),
        ({"config": {"train_batch_size": 4}, "optimizer": torch.optim.Adagrad(net().parameters(), lr=1)}, "Adagrad"),
    ],
)
def test_wrong_arguments_are_refused_before_work_starts(arguments, message):
    with pytest.raises(ValueError, match=message):
        deepspeed.initialize(**{"model": net(), **arguments})
    engine, *_ = deepspeed.initialize(model=net(), config={"train_batch_size": 4})  # nothing was left open
    engine.close()


PUBLIC = Path(__file__).parent.parent / "config" / "public"


def test_public_configurations_train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write logs
    values = {**TRAINER, "train_batch_size": 16}
    for path in sorted(PUBLIC.glob("*.json")):
        given = json.loads(path.read_text())
        given.get("tensorboard", {}).pop("enabled", None)  # not among the packages of tests
        engine, *_ = deepspeed.initialize(model=net(), config=fill_auto(given, values))
        with engine:
            batch = next(iter(DataLoader(data(), batch_size=engine.train_micro_batch_size_per_gpu())))
            losses = []
            for _ in range(2 * engine.gradient_accumulation_steps()):
                loss = engine(*batch)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            assert engine.global_steps == 2, path.name
            assert all(math.isfinite(loss) for loss in losses), path.name
    assert list(tmp_path.rglob("*.csv"))


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
