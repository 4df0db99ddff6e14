import pytest
import torch

from patrickstar.engine import core_setup
from tests.models import MODELS, VOCAB, Case, gpt2
from tests.training import assert_same, make_config, make_host_config, relative_error, train, train_plain

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]
PRECISIONS = ["fp32", "bf16", "fp16"]
MIB = 2**20


def wide_gpt2():
    return gpt2(hidden=1024, layers=8)


def wide_batch(generator):
    tokens = torch.randint(1, VOCAB, (2, 16), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


WIDE = Case(wide_gpt2, wide_batch)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_budgets(precision):
    unlimited = train(WIDE, make_config(precision, default_chunk_size=4 * MIB))
    assert unlimited.report["num_device_state_chunks"] == unlimited.report["num_chunks"]
    model_data = unlimited.report["num_parameters"] * (16 if precision == "fp32" else 14)
    for share in (4, 8):
        torch.cuda.empty_cache()
        budget = model_data // share
        run = train(WIDE, make_config(precision, device_memory=budget))
        report = run.report
        print(
            f"{precision}, 1/{share} of {model_data / MIB:.0f} MiB: peak {report['device_peak_bytes'] / MIB:.0f} "
            f"MiB, chunks {report['num_chunks']}, "
            f"states on the device {report['num_device_state_chunks']}, uploaded "
            f"{report['uploaded_bytes'] / MIB:.0f} MiB, "
            f"on demand {report['num_on_demand_fetches']}, prefetched {report['num_prefetch_hits']}"
        )
        assert report["device_peak_bytes"] <= budget
        assert report["uploaded_bytes"] > 0
        assert_same(run, unlimited)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_where_adam_runs(precision):
    config = make_config(precision, gradient_clipping=0.1, default_chunk_size=4 * MIB)
    on_gpu = train(WIDE, config)
    config["optimizer"]["params"]["use_hybrid_adam"] = False
    on_cpu = train(WIDE, config)
    assert on_gpu.report["num_device_state_chunks"] > 0 == on_cpu.report["num_device_state_chunks"]
    assert on_gpu.grad_norms == on_cpu.grad_norms
    assert_same(on_gpu, on_cpu)


def test_chunk_sizes():
    runs = [
        train(WIDE, make_config("bf16", default_chunk_size=numel, gradient_clipping=0.1))
        for numel in (64 * 1024, MIB, 64 * MIB)
    ]
    for run in runs[1:]:
        assert_same(run, runs[0])


def test_planned_and_on_demand():
    budget = make_config("bf16", device_memory=300 * MIB)
    planned = train(WIDE, budget)
    on_demand = train(WIDE, budget, before_step=lambda engine, step: engine._session.runtime.forget_plan())
    assert planned.report["num_prefetch_hits"] > 0 == on_demand.report["num_prefetch_hits"]
    assert_same(planned, on_demand)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant):
    config = make_config("bf16")
    unlimited = train(WIDE, config, steps=6, checkpointing=use_reentrant)
    assert_same(train(WIDE, {**config, "device_memory": 250 * MIB}, steps=6, checkpointing=use_reentrant), unlimited)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_accumulation(precision):
    config = make_config(precision, gradient_clipping=1.0)
    unlimited = train(WIDE, config, steps=5, accumulate=3)
    assert_same(train(WIDE, {**config, "device_memory": 500 * MIB}, steps=5, accumulate=3), unlimited)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_models(name, precision, monkeypatch):
    config = make_config(precision, gradient_clipping=1.0)
    resident = train(MODELS[name], config, steps=6)
    make_options = core_setup.make_engine_options

    def make_scarce_options(*args):
        options = make_options(*args)
        options.residency.payload_limit_bytes = 8192
        return options

    monkeypatch.setattr(core_setup, "make_engine_options", make_scarce_options)
    scarce = make_host_config(precision, gradient_clipping=1.0, default_chunk_size=2048, device_memory=256 * MIB)
    run = train(MODELS[name], scarce, steps=6, before_step=lambda engine, _: engine._session.runtime.forget_plan())
    assert run.report["num_evictions"] > 0
    assert_same(run, resident)


@pytest.mark.parametrize("name", ["gpt2", "t5", "lstm", "mixture_of_experts"])
def test_against_pytorch(name):
    run = train(MODELS[name], make_config(), steps=10)
    error = relative_error(run, train_plain(MODELS[name], steps=10))
    print(f"{name}: parameters within {error:.1e} of the CPU's")
    assert error < 1e-3


def test_overflow():
    config = make_config("fp16")
    config["fp16"] |= {"initial_scale_power": 24, "hysteresis": 1}
    run = train(MODELS["gpt2"], config, steps=25)
    assert run.report["num_skipped_steps"] > 3
    assert run.report["num_steps"] > 3
    assert all(value.isfinite().all() for value in run.state.values())
