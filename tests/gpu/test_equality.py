import pytest
import torch

from patrickstar import _C
from patrickstar.session import core_setup
from tests.bits import assert_same_bits
from tests.engine import test_writes_in_use as in_use
from tests.engine.test_quantized import TOWER, Tower
from tests.models import MODELS, VOCAB, Case, gpt2
from tests.module import test_put_back as put_back
from tests.quant.test_kernels import DTYPES, NUMELS, QUANT, dequantize, quantize, some_values
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
        options.residency.chunk_buffer_limit_bytes = 8192
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


@pytest.mark.parametrize("kind", QUANT)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("misalign", [0, 1])
def test_the_kernel_gives_the_bits_of_the_hosts(kind, dtype, misalign):
    for numel in NUMELS:
        array = quantize("scalar", kind, some_values(numel))
        expected = dequantize("scalar", kind, array, numel, dtype)
        on_device = array.cuda()
        out = torch.full((numel + misalign + 8,), float("nan"), dtype=dtype, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        _C.quant.cuda_dequantize(
            QUANT[kind], on_device.data_ptr(), numel, out[misalign:].data_ptr(), DTYPES[dtype], stream
        )
        assert_same_bits(out[misalign : misalign + numel].cpu(), expected, f"{numel}")
        assert out[misalign + numel :].isnan().all() and out[:misalign].isnan().all()


def deep_tower() -> Tower:
    """67 M frozen weights: 134 MB in 16 bits, 35 MB in NF4."""
    return Tower(num_layers=64, width=1024)


@pytest.mark.parametrize("kind", QUANT)
def test_budgets_change_no_bit(kind):
    case = Case(deep_tower, TOWER.batch)
    config = make_host_config("bf16", quantization={"type": kind}, default_chunk_size=2**20)
    reference = train(case, config, steps=4)
    small = train(case, {**config, "device_memory": "112MiB"}, steps=4)
    assert small.report["uploaded_bytes"] > reference.report["uploaded_bytes"]
    assert_same(small, reference)
    late = {**config, "device_memory": "112MiB", "delays": {"max_random_us": 200}}
    assert_same(train(case, late, steps=4), reference)
    config["optimizer"]["params"]["use_hybrid_adam"] = True
    assert_same(train(case, {**config, "device_memory": "112MiB"}, steps=4), reference)


@pytest.mark.parametrize("name", put_back.SCHEMES)
def test_masters_are_kept(name):
    ways, config = put_back.WAYS, put_back.SCHEMES[name]
    assert_same_bits(put_back.states(config, ways), put_back.states(config, [None] * len(ways)))


@pytest.mark.parametrize("name", in_use.SCHEMES)
def test_parameters_are_written_while_their_chunk_is_in_use(name):
    config = {key: value for key, value in in_use.SCHEMES[name].items() if key != "device_memory"}
    run = train(in_use.case_of(clamps=True), config, steps=4)
    assert_same(run, train(in_use.case_of(clamps=False), config, steps=4, before_step=in_use.clamp_all))
