import copy
import functools
import pickle
import types

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from patrickstar.module.specimen import copy_specimen, take_specimen
from patrickstar.module.tiled_modules import tile_modules
from tests.bits import assert_same_bits

SMALL = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def build(kind, **options):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **options})).double().train()


def gpt2():
    small = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **small)).double().train()


def mixtral():
    return build("mixtral", num_local_experts=2, num_key_value_heads=2)


def t5():
    options = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    return T5ForConditionalGeneration(T5Config(feed_forward_proj="gated-gelu", **options))


LAYER = ["mlp", "input_layernorm", "post_attention_layernorm"]


def of_layers(prefix, layer, more=()):
    return [f"{prefix}.{index}.{name}" for index in range(2) for name in layer] + list(more)


FOUND = {
    "llama": (lambda: build("llama"), of_layers("model.layers", LAYER, ["model.norm"])),
    "qwen3": (
        lambda: build("qwen3", num_key_value_heads=2, head_dim=8),
        of_layers("model.layers", LAYER, ["model.norm"]),
    ),
    "gemma2": (
        lambda: build("gemma2", num_key_value_heads=2, head_dim=8),
        of_layers(
            "model.layers", [*LAYER, "pre_feedforward_layernorm", "post_feedforward_layernorm"], ["model.norm"]
        ),
    ),
    "gpt2": (gpt2, of_layers("transformer.h", ["mlp"])),
    "experts are left alone": (mixtral, of_layers("model.layers", LAYER[1:], ["model.norm"])),
    "t5": (
        t5,
        [
            "encoder.block.0.layer.0.layer_norm", "encoder.block.0.layer.1.DenseReluDense",
            "encoder.block.0.layer.1.layer_norm", "encoder.final_layer_norm",
            "decoder.block.0.layer.0.layer_norm", "decoder.block.0.layer.1.layer_norm",
            "decoder.block.0.layer.2.DenseReluDense", "decoder.block.0.layer.2.layer_norm", "decoder.final_layer_norm",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found(name):
    make, expected = FOUND[name]
    assert sorted(tile_modules(make(), 8).names) == sorted(expected)


def step(model):
    model.zero_grad()
    torch.manual_seed(1)
    tokens = torch.randint(1, 64, (2, 13))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    gradients = {name: param.grad for name, param in model.named_parameters() if param.requires_grad}
    return loss.detach(), gradients


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)  # norms compute in float32


@pytest.mark.parametrize("make", [lambda: build("llama"), lambda: build("gemma2", num_key_value_heads=2, head_dim=8)])
def test_models_are_the_same_in_tiles(make):
    plain, model = make(), make()
    expected = step(plain)
    tiled = tile_modules(model, 5)
    assert_same(step(model), expected)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        mlp = other.model.layers[0].mlp
        assert_same(step(other), expected)
        assert mlp.forward._module is mlp
    assert list(model.state_dict()) == list(plain.state_dict())
    tiled.restore()
    assert not any("forward" in vars(module) for module in model.modules())
    assert_same(step(model), expected)


class _SiluMul(torch.autograd.Function):
    """Like Liger-Kernel's: backward overwrites saved tensors."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        share = torch.sigmoid(gate)
        slope = grad * up * share * (1 + gate * (1 - share))
        up.copy_(grad * gate * share)
        gate.copy_(slope)
        return gate, up


class LigerSwiGLUMLP(LlamaMLP):
    """Replaces Liger-Kernel's class, whose kernels need a GPU: the same attributes and patching."""

    def forward(self, x):
        return self.down_proj(_SiluMul.apply(self.gate_proj(x), self.up_proj(x)))


class LigerRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def patched(way, monkeypatch):
    if way == "classes":
        monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP", LigerSwiGLUMLP)
        monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaRMSNorm", LigerRMSNorm)
        return build("llama")
    model = build("llama")
    for module in model.modules():
        for kind in (LigerSwiGLUMLP, LigerRMSNorm):
            if type(module) is kind.__base__:
                module.forward = types.MethodType(kind.forward, module)
                module._get_name = types.MethodType(lambda self, kind=kind: kind.__name__, module)
    return model


@pytest.mark.parametrize("way", ["classes", "instances"])
def test_what_liger_kernel_has_patched(way, monkeypatch):
    loss, gradients = step(build("llama"))
    model = patched(way, monkeypatch)
    before = {name: vars(module).get("forward") for name, module in model.named_modules()}
    tiled = tile_modules(model, 5)
    assert sorted(tiled.names) == sorted(FOUND["llama"][1])
    found_loss, found = step(model)
    torch.testing.assert_close(found_loss, loss, rtol=1e-6, atol=0)  # LlamaRMSNorm computes in float32
    torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-7)
    tiled.restore()
    assert {name: vars(module).get("forward") for name, module in model.named_modules()} == before


def test_a_forward_that_was_put_around_later_stays():
    model = build("llama")
    expected = step(model)
    tiled = tile_modules(model, 5)
    mlp, calls = model.model.layers[0].mlp, []
    inner = mlp.forward
    mlp.forward = lambda x: calls.append(x.shape) or inner(x)
    assert_same(step(model), expected)
    tiled.restore()
    assert_same(step(model), expected)
    assert len(calls) == 2  # once for each step: the last one not in tiles


def adapted(dropout):
    torch.manual_seed(0)
    model = build("llama")
    config = LoraConfig(r=2, lora_dropout=dropout, target_modules=["q_proj", "gate_proj", "down_proj"])
    torch.manual_seed(2)
    model = get_peft_model(model, config)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param)
    return model.double()


def test_adapters_within():
    expected = step(adapted(0.0))
    model = adapted(0.0)
    assert len(tile_modules(model, 5).names) == 7
    assert_same(step(model), expected)
    model = adapted(0.5)  # drops the same when computed again: gradients are those of what was computed
    tile_modules(model, 5)
    gradients = step(model)[1]
    slope = sum(gradient.square().sum().item() for gradient in gradients.values())
    losses = []
    for distance in (0.05, -0.1):
        with torch.no_grad():
            for name, param in model.named_parameters():
                if param.requires_grad:
                    param += distance * gradients[name]
        losses.append(step(model)[0].item())
    assert (losses[0] - losses[1]) / 0.1 == pytest.approx(slope, rel=1e-2)


class Batchwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)


def test_what_cannot_be_tiled_is_refused_by_name():
    model = mixtral()
    layer = "model.layers.0"
    for name, message in (
        (f"{layer}.self_attn", r"\(MixtralAttention\) cannot be computed in tiles: its forward takes more than"),
        (f"{layer}.mlp", r"\(MixtralSparseMoeBlock\) cannot be computed in tiles: within it .* nothing says that"),
        ("model.rotary_emb", "cannot be computed in tiles: it has buffers"),
        ("model.nowhere", "MixtralForCausalLM has no module 'model.nowhere'"),
    ):
        with pytest.raises(ValueError, match=message):
            tile_modules(model, 4, [f"{layer}.input_layernorm", name])
    with pytest.raises(ValueError, match="linear lies within mlp"):
        holder = nn.ModuleDict({"mlp": nn.Sequential()})
        holder["mlp"].add_module("linear", nn.Linear(4, 4))
        tile_modules(holder, 4, ["mlp", "mlp.linear"])
    with pytest.raises(ValueError, match="Batchwise has no layers with MLPs or norms"):
        tile_modules(Batchwise(), 4)
    with pytest.raises(ValueError, match="tile_tokens is 0; give at least 1"):
        tile_modules(model, 0)
    assert not any("forward" in vars(module) for module in model.modules())
    named = tile_modules(model, 4, ["lm_head", f"{layer}.self_attn.o_proj"])
    assert named.names == ["lm_head", f"{layer}.self_attn.o_proj"]
    with pytest.raises(
        ValueError, match=r"self_attn.o_proj of MixtralForCausalLM is computed in tiles already; restore\(\)"
    ):
        tile_modules(model, 4)


class Layer(nn.Module):
    def __init__(self, index, width=4, window=None):
        super().__init__()
        self.layer_idx = index
        self.window = window or 0
        self.linear = nn.Linear(4, width)
        self.drop = nn.Dropout(0.5)
        self.attention_dropout = 0.1

    def forward(self, x):
        return x + self.drop(self.linear(x))[..., :4]


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.config = type("Config", (), {})()
        self.config.num_hidden_layers, self.config.hidden_dropout = len(layers), 0.2
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(layers)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(9))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(1, dtype=torch.bfloat16))

    def forward(self, tokens):
        self.count += 1
        hidden = self.embed(tokens)
        for layer in self.layers[: self.config.num_hidden_layers]:
            hidden = layer(hidden)
        return self.head(hidden)


def test_memory_is_shared_and_nothing_is_changed():
    model = Model([Layer(i) for i in range(6)]).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    specimen = take_specimen(model)
    assert [layer.layer_idx for layer in specimen.layers] == [0, 1] and len(specimen.experts) == 9
    assert specimen.head.weight is specimen.embed.weight
    assert specimen.embed.weight.data_ptr() == model.embed.weight.data_ptr()
    other = copy_specimen(specimen)
    assert other.head.weight is other.embed.weight is not specimen.embed.weight
    assert other.layers[1].linear.weight.data_ptr() == model.layers[1].linear.weight.data_ptr()
    tokens = torch.arange(8)[None]
    assert torch.equal(specimen(tokens), other(tokens))  # no dropout, though they train
    specimen(tokens).sum().backward()
    assert len(model.layers) == 6 and not model.training and model.config.hidden_dropout == 0.2
    assert all(param.grad is None for param in model.parameters())
    assert model.layers[0].attention_dropout == 0.1 and model.layers[0].drop.p == 0.5
    assert_same_bits(model.state_dict(), before)


def test_layers_until_there_is_one_of_each_kind():
    kinds = {
        "one": ([Layer(i) for i in range(5)], 2),
        "another class inside": ([*(Layer(i) for i in range(3)), nn.Linear(4, 4), Layer(4)], 4),
        "another shape": ([Layer(0), Layer(1), Layer(2, width=6), Layer(3), Layer(4, width=6)], 3),
        "another number": ([Layer(i, window=5 if i % 3 == 2 else None) for i in range(9)], 3),
    }
    for name, (layers, expected) in kinds.items():
        assert len(take_specimen(Model(layers)).layers) == expected, name
    assert len(take_specimen(Model([Layer(i) for i in range(5)]), all_layers=True).layers) == 5


def test_matrices_of_zeros_get_values():
    model = Model([Layer(i) for i in range(2)])
    nn.init.zeros_(model.layers[1].linear.weight)
    nn.init.zeros_(model.layers[1].linear.bias)
    specimen = take_specimen(model)
    assert specimen.layers[1].linear.weight.std() > 0 and not specimen.layers[1].linear.bias.any()
    assert not model.layers[1].linear.weight.any()


def test_half_precision_and_the_meta_device_get_values_of_their_own():
    half = Model([Layer(i) for i in range(4)]).bfloat16()
    specimen = take_specimen(half)
    assert {value.dtype for value in specimen.state_dict().values()} == {torch.float32}
    assert torch.equal(specimen.embed.weight.bfloat16(), half.embed.weight)
    with torch.device("meta"):
        meta = Model([Layer(i) for i in range(4)])
    meta._buffers["count"] = torch.zeros(1)
    specimen = take_specimen(meta)
    assert all(param.isfinite().all() and param.std() > 0 for param in specimen.parameters())
    assert specimen.head.weight is specimen.embed.weight
    assert all(param.is_meta for param in meta.parameters())


def test_a_forward_that_was_assigned_computes_with_the_copy():
    """Also a forward that calls the class's through a closure, as TRL's does."""
    model = Model([Layer(0), Layer(1)])
    former = model.forward

    def forward(self, tokens, scale):
        return scale * former(tokens)

    model.forward = functools.partial(types.MethodType(forward, model), scale=2)
    tokens = torch.arange(8).view(2, 4)
    specimen = take_specimen(model)
    for copied in (specimen, copy_specimen(specimen)):
        called = []
        copied.layers[0].register_forward_hook(lambda *_, called=called: called.append("the copy"))
        copied(tokens)
        assert called == ["the copy"] and model.count == 0
