import copy
import os

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, noop_context_fn
from torch.utils.flop_counter import FlopCounterMode

from patrickstar.activations.selective_recomputation import keep_products
from patrickstar.choices import Fp8Recipe
from patrickstar.config import Fp8Config
from patrickstar.fp8 import casting, support
from patrickstar.module import fp8_layers
from patrickstar.module.fp8_layers import Fp8Layers, check_fp8
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.training import make_config, make_host_config

HIDDEN, TOKENS = 128, 96


@pytest.fixture(autouse=True)
def _small_layers(monkeypatch):
    monkeypatch.setattr(fp8_layers, "LEAST_NUMEL", 2**14)


def llama(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": HIDDEN, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changes}))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_embd=HIDDEN, n_layer=2, n_head=4, vocab_size=256, resid_pdrop=0.1, use_cache=False)
    )


def mixture():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": HIDDEN, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 256, "use_cache": False}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=128, num_experts_per_tok=4))


def tokens(step, rank=0):
    generator = torch.Generator().manual_seed(100 * rank + step)
    ids = torch.randint(0, 256, (2, TOKENS), generator=generator)
    return {"input_ids": ids, "labels": ids}


def train(build, recipe, steps=3, checkpointing=False, rank=0, make=make_config, **config):
    torch.manual_seed(0)
    model = build()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    section = {} if recipe is None else {"fp8": {"recipe": recipe.value}}
    engine, optimizer = initialize_engine(lambda: model, rank, make("bf16", gradient_clipping=1.0, **section, **config))
    engine.train()
    torch.manual_seed(1)
    found = []
    for step in range(steps):
        loss = engine(**tokens(step, rank)).loss
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    report = engine.report()
    engine.close()
    return found, state, report


def fake_quantized(x, recipe, dim, dtype=torch.float8_e4m3fn):
    """An independent form of the recipes: values that codes stand for, with blocks along ``dim``."""
    largest, rows, columns = x.float(), *x.shape
    if recipe is Fp8Recipe.BLOCK:
        shape = (rows // 128, 128, columns) if dim == 0 else (rows, columns // 128, 128)
        parts = x.float().reshape(shape)
        largest = parts.abs().amax(dim + (dim == 1), keepdim=True).expand(shape).reshape(rows, columns)
    else:
        largest = x.float().abs().amax(dim if recipe is Fp8Recipe.ROWWISE else (0, 1), keepdim=True)
    scale = 2.0 ** torch.ceil(torch.log2(largest.clamp(min=1e-30) / torch.finfo(dtype).max))
    return (x.float() / scale).to(dtype).float() * scale


def square_blocks(w):
    parts = w.float().reshape(w.size(0) // 128, 128, w.size(1) // 128, 128)
    largest = parts.abs().amax((1, 3), keepdim=True).expand(parts.shape).reshape(w.shape)
    scale = 2.0 ** torch.ceil(torch.log2(largest / 448))
    return (w.float() / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("recipe", Fp8Recipe)
@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
def test_a_layer_computes_the_products_of_the_recipe(recipe, kind):
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    layer = (nn.Linear(256, 384) if kind == "Linear" else Conv1D(384, 256)).bfloat16()
    nn.init.normal_(layer.bias)
    changed = Fp8Layers(nn.Sequential(layer), Fp8Config(recipe=recipe))
    x, direction = torch.randn(2, 128, 256).bfloat16().requires_grad_(), torch.randn(2, 128, 384).bfloat16()
    out = layer(x)
    grads = torch.autograd.grad(out, [x, layer.weight, layer.bias], direction)
    changed.restore()
    w = layer.weight if kind == "Linear" else layer.weight.t()
    rows, g = x.detach().reshape(-1, 256), direction.reshape(-1, 384)
    of_gradients = torch.float8_e5m2 if recipe is Fp8Recipe.TENSORWISE else torch.float8_e4m3fn
    g_by_rows, g_by_columns = (fake_quantized(g, recipe, dim, of_gradients) for dim in (1, 0))
    weights = square_blocks if recipe is Fp8Recipe.BLOCK else lambda matrix, dim=1: fake_quantized(matrix, recipe, dim)
    by_rows = weights(w)
    by_columns = weights(w) if recipe is Fp8Recipe.BLOCK else fake_quantized(w, recipe, 0)
    assert out.dtype is torch.bfloat16 and out.shape == (2, 128, 384)
    wanted = [
        functional.linear(fake_quantized(rows, recipe, 1), by_rows).bfloat16() + layer.bias,
        g_by_rows @ by_columns,
        g_by_columns.t() @ fake_quantized(rows, recipe, 0),
    ]
    if kind == "Conv1D":
        wanted[2] = wanted[2].t()
    for found, right in zip((out.reshape(-1, 384), grads[0].reshape(-1, 256), grads[1]), wanted, strict=True):
        torch.testing.assert_close(found.float(), right.float(), rtol=2**-7, atol=1e-3)
    assert grads[2].equal(direction.reshape(-1, 384).sum(0))


@pytest.mark.parametrize("recipe", Fp8Recipe)
def test_compiled_layers_have_the_bits_of_eager_ones(recipe):
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(256, 384) for _ in range(2)).bfloat16()
    changed = Fp8Layers(layers, Fp8Config(recipe=recipe))
    x, results = torch.randn(200, 256).bfloat16().requires_grad_(), []

    def run(x):
        return layers[0](x) * layers[1](x)

    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        out = function(x)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), [x, *layers.parameters()])])
    changed.restore()
    assert all(eager.equal(compiled) for eager, compiled in zip(*results, strict=True))


def test_dtypes_and_few_rows_are_computed_as_before():
    layer = nn.Linear(128, 128).bfloat16()
    few, many = torch.randn(5, 128).bfloat16(), torch.randn(200, 128).bfloat16()
    expected = layer(few)
    changed = Fp8Layers(nn.Sequential(layer), Fp8Config())
    assert layer(few).equal(expected)
    with torch.autocast("cpu", torch.float16):
        assert layer(many.float()).dtype is torch.float16
    changed.restore()
    assert type(layer) is nn.Linear and "fp8_recipe" not in vars(layer)


def test_an_input_that_several_layers_share_is_cast_once(monkeypatch):
    from patrickstar.fp8 import linear

    casts = []
    monkeypatch.setattr(linear, "cast", lambda x, *rest, real=linear.cast: casts.append(x.shape) or real(x, *rest))
    layers = nn.ModuleList(nn.Linear(128, 256, bias=False) for _ in range(3)).bfloat16()
    changed = Fp8Layers(layers, Fp8Config())
    x = torch.randn(128, 128).bfloat16()
    first = [layer(x) for layer in layers]
    assert casts.count(x.shape) == 1
    x.mul_(2)  # another value
    assert layers[0](x).equal(first[0] * 2) and casts.count(x.shape) == 2
    with torch.inference_mode():
        assert layers[1](x + 0).equal(first[1] * 2)
    del x
    assert linear._last.entry is None  # the codes' memory is free with the input's
    changed.restore()


def test_flops_are_those_of_16_bits():
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).bfloat16()
    found = []
    for section in (None, Fp8Config()):
        layers = section and Fp8Layers(model, section)
        with FlopCounterMode(display=False) as counter:
            model(torch.randn(256, 128, dtype=torch.bfloat16)).sum().backward()
        found.append(counter.get_total_flops())
        if layers:
            layers.restore()
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("recipe", Fp8Recipe)
def test_a_recomputation_that_keeps_products_casts_no_weight(recipe, monkeypatch):
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).bfloat16()
    layers = Fp8Layers(model, Fp8Config(recipe=recipe))
    x = torch.randn(256, 128, dtype=torch.bfloat16, requires_grad=True)
    cast, numels = casting.cast_on_host, []

    def counted(matrix, *rest):
        numels.append(matrix.numel())
        return cast(matrix, *rest)

    monkeypatch.setattr(casting, "cast_on_host", counted)
    found = []
    for contexts in (None, keep_products):
        numels.clear()
        out = model(x) if contexts is None else checkpoint(model, x, use_reentrant=False, context_fn=contexts)
        grads = torch.autograd.grad(out.float().square().sum(), [x, *model.parameters()])
        found.append((list(numels), [out.detach(), *grads]))
    (without, expected), (with_kept, kept) = found
    assert all(a.equal(b) for a, b in zip(kept, expected, strict=True))
    assert len(with_kept) - len(without) == 4  # both sides of two inputs
    layers.restore()


@pytest.mark.parametrize("shape", [(256, 128), (2, 100, 128)])
def test_results_may_be_written_in_place(shape):
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)).bfloat16()
    layers = Fp8Layers(model, Fp8Config())
    x, found = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True), []
    for in_place in (False, True):
        model[1].inplace = in_place
        for contexts in (noop_context_fn, keep_products):
            out = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
            assert not out._is_view()
            grads = torch.autograd.grad(out.float().square().sum(), [x, *model.parameters()])
            found.append([out.detach(), *grads])
    assert all(a.equal(b) for others in found[1:] for a, b in zip(others, found[0], strict=True))
    layers.restore()


def test_counters_beside_kept_products_see_operators():
    model = nn.Sequential(nn.Linear(128, 256, bias=False)).bfloat16()
    layers = Fp8Layers(model, Fp8Config())
    x = torch.randn(256, 128, dtype=torch.bfloat16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        checkpoint(model, x, use_reentrant=False, context_fn=keep_products)
    assert counter.get_total_flops() == 2 * 256 * 128 * 256
    layers.restore()


@pytest.mark.parametrize(
    ("build", "budget", "recipe"),
    [
        *((llama, "4.5MiB", recipe) for recipe in Fp8Recipe),
        (gpt2, "7MiB", Fp8Recipe.ROWWISE),
        (mixture, "25MiB", Fp8Recipe.BLOCK),
    ],
)
def test_bits_do_not_depend_on_budgets_recomputation_and_sides(build, budget, recipe):
    losses, state, report = train(build, recipe)
    plain, _, _ = train(build, None)
    assert losses != plain
    assert losses == pytest.approx(plain, rel=0.01)
    for make, changes in (
        (make_config, {"device_memory": budget}),
        (make_config, {"checkpointing": True, "device_memory": budget}),
        (make_host_config, {}),
    ):
        others, other_state, other_report = train(build, recipe, make=make, **changes)
        assert others == losses
        assert_same_bits(other_state, state)
    assert report["num_updates_host"] == other_report["num_updates_device"] == 0  # with ample memory: each side alone


def on_rank():
    fp8_layers.LEAST_NUMEL = 2**14
    rank, memory = int(os.environ["RANK"]), [{}, {"device_memory": "4MiB"}]
    return [[train(llama, recipe, rank=rank, **changes)[:2] for changes in memory] for recipe in Fp8Recipe]


def test_two_ranks_have_equal_bits_within_budgets():
    for recipes in run_ranks(2, on_rank):
        for whole, within in recipes:
            assert whole[0] == within[0]
            assert all(value.equal(within[1][name]) for name, value in whole[1].items())


def resumed(build, recipe, split, steps, folder, **config):
    """Losses and values of a run that is saved, closed and loaded after ``split`` steps."""
    found, section = [], {"recipe": recipe.value}
    for begin, end in ((0, split), (split, steps)):
        torch.manual_seed(0)
        engine, optimizer = initialize_engine(
            build, 0, make_config("bf16", gradient_clipping=1.0, fp8=section, **config)
        )
        if begin:
            engine.load_checkpoint(folder)
        for step in range(begin, end):
            loss = engine(**tokens(step)).loss
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        engine.save_checkpoint(folder, "tag")
        last = {name: value.clone() for name, value in engine.state_dict().items()}
        engine.close()
    return found, last


@pytest.mark.parametrize("recipe", Fp8Recipe)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(recipe, tmp_path):
    losses, state, _ = train(llama, recipe, steps=4)
    found, last = resumed(llama, recipe, 2, 4, tmp_path)
    assert found == losses
    assert all(last[name].equal(state[name]) for name in state)


def test_frozen_and_quantised_weights_have_adapters_of_bfloat16():
    from peft import LoraConfig, get_peft_model

    def build():
        return get_peft_model(llama(), LoraConfig(r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False))

    losses, _, report = train(build, Fp8Recipe.ROWWISE, quantization={"type": "nf4"})
    within, _, _ = train(build, Fp8Recipe.ROWWISE, quantization={"type": "nf4"}, device_memory="4MiB")
    assert losses == within and report["fp8_layers"] == 14
    assert {"adapter", "output embedding"} == set(report["fp8_left_out"].values())


def test_report_and_start_line_name_layers_and_reasons(caplog):
    caplog.set_level("INFO", "patrickstar")
    _, _, report = train(mixture, Fp8Recipe.BLOCK, steps=1)
    left_out = report["fp8_left_out"]
    assert report["fp8_layers"] == 8 and left_out["lm_head"] == "output embedding"
    assert 'with the recipe "rowwise" alone' in left_out["model.layers.0.mlp.experts"]
    assert sum("router" in reason for reason in left_out.values()) in (0, 2)
    in_8_bits, experts, head = 2 * 4 * 128 * 128, 2 * 3 * 64 * 128 * 4, 128 * 256
    routers = sum(128 * 128 for name in left_out if name.endswith("gate"))
    assert report["fp8_share"] == pytest.approx(in_8_bits / (in_8_bits + experts + head + routers))
    assert "FP8 (block: 8 linear layers with" in caplog.text and "lm_head (output embedding)" in caplog.text


def test_closing_leaves_the_users_model():
    model = llama()
    classes = {name: type(module) for name, module in model.named_modules()}
    engine, _ = initialize_engine(lambda: model, 0, make_config("bf16", fp8={"recipe": "block"}))
    engine.close()
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert copy.deepcopy(model).lm_head.weight.shape == (256, HIDDEN)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"fp8": {}}, "fp8 is enabled without bf16"),
        ({"fp8": {"recipe": "mx"}, "bf16": {}}, '"block", "rowwise" or "tensorwise"'),
        ({"fp8": {"skip_modules": ["nothing"]}, "bf16": {}}, "fp8.skip_modules names 'nothing'"),
        ({"fp8": {"skip_modules": ["layers"]}, "bf16": {}}, "no linear layer that can multiply in 8 bits"),
    ],
)
def test_refusals(config, text):
    with pytest.raises(ValueError, match=text):
        initialize_engine(llama, 0, config)


@pytest.mark.parametrize("product", ["fails", "differs"])
def test_products_that_fail_or_differ_are_refused_with_other_recipes(monkeypatch, product):
    def difference(device, recipe):
        if product == "fails":
            raise RuntimeError("no such kernel\nmore lines")
        return 0.25

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    monkeypatch.setattr(support, "_difference", difference)
    match = {
        "fails": r"does not compute on NVIDIA L4 \(no such kernel\)",
        "differs": "on NVIDIA L4 .* differ .* by 0.25",
    }
    with pytest.raises(ValueError, match=f'fp8.recipe is "block".*{match[product]}.*give "rowwise" or "tensorwise"'):
        check_fp8(llama(), Fp8Config(recipe=Fp8Recipe.BLOCK), torch.device("cuda"))


def test_gpus_that_cannot_are_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ValueError, match=r"NVIDIA A100 has compute capability 8.0; .* need 8.9 or higher"):
        check_fp8(llama(), Fp8Config(), torch.device("cuda"))
