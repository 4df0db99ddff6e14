import copy
import gc
import io
import itertools
import pickle
import weakref

import pytest
import torch
from torch import nn

from patrickstar import _C, torch_scope
from patrickstar.module.chunked_parameter import ChunkedParameter
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.models import MODELS, VOCAB, Mlp, token_batch
from tests.training import ADAM, least_device_memory, make_config, train, train_plain


def batch(seed=1):
    return token_batch(torch.Generator().manual_seed(seed))


@pytest.fixture(params=["unlimited", "scarce"])
def trained(request):
    config = make_config("bf16", default_chunk_size=2048)
    if request.param == "scarce":
        config["device_memory"] = least_device_memory(MODELS["mlp"], config) + 64 * 1024
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(Mlp, 0, config)
    with engine:
        engine.backward(engine(**batch())["loss"])
        optimizer.step()
        yield engine, optimizer


def step(engine, optimizer, seed=2):
    optimizer.zero_grad()
    loss = engine(**batch(seed))["loss"]
    engine.backward(loss)
    optimizer.step()
    return loss.item()


def test_same_objects_and_true_shapes():
    modules = []

    def build():
        modules.append(Mlp())
        return modules[0]

    engine, optimizer = initialize_engine(build, 0, make_config("bf16"))
    with engine:
        module = modules[0]
        before = dict(module.named_parameters())
        assert engine.module is module and type(module) is Mlp
        assert dict(engine.named_parameters()).keys() == before.keys()
        assert all(a is b for a, b in zip(engine.parameters(), before.values(), strict=True))
        weight = module.head.weight
        assert isinstance(weight, nn.Parameter) and weight.is_leaf and weight.requires_grad
        assert (weight.shape, weight.dtype, weight.numel(), weight.is_contiguous()) == (
            (VOCAB, 32),
            torch.bfloat16,
            VOCAB * 32,
            True,
        )
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(before)
        engine.eval()
        assert not module.training
        engine.train()
        assert module.layers[0].training


def test_report_is_flat_and_complete(trained):
    engine, _ = trained
    report = engine.report()
    assert {
        "num_parameters",
        "device_budget_bytes",
        "device_peak_bytes",
        "host_budget_bytes",
        "host_peak_bytes",
        "uploaded_bytes",
        "downloaded_bytes",
        "num_evictions",
        "num_prefetch_hits",
        "num_on_demand_fetches",
        "num_skipped_steps",
        "loss_scale",
        "grad_norm",
    } <= report.keys()
    assert all(isinstance(value, (int, float, str)) for value in report.values())
    assert report["num_parameters"] == sum(p.numel() for p in engine.parameters())
    engine.reset_report()
    after = engine.report()
    assert after["uploaded_bytes"] == after["num_evictions"] == 0
    assert after["device_peak_bytes"] <= report["device_peak_bytes"]


def test_evaluation_leaves_the_plan_alone(trained, tmp_path):
    engine, optimizer = trained
    engine.save_checkpoint(tmp_path)
    expected = [step(engine, optimizer) for _ in range(4)], engine.state_dict()
    engine.load_checkpoint(tmp_path)
    losses = [step(engine, optimizer)]
    engine.reset_report()
    evaluated = []
    for _ in range(3):
        engine.eval()
        with torch.no_grad():
            small = {key: value[:1, :5] for key, value in batch(2).items()}  # of what is trained on
            evaluated.append(engine(**small)["loss"].item())
            assert engine(**small)["loss"].item() == evaluated[-1]
        engine.train()
        before = engine.report()["num_replayed_accesses"]
        losses.append(step(engine, optimizer))
        assert engine.report()["num_replayed_accesses"] > before
    assert_same_bits((losses, engine.state_dict()), expected)
    for falling in (losses, evaluated):
        assert all(later < earlier for earlier, later in itertools.pairwise(falling)), falling
    assert engine.report()["num_accesses"] == engine.report()["num_replayed_accesses"]


def test_reading_parameters_any_time(trained):
    engine, optimizer = trained
    state = engine.state_dict()
    with torch.no_grad():
        for name, param in engine.named_parameters():
            expected = state[name].bfloat16()
            assert_same_bits(param * 1, expected)
            assert_same_bits(param.clone(), expected)
            assert_same_bits(param.data.clone(), expected)
            assert_same_bits(param.detach().float(), expected.float())
            assert_same_bits(param.t().t() if param.ndim == 2 else param.view(-1), expected)
            assert param.sum() == expected.sum()
            assert torch.isfinite(param).all()
            assert str(expected.flatten()[0].item())[:4] in repr(param.flatten()[0])
        assert torch.nn.utils.parameters_to_vector(engine.parameters()).numel() == engine.report()["num_parameters"]
    step(engine, optimizer)


def test_a_parameter_off_the_device_refuses_raw_access(trained):
    engine, _ = trained
    runtime = engine._session.runtime
    weight = engine.module.layers[1][0].weight
    with torch._C.DisableTorchFunctionSubclass():
        if runtime.is_on_device(weight._patrickstar.chunk, _C.ArrayKind.PARAM):
            assert weight.sum().isfinite()
        else:
            with pytest.raises(RuntimeError, match="its memory is not on the device now"):
                weight.sum()


def test_writing_parameters_any_time(trained):
    engine, optimizer = trained
    weight, bias = engine.module.head.weight, engine.module.head.bias
    other = engine.module.layers[0][0].weight
    before = engine.state_dict()
    with torch.no_grad():
        weight.mul_(1.0 + 2**-20)  # invisible in bfloat16, not in float32
        bias[:3] = 7.0
        other.data.fill_(0.125)
        engine.module.layers[1][0].weight.copy_(other)
        engine.module.layers[2][2].bias.data = torch.full((32,), 1 / 3)
    torch.manual_seed(5)
    nn.init.normal_(engine.module.layers[2][0].weight)
    torch.manual_seed(5)
    expected = torch.empty(64, 32).normal_()
    after = engine.state_dict()
    assert_same_bits(after["head.weight"], before["head.weight"] * (1.0 + 2**-20))
    assert_same_bits(after["head.bias"], torch.cat([torch.full((3,), 7.0), before["head.bias"][3:]]))
    assert (after["layers.0.0.weight"] == 0.125).all() and (after["layers.1.0.weight"] == 0.125).all()
    assert (after["layers.2.2.bias"] == torch.tensor(1 / 3)).all()
    assert_same_bits(after["layers.2.0.weight"], expected)
    with torch.no_grad():
        assert (other.float() == 0.125).all()  # the compute copy follows
    with pytest.raises(RuntimeError, match="leaf parameter that requires grad"):
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="they must agree"):
        weight.data = torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match="out of its chunk"):
        weight.data.resize_(3)
    step(engine, optimizer)


def test_copies_are_ordinary(trained):
    engine, _ = trained
    clone = copy.deepcopy(engine.module.head)
    assert type(clone.weight) is nn.Parameter
    assert_same_bits(clone.state_dict(), engine.module.head.state_dict())
    buffer = io.BytesIO()
    torch.save(engine.module.head.weight, buffer)
    buffer.seek(0)
    assert type(torch.load(buffer, weights_only=True)) is nn.Parameter
    loaded = pickle.loads(pickle.dumps(engine.module.head.bias.detach()))
    assert type(loaded) is torch.Tensor and loaded.shape == (VOCAB,)


def test_module_state_dict_reads_parameters(trained):
    engine, _ = trained
    full = engine.state_dict()
    for name, value in engine.module.state_dict().items():
        assert value.dtype == torch.float32
        assert_same_bits(value, full[name], name)


def test_close_gives_an_ordinary_module_back(trained):
    engine, _ = trained
    state = engine.state_dict()
    module = engine.module
    engine.close()
    assert all(type(param) is nn.Parameter and param.dtype == torch.float32 for param in module.parameters())
    assert_same_bits(dict(module.state_dict()), dict(state))
    loss = module(**batch())["loss"]
    loss.backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()


def test_discard_gives_no_values_back(trained):
    engine, _ = trained
    module, names = engine.module, list(engine.state_dict())
    engine.discard()
    engine.discard()
    engine.close()  # too late for values
    params = dict(module.named_parameters(remove_duplicate=False))
    assert {type(param) for param in params.values()} == {nn.Parameter} and set(params) <= set(names)
    assert all(param.numel() == 0 and param.dtype == torch.float32 for param in params.values())
    with pytest.raises(_C.StateError, match="this engine is closed"):
        engine.report()


@pytest.mark.parametrize("end", ["close", "discard"])
def test_memory_is_returned_at_the_end(end):
    engine, optimizer = initialize_engine(Mlp, 0, make_config())
    step(engine, optimizer)
    runtime = weakref.ref(engine._session.runtime)
    getattr(engine, end)()
    del engine, optimizer
    gc.collect()
    assert runtime() is None


def test_saved_views_do_not_keep_evicted_memory():
    config = make_config(default_chunk_size=1024)
    config["optimizer"]["params"]["use_hybrid_adam"] = False
    engine, _ = initialize_engine(
        lambda: nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)]), 0, {**config, "device_memory": 400_000}
    )
    with engine:
        x = torch.randn(2, 128, requires_grad=True)
        loss = engine(x).sum()
        report = engine.report()
        assert report["num_evictions"] > 0
        assert report["device_chunk_buffer_bytes"] <= 400_000 < 8 * 128 * 129 * 4
        assert report["device_peak_bytes"] <= 400_000
        engine.backward(loss)
        assert engine.report()["device_peak_bytes"] <= 400_000


def test_torch_scope():
    class Scoped(Mlp):
        def __init__(self):
            super().__init__()
            with torch_scope(do_allreduce=True):
                self.norm = nn.LayerNorm(32)
                self.layers[1] = nn.Sequential(nn.Linear(32, 32))

    from tests.models import Case

    case = Case(Scoped, token_batch)
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(Scoped, 0, make_config("bf16", gradient_clipping=0.1))
    with engine:
        assert type(engine.module.layers[1][0].weight) is nn.Parameter
        assert engine.module.layers[1][0].weight.dtype == torch.float32
        assert isinstance(engine.module.head.weight, ChunkedParameter)
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = engine(**token_batch(generator))["loss"]
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        state = optimizer.state_dict()
        assert len(state["state"]) == len(list(engine.parameters())) - 2  # the norm is not used
        optimizer.load_state_dict(state)
    reference = train_plain(case, steps=8, clipping=0.1)
    assert max(abs(a - b) / b for a, b in zip(losses, reference.losses, strict=True)) < 1e-2


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_cpu_embedding(precision):
    config = make_config(precision, use_cpu_embedding=True, gradient_clipping=0.5)
    run = train(MODELS["mlp"], config, steps=8)
    reference = train_plain(MODELS["mlp"], steps=8, clipping=0.5)
    tolerance = 1e-5 if precision == "fp32" else 1e-2
    assert max(abs(a - b) / b for a, b in zip(run.losses, reference.losses, strict=True)) < tolerance
    engine, _ = initialize_engine(Mlp, 0, config)
    with engine:
        assert type(engine.module.embed.weight) is nn.Parameter and engine.module.embed.weight.dtype == torch.float32
    tied, _ = initialize_engine(MODELS["gpt2"].build, 0, config)
    with tied:
        assert isinstance(tied.module.transformer.wte.weight, ChunkedParameter)
        assert type(tied.module.transformer.wpe.weight) is nn.Parameter


def test_tied_weights_are_one_parameter():
    engine, optimizer = initialize_engine(MODELS["shared"].build, 0, make_config("bf16"))
    with engine:
        assert engine.module.head.weight is engine.module.embed.weight
        state = engine.state_dict()
        assert state["head.weight"] is state["embed.weight"]
        assert len(list(engine.parameters())) == 3


def test_optimizer_state_moves_to_pytorch_and_back():
    case = MODELS["mlp"]
    reference = train_plain(case, steps=15)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)

    def ours(model, optim, count):
        engine, optimizer = initialize_engine(Mlp, 0, make_config())
        with engine:
            if model is not None:
                engine.load_state_dict(model)
                optimizer.load_state_dict(optim)
            for _ in range(count):
                optimizer.zero_grad()
                engine.backward(engine(**case.batch(generator))["loss"])
                optimizer.step()
            return engine.state_dict(), optimizer.state_dict()

    model, optim = ours(None, None, 5)
    module = Mlp()
    plain = torch.optim.AdamW(module.parameters(), **ADAM)
    module.load_state_dict(model)
    plain.load_state_dict(optim)
    for _ in range(5):
        plain.zero_grad()
        module(**case.batch(generator))["loss"].backward()
        plain.step()
    model, optim = ours(module.state_dict(), plain.state_dict(), 5)
    for name, value in reference.state.items():
        torch.testing.assert_close(model[name], value, rtol=1e-4, atol=1e-6)
    assert {entry["step"].item() for entry in optim["state"].values()} == {15.0}


@pytest.mark.parametrize(
    "option", [{"warmup_gpu_chunk_mem_ratio": 0.3}, {"use_fake_dist": True}, {"margin_use_ratio": 0.1}]
)
def test_memory_options_do_not_change_numbers(option):
    config = make_config("bf16")
    budget = least_device_memory(MODELS["gpt2"], config) * 2
    plain = train(MODELS["gpt2"], {**config, "device_memory": budget}, steps=5)
    other = train(MODELS["gpt2"], {**config, "device_memory": budget, "client": {"mem_tracer": option}}, steps=5)
    assert plain.losses == other.losses
    assert other.report["device_peak_bytes"] <= budget


def test_retain_graph(trained):
    engine, optimizer = trained
    engine.backward(engine(**batch())["loss"])
    single = engine.grad_norm()
    optimizer.zero_grad()
    loss = engine(**batch())["loss"]
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    assert engine.grad_norm() == 2 * single > 0
    before = engine.state_dict()
    optimizer.step()
    assert engine.report()["grad_norm"] == 2 * single
    assert all((value != before[name]).any() for name, value in engine.state_dict().items())


def test_two_forwards_one_backward(trained):
    engine, optimizer = trained
    before, norms = engine.state_dict(), []
    with _C.HostAllocations():
        plain = Mlp()
        plain.load_state_dict(before)
        expected = plain(**batch(3))["loss"] + plain(**batch(4))["loss"]
        expected.backward()
    for seeds in ((3, 4), (3,), (4,)):
        loss = sum(engine(**batch(seed))["loss"] for seed in seeds)
        engine.backward(loss)
        norms.append(engine.grad_norm())
        if len(seeds) > 1:
            assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
            gradient = engine._session.states.gradient(engine.module.head.weight, 1.0)
            with _C.HostAllocations():
                theirs = plain.head.weight.grad
                assert float((gradient - theirs).norm()) < 0.02 * float(theirs.norm())
        optimizer.zero_grad()
    plain_norm = float(nn.utils.get_total_norm([param.grad for param in plain.parameters()]))
    assert norms[0] == pytest.approx(plain_norm, rel=1e-2)
    assert max(norms[1:]) < norms[0] < sum(norms[1:])
    engine.backward(engine(**batch(3))["loss"] + engine(**batch(4))["loss"])
    optimizer.step()
    assert all((value != before[name]).any() for name, value in engine.state_dict().items())


class NoBiasGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, with_bias):
        ctx.save_for_backward(x, weight)
        ctx.with_bias = with_bias
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, grad.sum(0) if ctx.with_bias else None, None


class SometimesNoBiasGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return NoBiasGradient.apply(x, self.layer.weight, self.layer.bias, self.calls <= 3)


def test_a_function_that_gives_no_gradient_of_a_parameter():
    torch.manual_seed(0)
    plain = SometimesNoBiasGradient()
    engine, optimizer = initialize_engine(lambda: copy.deepcopy(plain), 0, make_config("fp32"))
    reference = torch.optim.AdamW(plain.parameters(), **ADAM)
    with engine:
        for index in range(6):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(index))
            for module, stepper in ((engine, optimizer), (plain, reference)):
                stepper.zero_grad()
                loss = module(x).square().mean()
                engine.backward(loss) if module is engine else loss.backward()
                stepper.step()
        torch.testing.assert_close(engine.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-7)
