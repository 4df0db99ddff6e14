import random
import types

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

from patrickstar.config import MatrixMode, parse_config
from patrickstar.parallel.proof import prove_rewrites
from patrickstar.runtime import initialize_engine
from patrickstar.sequence import fused_loss
from patrickstar.sequence.survey import Survey
from patrickstar.tensor2d.low_rank import Narrow2D
from tests.bits import assert_same_bits
from tests.text_models import build

SHARED = {"sequence_parallel": {"size": 2}}
MESH = {"tensor_parallel": {"rows": 1, "columns": 2}}
TILES = {"activations": {"tile_tokens": 4096}}
FUSED = {"activations": {"loss": "fused"}}
BOTH = {"activations": {"loss": "fused", "tile_tokens": 4096}}


def prove(model, options, mode=MatrixMode.TWO):
    return prove_rewrites(model, parse_config({"optimizer": {"type": "SGD"}, **options}), mode)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("StableLmForCausalLM", SHARED),
        ("StableLmForCausalLM", SHARED | BOTH),
        ("RobertaForMaskedLM", {"sequence_parallel": {"size": 3, "mode": "ring"}}),
        ("BartForCausalLM", {"sequence_parallel": {"size": 8, "mode": "hybrid", "ulysses_size": 4}}),
        ("LlamaForCausalLM", {"sequence_parallel": {"size": 4}, "tensor_parallel": {"rows": 2, "columns": 1}}),
        ("LlamaForCausalLM", MESH | TILES),
        ("BertForMaskedLM", MESH),
        ("GPT2LMHeadModel", {"tensor_parallel": {"rows": 2, "columns": 2}}),
        ("LlamaForCausalLM", BOTH),
    ],
)
def test_what_is_right_passes(name, options):
    survey = prove(build(name), options)
    assert bool(survey.attending) == ("sequence_parallel" in options)


def test_models_without_a_loss_and_on_the_meta_device():
    with torch.device("meta"):
        model = build("LlamaForCausalLM")
    prove(model, SHARED)
    prove(build("LlamaForCausalLM").model, SHARED | TILES)
    prove(build("LlamaForCausalLM").model, MESH)
    prove(build("LlamaForCausalLM").bfloat16(), MESH, MatrixMode.ONE)


def with_lora(model):
    return get_peft_model(model, LoraConfig(target_modules="all-linear"))


def test_adapters_that_change_nothing_yet():
    model = with_lora(build("LlamaForCausalLM"))
    for mode in (MatrixMode.TWO, MatrixMode.ONE):
        prove(model, MESH, mode)
    prove(with_lora(build("GPT2LMHeadModel")), {"tensor_parallel": {"rows": 2, "columns": 2}})
    assert not any(param.any() for name, param in model.named_parameters() if "lora_B" in name)


def test_adapters_that_lose_a_gradient_behind_what_is_zero(monkeypatch):
    right = Narrow2D.forward
    monkeypatch.setattr(Narrow2D, "forward", lambda self, hidden: right(self, hidden.detach()))
    for mode in (MatrixMode.TWO, MatrixMode.ONE):
        with pytest.raises(ValueError, match="gradients differ: .*lora_"):
            prove(with_lora(build("LlamaForCausalLM")), MESH, mode)


class LocalAttention(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states, **_):
        heads = (part(hidden_states).unflatten(-1, (-1, 8)).transpose(1, 2) for part in self.projections())
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.inner.o_proj(out.transpose(1, 2).flatten(2)), None

    def projections(self):
        return self.inner.q_proj, self.inner.k_proj, self.inner.v_proj


def with_local_attention():
    model = build("LlamaForCausalLM")
    model.model.layers[1].self_attn = LocalAttention(model.model.layers[1].self_attn)
    return model


def with_neighbours(place):
    model = build("LlamaForCausalLM")
    add_neighbours(model.get_submodule(place))
    return model


def add_neighbours(module):
    def forward(self, hidden):
        return type(self).forward(self, hidden) + hidden.roll(1, dims=1)

    module.forward = types.MethodType(forward, module)


def with_another_mlp(change):
    model = build("LlamaForCausalLM")
    mlp = model.model.layers[0].mlp
    mlp.forward = types.MethodType(lambda self, x: change(type(self).forward(self, x)), mlp)
    return model


WRONG = {
    "a layer attends alone": (with_local_attention, SHARED, r"model.layers.1.self_attn \(LocalAttention\) was not"),
    "tokens meet outside": (lambda: with_neighbours("model.norm"), SHARED, "with sequences that ranks share: the loss"),
    "tokens meet in tiles": (
        lambda: with_neighbours("model.layers.0.mlp"),
        TILES,
        r"layers.0.mlp \(LlamaMLP\) computes something",
    ),
    "one of two": (lambda: with_neighbours("model.layers.0.mlp"), BOTH, "with modules computed in tiles: "),
    "features meet": (
        lambda: with_another_mlp(lambda out: out.cumsum(-1)),
        MESH,
        "matrices sharded over ranks: the loss .*gradients differ",
    ),
    "a mask of its own": (lambda: build("DogeForCausalLM"), SHARED, "DogeAttention computes with its attention mask"),
    "what cannot be called": (lambda: build("GitForCausalLM"), SHARED, "GitForCausalLM could not be called"),
    "trigrams": (lambda: build("MobileBertForMaskedLM"), SHARED, "MobileBertForMaskedLM computes something else with"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_what_is_wrong_is_refused_by_name(case):
    make, options, expected = WRONG[case]
    with pytest.raises(ValueError, match=expected):
        prove(make(), options)


def test_code_around_sharded_layers_is_kept():
    prove(with_another_mlp(lambda out: 2 * out.relu()), MESH)


def test_a_loss_of_another_value_is_named(monkeypatch):
    right = fused_loss.linear_cross_entropy
    monkeypatch.setattr(fused_loss, "linear_cross_entropy", lambda *args, **kwargs: 1.001 * right(*args, **kwargs))
    with pytest.raises(ValueError, match=r"with the fused loss: the loss .* Leave activations.loss out"):
        prove(build("LlamaForCausalLM"), BOTH)


def test_a_gradient_that_is_lost_is_seen(monkeypatch):
    right = fused_loss.linear_cross_entropy

    def without(hidden, weight, *args, **kwargs):
        return right(hidden, weight.detach(), *args, **kwargs)

    monkeypatch.setattr(fused_loss, "linear_cross_entropy", without)
    with pytest.raises(ValueError, match="gradients differ: lm_head.weight by 1 of its norm"):
        prove(build("LlamaForCausalLM"), FUSED)


def test_everything_is_as_it_was():
    model = build("StableLmForCausalLM").eval()
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    norm = model.model.norm
    norm.forward = lambda hidden: F.layer_norm(hidden, norm.weight.shape, norm.weight)  # copies use this one's weight
    values = {name: value.clone() for name, value in [*model.state_dict().items(), *model.named_buffers()]}
    versions = {name: param._version for name, param in model.named_parameters()}
    described = model.config.to_dict()
    attention = model.config._attn_implementation
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    prove(model, SHARED | BOTH)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert_same_bits(dict([*model.state_dict().items(), *model.named_buffers()]), values)
    assert {name: param._version for name, param in model.named_parameters()} == versions
    assert [name for name, param in model.named_parameters() if param.grad is not None] == ["lm_head.weight"]
    assert (model.lm_head.weight.grad == 1).all()
    assert not model.training and model.config._attn_implementation == attention
    assert model.config.to_dict() == described and "forward" not in vars(model.model.layers[0].mlp)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))})
                                    for _ in range(2))  # fmt: skip

    def forward(self, hidden, of_nobody_else):
        for layer in self.layers:
            hidden = hidden + layer["mlp"](hidden)
        return hidden


def test_tiles_of_a_module_that_nobody_knows_how_to_call():
    assert prove(Plain(), TILES) == Survey()
    module = Plain()
    add_neighbours(module.layers[0]["mlp"])
    with pytest.raises(ValueError, match=r"layers.0.mlp \(Sequential\) computes something else in tiles"):
        prove(module, TILES)


def test_an_engine_is_not_opened_but_where_the_key_says_so():
    model = with_neighbours("model.layers.0.mlp")
    config = {"optimizer": {"type": "SGD"}, "activations": {"tile_tokens": 4}}
    with pytest.raises(ValueError, match='LlamaMLP. computes something else .*"prove_rewrites" to false'):
        initialize_engine(model, 0, config)
    assert type(model.lm_head.weight) is nn.Parameter  # an ordinary module still
    engine, _ = initialize_engine(model, 0, {**config, "prove_rewrites": False})
    engine.close()
