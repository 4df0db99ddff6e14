import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from patrickstar.module.materialize import DeferredInit, attach_values
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.training import make_config

GPT2 = GPT2Config(vocab_size=512, n_positions=32, n_embd=64, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
LLAMA = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


def on_meta(build):
    def build_on_meta():
        with torch.device("meta"):
            return build()

    return build_on_meta


@pytest.mark.parametrize(
    ("build", "tokens"), [(lambda: GPT2LMHeadModel(GPT2), 512), (lambda: LlamaForCausalLM(LLAMA), 512)]
)
def test_hugging_face_models_get_their_own_initialisation(build, tokens):
    plain = build()
    torch.manual_seed(0)
    with initialize_engine(on_meta(build), 0, make_config("fp32"))[0] as engine:
        values = engine.state_dict()
        assert values.keys() == plain.state_dict().keys()
        for name, expected in plain.state_dict().items():
            ours = values[name].float()
            assert ours.shape == expected.shape
            spread = expected.float().std(unbiased=False).item()
            assert ours.std(unbiased=False).item() == pytest.approx(spread, rel=0.1, abs=1e-7), name
            assert ours.mean().item() == pytest.approx(expected.float().mean().item(), abs=5e-3), name
        # The buffers too: trained on, the model learns as one built on the CPU with the same values.
        plain.load_state_dict(values)
        data = torch.randint(0, tokens, (2, 16))
        engine.eval(), plain.eval()
        loss = engine(input_ids=data, labels=data).loss
        torch.testing.assert_close(loss, plain(input_ids=data, labels=data).loss, rtol=1e-5, atol=1e-5)
    assert {param.device.type for param in engine.module.parameters()} == {"cpu"}


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.norm = nn.BatchNorm1d(16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight
        self.head2 = nn.Linear(16, 4)
        self.head2.requires_grad_(False)

    def forward(self, tokens):
        hidden = self.norm(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)
        hidden = self.attention(self.lstm(hidden)[0])
        return self.head(hidden).square().mean() + self.head2(hidden).square().mean()


@pytest.mark.parametrize("unit_bytes", [1, 2**30])
def test_modules_of_pytorch(unit_bytes, monkeypatch):
    monkeypatch.setattr("patrickstar.module.adoption._UNIT_BYTES", unit_bytes)
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(on_meta(Everything), 0, make_config("fp32", default_chunk_size=1024))
    with engine:
        module = engine.module
        assert module.head.weight is module.embedding.weight
        assert not module.head2.weight.requires_grad
        values = {name: value.clone() for name, value in engine.state_dict().items()}
        assert torch.equal(values["norm.running_var"], torch.ones(16))
        assert torch.equal(values["attention.norm1.weight"], torch.ones(16))
        bound = 1 / 4
        assert 0.8 * bound < values["lstm.weight_hh_l0"].abs().max() <= bound
        plain = Everything()
        plain.load_state_dict(values)
        tokens = torch.randint(0, 32, (4, 8))
        engine.eval(), plain.eval()
        torch.testing.assert_close(engine(tokens), plain(tokens))
        engine.train()
        engine.backward(engine(tokens))
        optimizer.step()
        assert not torch.equal(engine.state_dict()["head.weight"], values["head.weight"])


def test_the_seed_decides():
    def values(seed):
        torch.manual_seed(seed)
        with initialize_engine(on_meta(lambda: nn.Linear(64, 64)), 0, make_config("fp32"))[0] as engine:
            return engine.state_dict()["weight"].clone()

    assert_same_bits(values(1), values(1))
    assert not torch.equal(values(1), values(2))


class NoInitialiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))


class NoBufferInitialiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", torch.ones(2))


@pytest.mark.parametrize(
    ("build", "name"), [(NoInitialiser, "scale is on the meta device"), (NoBufferInitialiser, "table of NoBufferInit")]
)
def test_what_nobody_initialises_is_refused(build, name):
    with pytest.raises(ValueError, match=name):
        initialize_engine(on_meta(build), 0, make_config("fp32"))
    with initialize_engine(lambda: nn.Linear(2, 2), 0, make_config("fp32"))[0]:
        pass  # nothing was left open


def test_a_module_partly_on_meta():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, device="meta"))
    first = model[0].weight.detach().clone()
    with initialize_engine(lambda: model, 0, make_config("fp32"))[0] as engine:
        values = engine.state_dict()
        assert_same_bits(values["0.weight"], first)
        assert values["1.weight"].abs().max() > 0


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain, self.rewritten = nn.Linear(4, 4, bias=False), Rewriting()


class Rewriting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 4, bias=False), nn.Parameter(torch.empty(4))

    def reset_parameters(self):
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.inner.weight)


class KnownValues(dict):
    def read(self, name):
        return self[name]


def test_values_that_stay_in_host_memory_are_not_copied():
    model = on_meta(TwoLayers)()
    values = KnownValues({name: torch.randn(4, 4) for name in ("plain.weight", "rewritten.inner.weight")})
    before = {name: tensor.clone() for name, tensor in values.items()}
    attach_values(model, values)
    deferred = DeferredInit(model)
    wanted = {model.plain.weight, model.rewritten.inner.weight}
    for _ in deferred.units(torch.device("cpu"), 2**20, read_on_host=wanted):
        pass
    assert model.plain.weight.data_ptr() == values["plain.weight"].data_ptr()
    assert model.rewritten.inner.weight.data_ptr() != values["rewritten.inner.weight"].data_ptr()
    assert_same_bits({name: model.get_parameter(name).detach() for name in values}, before)
    assert_same_bits(dict(values), before)
