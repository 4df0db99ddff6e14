import copy
import dataclasses

import pytest
import torch
from torch import nn

from patrickstar import MemoryBudgetError, StateError
from patrickstar.optimizer.uncorrected_adam import UncorrectedAdamW
from patrickstar.runtime import initialize_engine
from patrickstar.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from tests.bits import assert_same_bits
from tests.models import MODELS, Mlp, token_batch
from tests.training import ADAM, least_named, make_config, train

GENERATOR = torch.Generator()


def batch():
    return token_batch(GENERATOR.manual_seed(1))


@pytest.fixture
def engine_and_optimizer():
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(Mlp, 0, make_config())
    with engine:
        yield engine, optimizer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_func": 3}, "model_func is a int; give an nn.Module, or a function"),
        ({"model_func": nn.LazyLinear(3)}, "not initialised"),
        ({"model_func": lambda: "model"}, "model_func returned a str"),
        ({"model_func": lambda: nn.LazyLinear(3)}, "not initialised"),
        (
            {"model_func": lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2)))},
            "module 0 is a torch.jit.ScriptModule",
        ),
        ({"model_func": Mlp, "local_rank": -1}, "local_rank is -1"),
        ({"model_func": Mlp, "local_rank": "0"}, "local_rank is '0'"),
        ({"model_func": Mlp, "config": "config.json"}, "config is 'config.json', which cannot be read"),
        ({"model_func": Mlp, "model_parameters": "decay"}, "model_parameters is a str"),
        ({"model_func": Mlp, "model_parameters": [{"params": "nothing.*"}]}, "no parameter matches 'nothing"),
        ({"model_func": Mlp, "model_parameters": [{"params": "embed.*"}]}, "are in no group"),
        ({"model_func": Mlp, "model_parameters": [{"lr": 1}]}, "whose 'params' are name patterns"),
        ({"model_func": Mlp, "model_parameters": [{"params": "*", "momentum": 1}]}, "unknown option 'momentum'"),
        ({"model_func": Mlp, "model_parameters": [{"params": "*", "lr": -1}]}, r"model_parameters\[0\].lr is -1"),
        ({"model_func": Mlp, "model_parameters": [{"params": "*", "name": "all"}]}, "unknown option 'name'"),
        *(
            (
                {"model_func": Mlp, "model_parameters": lambda m, key=key: [{"params": m.parameters(), key: 1}]},
                f"unknown option '{key}'",
            )
            for key in ("momentum", "amsgrad", "weight_deacy", "beta")
        ),
        (
            {"model_func": Mlp, "model_parameters": lambda m: [nn.Parameter(torch.ones(1))]},
            "not a parameter of the module",
        ),
        (
            {"model_func": Mlp, "model_parameters": lambda m: [{"params": m.parameters()}, {"params": m.parameters()}]},
            "is in two groups",
        ),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        initialize_engine(**arguments)


def test_budget_below_the_working_set():
    with pytest.raises(MemoryBudgetError, match=r"device_memory is 1000 bytes.*at least \d.*KiB"):
        initialize_engine(Mlp, 0, make_config(device_memory=1000))
    assert torch.empty(10).numel() == 10  # the allocator is PyTorch's own again


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_host_budget_too_small(precision):
    config = make_config(precision, device_memory="200KB", default_chunk_size=8192)
    config["optimizer"]["params"]["use_hybrid_adam"] = False
    message = r"host memory takes \d.* raise host_memory to at least \d.*, or device_memory"
    least = 1
    for _ in range(2):
        with pytest.raises(MemoryBudgetError, match=message) as caught:
            initialize_engine(Mlp, 0, {**config, "host_memory": least})
        named = least_named(caught.value)
        assert named > least
        least = named - 1
    engine, _ = initialize_engine(Mlp, 0, {**config, "host_memory": named})
    with engine:
        assert engine.report()["host_budget_bytes"] == named


def test_an_already_built_model_works():
    torch.manual_seed(0)
    module = Mlp()
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    engine, optimizer = initialize_engine(lambda: module, 0, None)
    with engine:
        assert engine.module is module
        assert_same_bits(engine.state_dict(), expected)
        engine.backward(engine(**batch())["loss"])
        optimizer.step()


def test_the_same_parameters_in_a_second_engine(engine_and_optimizer):
    engine, _ = engine_and_optimizer
    with pytest.raises(ValueError, match="belongs to an engine that is open already"):
        initialize_engine(lambda: engine.module, 0, None)


def test_a_dropped_engine_makes_room():
    engine, optimizer = initialize_engine(Mlp, 0, None)
    engine.backward(engine(**batch())["loss"])
    del engine, optimizer
    initialize_engine(Mlp, 0, None)[0].close()


def test_backward_before_forward(engine_and_optimizer):
    engine, optimizer = engine_and_optimizer
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(StateError, match="backward before forward"):
        engine.backward(loss)
    engine(**batch())
    with pytest.raises(StateError, match="does not require grad"):
        engine.backward(torch.ones(()))
    with pytest.raises(ValueError, match="give the loss tensor"):
        engine.backward({"loss": loss})
    with pytest.raises(ValueError, match=r"the loss has shape \(3,\)"):
        engine.backward(torch.ones(3, requires_grad=True))
    engine.backward(engine(**batch())["loss"])
    optimizer.step()
    with pytest.raises(StateError, match="backward before forward"):
        engine.backward(loss)


def test_forward_under_no_grad_then_backward(engine_and_optimizer):
    engine, _ = engine_and_optimizer
    with torch.no_grad():
        loss = engine(**batch())["loss"]
    with pytest.raises(StateError, match="backward before forward"):
        engine.backward(loss)


def test_plain_backward_is_refused(engine_and_optimizer):
    engine, _ = engine_and_optimizer
    with pytest.raises(StateError, match=r"call model.backward\(loss\)"):
        engine(**batch())["loss"].backward()


def test_nan_loss_without_scaler_changes_nothing(engine_and_optimizer, caplog):
    engine, optimizer = engine_and_optimizer
    before = engine.state_dict()
    engine.backward(engine(**batch())["loss"] * float("nan"))
    optimizer.step()
    assert "not finite" in caplog.text
    assert engine.report()["num_skipped_steps"] == 1
    after = engine.state_dict()
    assert_same_bits(after, before)
    engine.backward(engine(**batch())["loss"])
    optimizer.step()
    assert engine.report()["num_steps"] == 1


def test_clip_grad_norm_is_refused(engine_and_optimizer):
    engine, optimizer = engine_and_optimizer
    engine.backward(engine(**batch())["loss"])
    with pytest.raises(RuntimeError, match="gradient_clipping"):
        nn.utils.clip_grad_norm_(engine.parameters(), 1.0)
    for foreach in (False, True):
        with pytest.raises(RuntimeError, match="updated by the optimizer that came with the engine"):
            torch.optim.SGD(engine.module.parameters(), lr=1, foreach=foreach).step()
    with pytest.raises(RuntimeError, match="cannot be set"):
        engine.module.head.weight.grad = torch.zeros(97, 32)
    optimizer.step()
    optimizer.zero_grad()
    assert engine.module.head.weight.grad is None


def test_dropping_gradients_the_pytorch_way(engine_and_optimizer):
    engine, optimizer = engine_and_optimizer
    before = engine.state_dict()
    for forget in (
        optimizer.zero_grad,
        engine.zero_grad,
        lambda: [setattr(p, "grad", None) for p in engine.parameters()],
    ):
        engine.backward(engine(**batch())["loss"])
        forget()
        assert all(p.grad is None for p in engine.parameters())
        optimizer.step()
    after = engine.state_dict()
    assert_same_bits(after, before)


def test_freezing_later_works(engine_and_optimizer):
    engine, optimizer = engine_and_optimizer
    engine.module.embed.weight.requires_grad_(False)
    before = engine.state_dict()
    engine.backward(engine(**batch())["loss"])
    optimizer.step()
    after = engine.state_dict()
    assert_same_bits(after["embed.weight"], before["embed.weight"])
    assert not torch.equal(before["head.weight"], after["head.weight"])


def test_step_without_gradients_does_nothing(engine_and_optimizer):
    engine, optimizer = engine_and_optimizer
    before = engine.state_dict()
    optimizer.step()
    after = engine.state_dict()
    assert_same_bits(after, before)
    assert engine.report()["num_steps"] == 0


def test_an_exception_in_forward_or_backward_loses_nothing():
    class Failing(Mlp):
        fail = None

        def forward(self, input_ids, labels):
            if Failing.fail == "forward":
                self.layers[0](self.embed(input_ids))
                raise KeyError("in forward")
            out = super().forward(input_ids, labels)
            if Failing.fail == "backward":
                out["loss"].register_hook(lambda grad: 1 / 0)
            return out

    case = MODELS["mlp"]
    expected = train(case, make_config(), steps=4)
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(Failing, 0, make_config())
    generator = torch.Generator().manual_seed(1)
    losses = []
    with engine:
        for _ in range(4):
            data = case.batch(generator)
            for Failing.fail, error in (("forward", KeyError), ("backward", ZeroDivisionError)):
                with pytest.raises(error):
                    engine.backward(engine(**data)["loss"])
            Failing.fail = None
            optimizer.zero_grad()
            loss = engine(**data)["loss"]
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        state = engine.state_dict()
    assert losses == expected.losses
    assert_same_bits(state, expected.state)


def test_calls_after_close():
    engine, optimizer = initialize_engine(Mlp, 0, None)
    loss = engine(**batch())["loss"]
    engine.close()
    engine.close()
    for call in (
        lambda: engine(**batch()),
        lambda: engine.backward(loss),
        optimizer.step,
        engine.report,
        optimizer.zero_grad,
    ):
        with pytest.raises(StateError, match="closed"):
            call()
    with pytest.raises(StateError, match="closed"):
        loss.backward()


def test_wrong_state_dicts(engine_and_optimizer):
    engine, optimizer = engine_and_optimizer
    state = engine.state_dict()
    with pytest.raises(RuntimeError, match="Missing key"):
        engine.load_state_dict({})
    with pytest.raises(RuntimeError, match="size mismatch"):
        engine.load_state_dict({**state, "head.bias": torch.zeros(3)})
    with pytest.raises(ValueError, match="assign"):
        engine.load_state_dict(state, assign=True)
    with pytest.raises(ValueError, match="the state dict of"):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})


def test_a_module_serves_as_well_as_a_function_that_returns_one():
    case = MODELS["mlp"]
    by_function = train(case, make_config(), steps=3)

    def module():
        torch.manual_seed(0)
        return case.build()

    by_module = train(dataclasses.replace(case, build=module()), make_config(), steps=3)
    assert by_module.losses == by_function.losses


CLIPPING = 0.05


class Fourier(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lift, self.drop = nn.Linear(8, 16), nn.Linear(16, 4)
        self.modes = nn.Parameter(torch.randn(9, dtype=torch.complex64))

    def forward(self, x):
        return self.drop(torch.fft.irfft(torch.fft.rfft(self.lift(x)) * self.modes, n=16))


INPUTS = [torch.randn(4, 8, generator=torch.Generator().manual_seed(step)) for step in range(4)]


def opened(kind, **params):
    config = make_config(optimizer=kind, gradient_clipping=CLIPPING)
    options = {key: value for key, value in config["optimizer"]["params"].items() if key in ("lr", "weight_decay")}
    config["optimizer"]["params"] = {**(ADAM if "Adam" in kind else options), **params}
    return initialize_engine(Fourier, 0, config)


def run_steps(engine, optimizer, inputs):
    found = []
    for x in inputs:
        optimizer.zero_grad()
        loss = engine(x).square().mean()
        engine.backward(loss)
        optimizer.step()
        found.append((loss.item(), engine.report()["grad_norm"]))
    return found


PLAIN = {
    "AdamW": (torch.optim.AdamW, {}),
    "SGD": (torch.optim.SGD, {}),
    "AdamW without correction": (UncorrectedAdamW, {"bias_correction": False}),
}


@pytest.mark.parametrize("name", PLAIN)
def test_they_are_trained_as_in_plain_pytorch(name):
    make, params = PLAIN[name]
    plain = Fourier()
    options = ADAM if "Adam" in name else {key: ADAM[key] for key in ("lr", "weight_decay")}
    plain_optimizer = make(plain.parameters(), **options)
    expected = []
    for x in INPUTS:
        plain_optimizer.zero_grad()
        loss = plain(x).square().mean()
        loss.backward()
        expected.append((loss.item(), float(nn.utils.clip_grad_norm_(plain.parameters(), CLIPPING))))
        plain_optimizer.step()
    engine, optimizer = opened(name.split()[0], **params)
    with engine:
        for found, wanted in zip(run_steps(engine, optimizer, INPUTS), expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-5)
        for key, value in engine.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["AdamW", "Lion"])
def test_they_are_saved_and_loaded(kind, tmp_path):
    engine, optimizer = opened(kind)
    with engine:
        run_steps(engine, optimizer, INPUTS[:2])
        modes = engine.module.modes
        assert_same_bits(safe_get_full_fp32_param(modes), modes.detach())
        momentum = safe_get_full_optimizer_state(modes, "exp_avg")
        assert momentum.is_complex() and bool(momentum.imag.any())
        engine.save_checkpoint(tmp_path)
        expected = run_steps(engine, optimizer, INPUTS[2:]), engine.state_dict(), optimizer.state_dict()["state"]
    engine, optimizer = opened(kind)
    with engine:
        engine.load_checkpoint(tmp_path)
        assert_same_bits(
            (run_steps(engine, optimizer, INPUTS[2:]), engine.state_dict(), optimizer.state_dict()["state"]), expected
        )
        engine.backward(engine(INPUTS[0]).square().mean())
        assert_same_bits(safe_get_full_grad(engine.module.modes), engine.module.modes.grad)


def build(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "precision", "expected"),
    [
        (torch.bfloat16, "bf16", torch.bfloat16),
        (torch.float32, "bf16", torch.float32),
        (torch.bfloat16, "fp32", torch.float32),
        (torch.float16, "bf16", torch.float32),
    ],
)
def test_statistics_and_weights_have_one_dtype(dtype, precision, expected):
    module = build(dtype)
    config = {"bf16": {"enabled": precision == "bf16"}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine, optimizer = initialize_engine(lambda: module, 0, config)
    with engine:
        engine.train()
        norm = module[1]
        assert {norm.running_mean.dtype, norm.running_var.dtype, norm.weight.dtype, norm.bias.dtype} == {expected}
        before = norm.running_mean.clone()
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = engine(torch.ones(6, 8) * torch.arange(6).unsqueeze(1)).float().square().mean()
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        assert not norm.running_mean.equal(before)
    assert {value.dtype for value in module.state_dict().values() if value.is_floating_point()} == {dtype}


def test_a_bfloat16_model_gives_plain_pytorchs_output():
    module = build(torch.bfloat16)
    plain, x = copy.deepcopy(module), torch.randn(6, 8, dtype=torch.bfloat16)
    engine, _ = initialize_engine(lambda: module, 0, {"bf16": {"enabled": True}})
    with engine:
        engine.train()
        assert_same_bits(engine(x).detach(), plain.train()(x).detach())
        assert_same_bits(module[1].running_var.clone(), plain[1].running_var)
