import contextlib
import logging

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import patrickstar as deepspeed
from patrickstar import StateError
from patrickstar.engine.optim import HybridAdam
from patrickstar.lr_schedules import WarmupLR
from patrickstar.ops.adam import DeepSpeedCPUAdam, FusedAdam
from patrickstar.utils import set_z3_leaf_modules, unset_z3_leaf_modules
from patrickstar.zero import ZeroParamStatus
from tests.deepspeed.test_initialize import config, data, net

BATCHES = list(DataLoader(data(), batch_size=4))


def test_what_the_configuration_says():
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    engine, *_ = deepspeed.initialize(
        model=net(),
        config=config(bf16={"enabled": True}, zero_optimization={"stage": 2}, scheduler=scheduler, steps_per_print=7),
    )
    with engine:
        assert (engine.zero_optimization(), engine.zero_optimization_stage()) == (True, 2)
        assert engine.zero_optimization_partition_gradients()
        assert not engine.zero_optimization_partition_weights()
        assert (engine.bfloat16_enabled(), engine.fp16_enabled()) == (True, False)
        assert (engine.gradient_clipping(), engine.steps_per_print(), engine.wall_clock_breakdown()) == (0.5, 7, False)
        assert (engine.optimizer_name(), engine.optimizer_params()["lr"]) == ("AdamW", 0.01)
        assert (engine.scheduler_name(), engine.scheduler_params()) == ("WarmupLR", {"warmup_num_steps": 4})
        assert engine.dp_world_size == engine.world_size == 1
        assert not any(hasattr(param, "ds_id") for param in engine.parameters())  # stage 3 writes them
        engine.empty_partition_cache()
        engine.backward(engine(*BATCHES[0]))
        engine.step()
    engine, optimizer, *_ = deepspeed.initialize(model=net(), config={"train_batch_size": 4})
    with engine:
        assert not engine.zero_optimization()
        assert (engine.gradient_clipping(), engine.steps_per_print()) == (1.0, 10)  # DeepSpeed's defaults
        assert (engine.scheduler_name(), engine.scheduler_params()) == (None, None)
        assert isinstance(optimizer, HybridAdam)


def test_offloaded_states():
    engine, *_ = deepspeed.initialize(model=net(), config=config(bf16={"enabled": True}))
    with engine:
        engine.backward(engine(*BATCHES[0]))
        engine.step()
        with pytest.raises(ValueError, match="offload_states: device is 'nvme'; give \"cpu\""):
            engine.offload_states(device="nvme")
        engine.offload_states(include=["optim_states"], pin_memory=False, non_blocking=True)
        assert engine.report()["device_chunk_buffer_bytes"] == 0
        with pytest.raises(StateError, match=r"is lent; .* or call reload_states\(\)"):
            engine(*BATCHES[0])
        engine.reload_states()
        with pytest.raises(StateError, match="not lent"):
            engine.reload_states()
        engine.backward(engine(*BATCHES[0]))
        engine.step()


def test_attributes_of_parameters():
    model = net()
    engine, *_ = deepspeed.initialize(
        model=model, config=config(zero_optimization={"stage": 3}, bf16={"enabled": True})
    )
    with engine:
        for index, param in enumerate(engine.parameters()):
            assert (param.ds_id, param.ds_shape, param.ds_numel) == (index, param.shape, param.numel())
            assert param.ds_status is ZeroParamStatus.AVAILABLE
            assert (param.ds_tensor.shape, param.ds_tensor.dtype) == ((param.numel(),), torch.bfloat16)
            assert param.ds_tensor.is_meta
        with deepspeed.zero.GatheredParameters(list(engine.parameters()), fwd_module=engine.module):
            assert all(param.ds_shape == param.shape for param in engine.parameters())
        engine.backward(engine(*BATCHES[0]))
        engine.step()
    assert not any(name.startswith("ds_") for param in model.parameters() for name in vars(param))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (FusedAdam, "AdamW"),
        (DeepSpeedCPUAdam, "AdamW"),
        (torch.optim.AdamW, "AdamW"),
        (torch.optim.Adam, "Adam"),
        (lambda params: FusedAdam(params, adam_w_mode=False), "Adam"),
        (lambda params: DeepSpeedCPUAdam(params, lr=2e-3, adamw_mode=False), "Adam"),
    ],
)
def test_classes_and_functions_that_make_an_optimizer(make, expected):
    model = net()
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), optimizer=make, config={"train_batch_size": 4}
    )
    with engine:
        assert engine.optimizer_name() == expected
        assert not isinstance(optimizer, (FusedAdam, DeepSpeedCPUAdam))  # no error
        engine.backward(engine(*BATCHES[0]))
        engine.step()


def test_a_schedule_sets_the_first_rate_of_a_given_optimizer():
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 4, "warmup_type": "linear"}}
    for given, options in ((None, {"scheduler": warmup}), (lambda o: LambdaLR(o, lambda step: step / 4), {})):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=given, config={"train_batch_size": 4, **options}
        )
        with engine:
            assert engine.get_lr() == [optimizer.param_groups[0]["lr"]] == [0.0]


def test_gradients_from_before_the_engine_are_named(caplog):
    model = net()
    model(*BATCHES[0]).backward()
    with caplog.at_level(logging.WARNING, logger="patrickstar"):
        engine, *_ = deepspeed.initialize(model=model, config=config())
    with engine:
        assert "earlier backward are dropped (6 parameters, the first is layers.0.weight)" in caplog.text
        assert all(param.grad is None for param in model.parameters())


def test_where_a_script_puts_adams_options(caplog):
    beside = {"type": "Adam", "params": {"lr": 0.01}, "torch_adam": 1, "adam_w_mode": False}
    with caplog.at_level(logging.INFO, logger="patrickstar"):
        engine, *_ = deepspeed.initialize(
            model=net(), config={"train_batch_size": 4, "optimizer": beside, "zero_allow_untested_optimizer": 1}
        )
    with engine:
        assert engine.optimizer_name() == "AdamW"
    assert "optimizer.torch_adam, optimizer.adam_w_mode, zero_allow_untested_optimizer" in caplog.text
    inside = {"type": "Adam", "params": {"lr": 0.01, "adam_w_mode": False}}
    engine, *_ = deepspeed.initialize(model=net(), config={"train_batch_size": 4, "optimizer": inside})
    with engine:
        assert engine.optimizer_name() == "Adam"


def test_further_keys_of_groups(tmp_path):
    model = net()
    groups = [
        {"params": [param for param in model.parameters() if param.ndim > 1], "name": "matrices", "lr_scale": 0.5},
        {"params": [param for param in model.parameters() if param.ndim == 1], "lr": 0.02},
    ]
    engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config())
    with engine:
        first, second = optimizer.param_groups
        assert (first["name"], first["lr_scale"], first["lr"]) == ("matrices", 0.5, 0.01)
        assert (second["lr"], "name" in second) == (0.02, False)
        engine.save_checkpoint(tmp_path)
        first["lr_scale"] = 0.25
        engine.load_checkpoint(tmp_path)
        assert optimizer.param_groups[0]["lr_scale"] == 0.5
        for folder in ("", None):
            with pytest.raises(ValueError, match="give the path of a folder"):
                engine.save_checkpoint(folder)


def test_a_no_sync_within_another():
    engine, *_ = deepspeed.initialize(model=net(), config=config(gradient_accumulation_steps=1))
    with engine:
        with engine.no_sync():
            with engine.no_sync():
                engine.backward(engine(*BATCHES[0]))
            with pytest.raises(StateError, match="no_sync"):
                engine.step()
        engine.step()
        assert engine.was_step_applied()


def test_the_caller_counts():
    states = []
    for managed in (True, False):
        options = config(gradient_accumulation_steps=4, managed_gradient_accumulation=managed)
        engine, *_ = deepspeed.initialize(model=net(), config=options)
        with engine:
            for index, batch in enumerate(BATCHES[:8]):
                engine.backward(engine(*batch))
                assert managed or not engine.is_gradient_accumulation_boundary()
                if managed or index % 4 == 3:
                    engine.step()
                    assert engine.was_step_applied() == (index % 4 == 3)
            assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 8, 32)
            states.append(engine.state_dict())
            if not managed:
                for batch in BATCHES[8:10]:  # a step when the caller wants one
                    engine.backward(engine(*batch))
                engine.step()
                assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 10, 40)
                with pytest.raises(StateError, match="every step.. updates"):
                    engine.set_gradient_accumulation_boundary(True)
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())


def test_backwards_that_are_coalesced():
    norms = []
    for coalesced in (False, True):
        engine, *_ = deepspeed.initialize(model=net(), config=config(gradient_accumulation_steps=1))
        with engine:
            with engine.coalesce_grad_reduction() if coalesced else contextlib.nullcontext():
                for batch in BATCHES[:3]:
                    engine.backward(engine(*batch))
                if coalesced:
                    with pytest.raises(StateError, match="no_sync"):
                        engine.step()
            engine.step()
            norms.append(engine.get_global_grad_norm())
            with pytest.raises(StateError, match=r"call engine\.backward\(loss\)"):
                engine.scale(engine(*BATCHES[0]))
    assert norms[0] == norms[1]


def test_one_rank_goes_on_after_an_exception():
    deepspeed.init_distributed()
    try:
        value = torch.tensor(3.0)
        deepspeed.comm.all_reduce(value, op=deepspeed.comm.ReduceOp.SUM)
        assert value == 3.0
        with pytest.raises(AttributeError, match="has 'log_summary'"):
            deepspeed.comm.log_summary()
        engine, *_ = deepspeed.initialize(model=net(), config=config())
        with engine:
            with pytest.raises(ValueError, match="batch_size"):
                engine(BATCHES[0][0], BATCHES[0][1][:2])
            for batch in BATCHES[:2]:
                engine.backward(engine(*batch))
                engine.step()
            assert engine.was_step_applied()
        assert deepspeed.comm.get_world_size() == 1
    finally:
        deepspeed.comm.destroy_process_group()


def test_leaf_modules():
    model = net()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for kinds in ([nn.Linear], ["Linear"], ["torch.nn.modules.linear.Linear"]):
        assert set_z3_leaf_modules(model, kinds) == unset_z3_leaf_modules(model, kinds) == linears
    with pytest.raises(ValueError, match="has no module of .*Conv2d"):
        set_z3_leaf_modules(model, [nn.Conv2d])
    assert set_z3_leaf_modules(model, [nn.Conv2d], raise_if_not_found=False) == []


def test_the_momentum_of_one_cycle():
    up, low, high, rate = 4, 0.08, 0.09, 1e-3
    params = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_min_mom": low, "cycle_max_mom": high}
    params |= {"cycle_first_step_size": up, "decay_step_size": up, "decay_mom_rate": rate}
    options = config(gradient_accumulation_steps=1, scheduler={"type": "OneCycle", "params": params})
    engine, _, _, schedule = deepspeed.initialize(model=net(), config=options)
    said, used = [], []
    with engine:
        for batch in BATCHES[:14]:
            said.append(schedule.get_mom()[0][0])
            used.append(engine.get_mom()[0])
            engine.backward(engine(*batch))
            engine.step()
    cycle = [high - (high - low) * height for height in (0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25)]
    decay = [high * (1 + rate * step / up) for step in range(6)]
    assert said == pytest.approx([*cycle, *decay], rel=1e-12)
    assert used == [(low, 0.99), *((mom, 0.99) for mom in said[1:])]


def test_the_schedules_first_rates():
    cases = {
        "WarmupLR": ({"warmup_min_lr": 1e-4}, 1e-4),
        "WarmupDecayLR": ({"total_num_steps": 8, "warmup_min_lr": 1e-4}, 1e-4),
        "WarmupCosineLR": ({"total_num_steps": 8, "warmup_min_ratio": 0.2}, 0.0),
        "OneCycle": ({"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2}, 1e-3),
        "LRRangeTest": ({"lr_range_test_min_lr": 1e-4}, 1e-4),
    }
    for kind, (params, rate) in cases.items():
        engine, _, _, schedule = deepspeed.initialize(
            model=net(), config=config(scheduler={"type": kind, "params": params})
        )
        with engine:
            assert engine.get_lr() == schedule.get_lr() == [rate], kind
            assert isinstance(schedule, WarmupLR) == kind.startswith(("WarmupLR", "WarmupD"))
