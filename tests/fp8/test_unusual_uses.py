"""Calls that models and users seldom make."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

from patrickstar.choices import Fp8Recipe
from patrickstar.config import Fp8Config
from patrickstar.fp8 import linear, support
from patrickstar.module import fp8_experts
from patrickstar.module.fp8_layers import Fp8Layers
from patrickstar.runtime import initialize_engine
from tests.fp8.test_experts import make_experts, mixture, small_layers
from tests.fp8.test_layers import fake_quantized
from tests.training import make_config


@pytest.fixture(autouse=True)
def _small_layers(monkeypatch):
    small_layers(monkeypatch.setattr)


@pytest.fixture
def layer():
    torch.manual_seed(0)
    layer = nn.Linear(128, 256, dtype=torch.bfloat16)
    changed = Fp8Layers(nn.Sequential(layer), Fp8Config())
    yield layer
    changed.restore()


def rows(num=200):
    return torch.randn(num, 128).bfloat16()


def in_8_bits(x, layer):
    x, w = (fake_quantized(matrix, Fp8Recipe.ROWWISE, 1) for matrix in (x, layer.weight))
    return (x @ w.t()).bfloat16() + layer.bias


class QuantizedProduct(torch.autograd.Function):
    """The recipe's products, written independently."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return functional.linear(*(fake_quantized(matrix, Fp8Recipe.ROWWISE, 1) for matrix in (x, w))).bfloat16()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        along_rows = [fake_quantized(matrix, Fp8Recipe.ROWWISE, 0) for matrix in (grad, x, w)]
        of_x = fake_quantized(grad, Fp8Recipe.ROWWISE, 1) @ along_rows[2]
        return of_x.bfloat16(), (along_rows[0].t() @ along_rows[1]).bfloat16()


class QuantizedLinear(nn.Linear):
    def forward(self, x):
        return QuantizedProduct.apply(x, self.weight) + self.bias if len(x) >= 128 else super().forward(x)


class Perceptron(nn.Module):
    def __init__(self, kind=nn.Linear):
        super().__init__()
        self.up, self.down = kind(128, 256), kind(256, 128)

    def forward(self, x):
        return self.down(functional.gelu(self.up(x)))


def test_micro_batches_of_any_size_train_as_layers_that_are_quantized_by_hand():
    found = []
    for kind, section in ((nn.Linear, {"fp8": {}}), (QuantizedLinear, {})):
        torch.manual_seed(0)
        engine, optimizer = initialize_engine(lambda kind=kind: Perceptron(kind), 0, make_config("bf16", **section))
        values = []
        for _ in range(3):
            for num in (200, 127, 128, 5):
                loss = engine(rows(num)).float().square().mean()
                engine.backward(loss / 4)
                values.append(loss.item())
            with torch.no_grad():
                values.append(engine(rows(130)).float().sum().item())
            optimizer.step()
            optimizer.zero_grad()
        found.append((values, {name: value.clone() for name, value in engine.state_dict().items()}))
        engine.close()
    (values, state), (expected, expected_state) = found
    assert values == expected
    assert all(value.equal(expected_state[name]) for name, value in state.items())


class Latents(nn.Module):
    def __init__(self, kind=nn.Linear):
        super().__init__()
        self.latents, self.linear = nn.Parameter(torch.randn(128, 128)), kind(128, 128)

    def forward(self):
        return self.linear(self.latents).float().square().mean()


def test_a_parameter_that_is_an_input_has_its_new_value_after_each_step():
    found = []
    for kind, section in ((nn.Linear, {"fp8": {}}), (QuantizedLinear, {})):
        torch.manual_seed(0)
        engine, optimizer = initialize_engine(lambda kind=kind: Latents(kind), 0, make_config("bf16", **section))
        losses = []
        for _ in range(3):
            loss = engine()
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        engine.close()
        found.append(losses)
    assert found[0] == found[1]


def test_other_memory_of_an_input_is_cast_again(layer):
    x = rows()
    layer(x)
    x.data = rows()
    assert layer(x).equal(in_8_bits(x, layer))


def test_another_stream_does_not_read_codes_that_may_not_be_computed_yet(layer, monkeypatch):
    states, casts = iter([(0, 0, 7), (0, 0, 7), (0, 0, 8)]), []
    monkeypatch.setattr(linear, "_state_of", lambda x: next(states))
    monkeypatch.setattr(linear, "cast", lambda *args, real=linear.cast: casts.append(1) or real(*args))
    x = rows()
    numbers = []
    for _ in range(3):
        layer(x)
        numbers.append(len(casts))
    assert numbers == [1, 1, 2]


def test_codes_are_freed_where_another_thread_frees_the_input(layer):
    held = [rows()]
    layer(held[0])
    assert linear._last.entry is not None
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert linear._last.entry is None


def test_a_frozen_layer_keeps_no_codes_of_an_input_that_it_shares(layer):
    frozen = copy.deepcopy(layer).requires_grad_(False)
    changed = Fp8Layers(nn.Sequential(frozen), Fp8Config())
    x, saved = rows().mul(1).requires_grad_() * 1, []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: saved.append(value.dtype), lambda value: value):
        layer(x)
        assert torch.float8_e4m3fn in saved
        saved.clear()
        frozen(x)
    assert saved == [torch.bfloat16]
    changed.restore()


def test_second_derivatives_are_refused(layer):
    x = rows().requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph=True, but products in 8 bits have no second derivative"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    model = make_experts()
    changed = Fp8Layers(model, Fp8Config())
    hidden = torch.randn(64, 256).bfloat16().requires_grad_()
    out = model.experts(hidden, torch.zeros(64, 1, dtype=torch.long), torch.ones(64, 1))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(out.sum(), hidden, create_graph=True)
    changed.restore()


@pytest.mark.parametrize("run", [lambda layer: layer, lambda layer: torch.compile(layer, backend="aot_eager")])
def test_autocast_chooses_the_dtype_as_for_other_layers(layer, run):
    x = torch.randn(200, 128, requires_grad=True)
    run = run(layer)
    with torch.autocast("cpu", torch.bfloat16):
        out = run(x)
        assert out.equal(in_8_bits(x.detach().bfloat16(), layer))
    assert torch.autograd.grad(out.sum(), x)[0].dtype is torch.float32
    with torch.autocast("cpu", torch.float16):
        assert run(x.detach().bfloat16()).equal(functional.linear(x.detach().bfloat16(), layer.weight, layer.bias))


def test_a_compiled_backward_has_the_input_of_its_layer_though_it_is_written_later(layer):
    def with_a_write(x):
        hidden = x * 1
        first = layer(hidden)
        hidden.mul_(2)
        return first * layer(hidden)

    def without(x):
        return layer(x) * layer(x * 2)

    x = rows().requires_grad_()
    expected, written, compiled = (
        torch.autograd.grad(function(x).float().sum(), [x, *layer.parameters()])
        for function in (without, with_a_write, torch.compile(with_a_write, backend="aot_eager", fullgraph=True))
    )
    assert all(a.equal(b) and a.equal(c) for a, b, c in zip(expected, written, compiled, strict=True))


def test_keywords_and_nested_tensors_are_as_for_other_layers(layer):
    x = rows()
    assert layer(input=x).equal(layer(x))
    nested = torch.nested.nested_tensor([x[:120], x[120:]], layout=torch.jagged)
    assert layer(nested).values().equal(functional.linear(x, layer.weight, layer.bias))


def test_copies_and_pickles_are_ordinary_layers():
    torch.manual_seed(0)
    engine, _ = initialize_engine(Perceptron, 0, make_config("bf16", fp8={}))
    expected = engine.state_dict()["up.weight"]
    for made in (copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))):
        assert type(made.up) is nn.Linear and made.up.weight.equal(expected)
        assert "fp8_recipe" not in vars(made.up)
    engine.close()


class Parts(nn.Module):
    """Linear layers that cannot multiply in 8 bits, one that does, and weights that are no experts."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(128, 128)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(128, 256))
        self.own = nn.Linear(128, 128)
        self.own.forward = lambda x: 2 * functional.linear(x, self.own.weight)
        self.router = nn.Sequential(nn.Linear(128, 128))
        self.bilinear, self.turned = nn.Bilinear(4, 4, 4), nn.ConvTranspose1d(4, 4, 3)
        self.positions, self.token = nn.Parameter(torch.zeros(1, 9, 8)), nn.Parameter(torch.zeros(1, 1, 8))


def test_reasons_name_all_linear_layers_and_nothing_else():
    changed = Fp8Layers(Parts(), Fp8Config())
    assert changed.left_out == {
        "normed": "weight that is computed from others",
        "own": "a forward of its own, which may compute otherwise",
        "router.0": "router",
    }
    assert changed.share == pytest.approx(1 / 5)


@pytest.mark.parametrize("names", ["", ["up", ""]])
def test_an_empty_name_to_skip_is_refused(names):
    with pytest.raises(ValueError, match="fp8.skip_modules names '', which is no module"):
        initialize_engine(Perceptron, 0, make_config("bf16", fp8={"skip_modules": names}))


@pytest.mark.parametrize("weights", [["gate_up_proj"], ["gate_up_proj", "down_proj"]])
def test_experts_with_adapters_multiply_in_16_bits(weights):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    targets = [f"mlp.experts.{name}" for name in weights]
    model = get_peft_model(mixture(), LoraConfig(r=8, target_modules=["q_proj"], target_parameters=targets))
    changed = Fp8Layers(model, Fp8Config())
    adapted = "experts" + ".base_layer" * len(weights)
    reasons = [text for name, text in changed.left_out.items() if name.endswith(adapted)]
    assert changed.num_experts == 0 and reasons == ["adapter"] * 2
    changed.restore()


def test_trials_of_a_gpu_do_not_depend_on_the_default_device():
    host = torch.device("cpu")
    with torch.device("meta"):
        assert support._difference(host, Fp8Recipe.ROWWISE) == 0
        assert all(value.device == host for value in fp8_experts.trial(host))
