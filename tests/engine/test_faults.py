"""One test for each fault of the first PatrickStar."""

import copy
import threading

import pytest
import torch
from torch import nn

from patrickstar import _C
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.models import MODELS, Case, ConvNet, Mlp, image_batch, token_batch
from tests.training import ADAM, assert_same, least_device_memory, make_config, relative_error, train, train_plain

README_CONFIG = {
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0, "use_hybrid_adam": True},
    },
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 2**3,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "default_chunk_size": 64 * 1024 * 1024,
    "release_after_init": True,
    "use_cpu_embedding": False,
    "client": {"mem_tracer": {"use_async_mem_monitor": True}},
}


def test_readme_config_runs():
    run = train(MODELS["gpt2"], README_CONFIG, steps=3)
    assert run.report["loss_scale"] == 2.0**8
    assert run.report["num_skipped_steps"] == 0
    assert train(MODELS["gpt2"], None, steps=2).report["num_steps"] == 2


def test_learning_rate_schedulers_take_effect():
    case = MODELS["mlp"]
    torch.manual_seed(0)
    module = case.build()
    plain = torch.optim.AdamW(module.parameters(), **ADAM)
    plain_scheduler = torch.optim.lr_scheduler.OneCycleLR(plain, max_lr=1e-2, total_steps=10)
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(case.build, 0, make_config())
    with engine:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=10)
        generator = torch.Generator().manual_seed(1)
        for _ in range(9):
            batch = case.batch(generator)
            optimizer.zero_grad()
            engine.backward(engine(**batch)["loss"])
            optimizer.step()
            scheduler.step()
            plain.zero_grad()
            module(**batch)["loss"].backward()
            plain.step()
            plain_scheduler.step()
            assert scheduler.get_last_lr() == plain_scheduler.get_last_lr()
            assert (
                optimizer.param_groups[0]["betas"] == plain.param_groups[0]["betas"]
            )  # OneCycle moves momentum as well
        state = engine.state_dict()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", ["callable", "patterns"])
def test_several_parameter_groups(how):
    case = MODELS["gpt2"]

    def groups(module):
        decay = [p for p in module.parameters() if p.ndim > 1]
        rest = [p for p in module.parameters() if p.ndim <= 1]
        return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}]

    patterns = [{"params": ["*bias", "*ln_*"], "weight_decay": 0.0, "lr": 3e-3}, {"params": "*", "weight_decay": 0.1}]
    torch.manual_seed(0)
    module = case.build()
    plain = torch.optim.AdamW(groups(module), **ADAM)
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        plain.zero_grad()
        module(**case.batch(generator))["loss"].backward()
        plain.step()
    run = train(case, make_config(), steps=10, model_parameters=groups if how == "callable" else patterns)
    reference = train_plain(case, steps=1)
    reference.state = {name: value.detach() for name, value in module.state_dict().items()}
    assert relative_error(run, reference) <= 1e-6


def test_hysteresis_is_not_the_scale_factor():
    config = make_config("fp16")
    config["fp16"] |= {"initial_scale_power": 10, "hysteresis": 3}

    def overflow(engine, step):
        with torch.no_grad():
            engine.module.head.bias.fill_(float("inf") if step < 4 else 0.0)

    run = train(MODELS["mlp"], config, steps=5, before_step=overflow)
    scales = [report["loss_scale"] for report in run.chunk_reports]
    assert scales == [1024.0, 1024.0, 512.0, 256.0, 256.0]  # two tolerated, then halved


def test_clipping_is_by_global_norm():
    reference = train_plain(MODELS["gpt2"], clipping=0.05)
    run = train(MODELS["gpt2"], make_config(gradient_clipping=0.05))
    assert relative_error(run, reference) <= 1e-6
    torch.testing.assert_close(torch.tensor(run.grad_norms), torch.tensor(reference.grad_norms), rtol=1e-5, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["unused", "frozen", "lora"])
def test_unused_and_frozen_parameters_keep_their_values(name, precision):
    case = MODELS[name]
    torch.manual_seed(0)
    initial = {key: value.clone() for key, value in case.build().state_dict().items()}
    run = train(case, make_config(precision), steps=6)
    frozen = {key for key, param in case.build().named_parameters() if not param.requires_grad}
    still = {key for key in initial if key.startswith("never.")} | frozen
    assert still
    for key in still:
        expected = initial[key].to(torch.bfloat16).float() if precision == "bf16" and key in frozen else initial[key]
        assert_same_bits(run.state[key], expected, key)


def test_step_counts_of_sometimes_used_parameters():
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(MODELS["unused"].build, 0, make_config())
    with engine:
        generator = torch.Generator().manual_seed(1)
        for _ in range(6):
            optimizer.zero_grad()
            engine.backward(engine(**token_batch(generator))["loss"])
            optimizer.step()
        steps = {
            name: optimizer.state_dict()["state"].get(index, {}).get("step", torch.tensor(0.0)).item()
            for index, (name, _) in enumerate(engine.named_parameters())
        }
    assert steps["head.weight"] == 6
    assert steps["sometimes.weight"] == 3
    assert steps["never.weight"] == 0


def test_chunks_smaller_than_the_largest_tensor():
    run = train(MODELS["gpt2"], make_config(default_chunk_size=1024), steps=5)
    assert run.report["num_chunks"] > 10
    assert_same(run, train(MODELS["gpt2"], make_config(default_chunk_size=64 * 1024 * 1024), steps=5))


@pytest.mark.parametrize("name", ["keywords_only", "gpt2"])
def test_any_input_and_output_passes_the_hooks(name):
    config = make_config()
    least = least_device_memory(MODELS[name], config)
    run = train(MODELS[name], {**config, "device_memory": least}, steps=4)
    assert run.report["num_evictions"] > 0  # nothing is left over on the device
    assert_same(run, train(MODELS[name], config, steps=4))


def test_no_host_synchronisation_per_parameter():
    engine, optimizer = initialize_engine(MODELS["gpt2"].build, 0, make_config("fp16"))
    with engine:
        generator = torch.Generator().manual_seed(1)
        calls = []
        runtime = engine._session.runtime
        for _ in range(2):
            optimizer.zero_grad()
            engine.backward(engine(**token_batch(generator))["loss"])
            squares = runtime.sum_of_squares()
            calls.append(squares)
            assert squares == runtime.sum_of_squares()  # complete, and the same when asked again
            optimizer.step()
        assert all(value > 0 for value in calls)


def test_memory_peaks_are_exact():
    class Spike(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            torch.empty(25 * 1000 * 1000)  # 100 MB, freed at once
            return self.linear(x).sum()

    engine, _ = initialize_engine(Spike, 0, None)
    with engine:
        engine.reset_report()
        engine(torch.randn(2, 8))
        assert 100_000_000 <= engine.report()["device_peak_bytes"] < 101_000_000


def test_concurrent_transfers_do_not_race():
    config = make_config("bf16", default_chunk_size=1024)
    calm = train(MODELS["gpt2"], config, steps=8)
    stop = threading.Event()

    def disturb():
        buffers = [torch.zeros(200_000) for _ in range(2)]
        while not stop.is_set():
            buffers[0].copy_(buffers[1])

    threads = [threading.Thread(target=disturb) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        least = least_device_memory(MODELS["gpt2"], config)
        for budget in (least, least * 5 // 4, least * 3 // 2):
            assert_same(train(MODELS["gpt2"], {**config, "device_memory": budget}, steps=8), calm)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("when", [[0], [1], [4], [0, 1, 2]])
def test_overflow_at_any_step(when):
    config = make_config("fp16")
    config["fp16"] |= {"hysteresis": 1, "initial_scale_power": 8}
    saved = {}

    def overflow(engine, step):
        bias = engine.module.head.bias
        with torch.no_grad():
            if step in when:
                saved.setdefault("bias", engine.state_dict()["head.bias"])
                bias.fill_(float("inf"))
            elif "bias" in saved:
                bias.copy_(saved.pop("bias"))

    budget = least_device_memory(MODELS["mlp"], config) + 1024  # what `overflow` itself keeps
    runs = [
        train(MODELS["mlp"], {**config, **limit}, steps=8, before_step=overflow)
        for limit in ({}, {"device_memory": budget})
    ]
    for run in runs:
        assert run.report["num_skipped_steps"] == len(when)
        assert run.report["num_steps"] == 8 - len(when)
        assert run.report["loss_scale"] == 2.0 ** (8 - len(when))
        assert run.losses[-1] < 5 and all(value.isfinite().all() for value in run.state.values())
    assert_same(*runs)


def test_nothing_outlives_the_engine():
    before = {name: getattr(torch, name) for name in ("empty", "zeros", "randn")}
    methods = {name: getattr(nn.Module, name) for name in ("__init__", "__setattr__", "register_parameter", "__call__")}
    hooks = len(nn.modules.module._global_parameter_registration_hooks)
    engine, _ = initialize_engine(MODELS["gpt2"].build, 0, None)
    parameter = next(engine.parameters())
    assert isinstance(parameter, nn.Parameter)
    during = {name: getattr(torch, name) for name in before}
    engine.close()
    assert before == during == {name: getattr(torch, name) for name in before}
    assert methods == {name: getattr(nn.Module, name) for name in methods}
    assert hooks == len(nn.modules.module._global_parameter_registration_hooks)
    assert all(type(param) is nn.Parameter for param in engine.module.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in engine.module.modules())


def test_whole_states_are_saved_and_loaded():
    case, config = MODELS["gpt2"], make_config("bf16", gradient_clipping=0.5)
    whole = train(case, config, steps=8)
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(case.build, 0, config)
    generator = torch.Generator().manual_seed(1)
    losses = []

    def steps(engine, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad()
            loss = engine(**case.batch(generator))["loss"]
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.item())

    with engine:
        engine.train()
        steps(engine, optimizer, 4)
        saved = copy.deepcopy((engine.state_dict(), optimizer.state_dict()))
        assert set(saved[0]) == set(case.build().state_dict())
        assert all(value.dtype == torch.float32 for value in saved[0].values())
        assert {engine._session.runtime.chunk_state(c) for c in range(engine.report()["num_chunks"])} <= {
            "HOLD",
            "FREE",
        }
    torch.manual_seed(123)
    least = least_device_memory(case, config)
    engine, optimizer = initialize_engine(case.build, 0, {**config, "device_memory": least * 2})
    with engine:
        engine.train()
        engine.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        steps(engine, optimizer, 4)
        state = engine.state_dict()
    assert_same_bits((losses, state), (whole.losses, whole.state))


def test_no_native_instructions():
    assert _C.optim.supported_isas()[0] == "scalar"
    assert _C.optim.isa() in _C.optim.supported_isas()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_batch_norm_keeps_float32(precision):
    run = train(Case(ConvNet, image_batch), make_config(precision), steps=5)
    reference = train_plain(Case(ConvNet, image_batch), steps=5)
    assert run.state["body.1.running_mean"].dtype == torch.float32
    assert run.state["body.1.num_batches_tracked"] == 5
    assert max(abs(a - b) / b for a, b in zip(run.losses, reference.losses, strict=True)) < 2e-2


def test_bf16_trains():
    reference = train_plain(Case(Mlp, token_batch), steps=30)
    for precision, tolerance in (("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 2e-3)):
        run = train(Case(Mlp, token_batch), make_config(precision), steps=30)
        worst = max(abs(a - b) / b for a, b in zip(run.losses, reference.losses, strict=True))
        print(f"{precision}: losses within {worst:.1e} of float32 PyTorch")
        assert worst <= tolerance
