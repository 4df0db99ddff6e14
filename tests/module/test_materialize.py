import json
import logging
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import patrickstar
from patrickstar.checkpoint.export import INDEX_NAME
from patrickstar.integrations.weights import load_into
from patrickstar.module.materialize import DeferredInit, attach_values
from patrickstar.module.pretrained import SafetensorsFolder, weight_files
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.models import MODELS, VOCAB, token_batch
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


def saved(name, folder, **options):
    torch.manual_seed(3)
    model = MODELS[name].build()
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.parametrize(("name", "options"), [("gpt2", {}), ("llama", {"max_shard_size": "20kB"}), ("t5", {})])
def test_values_are_those_of_the_folder(tmp_path, name, options):
    model = saved(name, tmp_path, **options).eval()
    batch = token_batch(torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(**batch).logits
    loaded = patrickstar.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert all(param.is_meta for param in loaded.parameters())
    parameters = [{"params": list(loaded.parameters())}]
    engine, _ = initialize_engine(lambda: loaded, 0, {}, lambda _: parameters)
    with engine, torch.no_grad():
        state = engine.state_dict()
        assert_same_bits(dict(state), dict(model.state_dict()))
        torch.testing.assert_close(engine.module(**batch).logits, expected, rtol=0, atol=0)


def falcon_h1():
    from transformers import FalconH1Config, FalconH1ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    mamba = {"d_ssm": 32, "n_heads": 4, "d_head": 8, "n_groups": 1, "d_state": 8, "expand": 1, "chunk_size": 4}
    return FalconH1ForCausalLM(
        FalconH1Config(
            vocab_size=VOCAB,
            num_key_value_heads=1,
            pad_token_id=0,
            ssm_multipliers=[0.5, 0.6, 0.7, 0.8, 0.9],
            **sizes,
            **{f"mamba_{key}": value for key, value in mamba.items()},
        )
    )


def test_buffers_that_a_module_above_fills(tmp_path):
    torch.manual_seed(0)
    model = falcon_h1().eval()
    model.save_pretrained(tmp_path)
    tokens = token_batch(torch.Generator().manual_seed(1))["input_ids"]

    def on_meta():
        with torch.device("meta"):
            return falcon_h1()

    for build in (lambda: patrickstar.from_pretrained(tmp_path), on_meta):
        engine, _ = initialize_engine(build, 0, make_config())
        with engine:
            for found, layer in zip(engine.module.model.layers, model.model.layers, strict=True):
                assert_same_bits(found.mamba.mup_vector, layer.mamba.mup_vector)
            if build is not on_meta:
                with torch.no_grad():
                    torch.testing.assert_close(engine.module(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_a_body_gets_a_new_head(tmp_path, caplog):
    body = saved("gpt2", tmp_path).transformer
    body.save_pretrained(tmp_path / "body")
    with caplog.at_level(logging.WARNING, logger="patrickstar"):
        loaded = patrickstar.from_pretrained(
            tmp_path / "body", transformers.AutoModelForSequenceClassification, num_labels=3
        )
    assert "score.weight" in caplog.text
    assert "1 parameters" in caplog.text
    engine, _ = initialize_engine(lambda: loaded, 0, {})
    with engine:
        state = engine.state_dict()
        for key, value in body.state_dict().items():
            assert_same_bits(state[f"transformer.{key}"], value, key)
        assert state["score.weight"].shape == (3, 32)
        assert 0 < float(state["score.weight"].std()) < 0.1  # GPT-2's initialiser: 0.02


def test_dtypes(tmp_path):
    model = saved("gpt2", tmp_path).bfloat16()
    model.save_pretrained(tmp_path / "half")
    loaded = patrickstar.from_pretrained(tmp_path / "half")
    assert loaded.dtype == torch.bfloat16
    assert patrickstar.from_pretrained(tmp_path / "half", dtype=torch.float32).dtype == torch.float32
    engine, _ = initialize_engine(lambda: loaded, 0, {"bf16": {"enabled": True}})
    with engine:
        assert all(value.dtype == torch.bfloat16 for value in engine.module.state_dict().values())


def test_wrong_folders(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        patrickstar.from_pretrained(tmp_path)
    saved("gpt2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    with pytest.raises(ValueError, match=r"wte.weight has shape \(100, 32\)"):
        patrickstar.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="neither model.safetensors nor"):
        patrickstar.from_pretrained(tmp_path)


WRONG_INDEXES = {
    "a path upwards": ({"weight_map": {"a": "../{outside}"}}, "names the file '../"),
    "an absolute path": ({"weight_map": {"a": "{absolute}"}}, "names the file '/"),
    "a path downwards": ({"weight_map": {"a": "inside/model.safetensors"}}, "without a path"),
    "a path of Windows": ({"weight_map": {"a": "..\\model.safetensors"}}, "without a path"),
    "the folder": ({"weight_map": {"a": "."}}, "without a path"),
    "the folder above": ({"weight_map": {"a": ".."}}, "which is not in its folder"),
    "no name": ({"weight_map": {"a": ""}}, "which is not in its folder"),
    "a zero byte": ({"weight_map": {"a": "a\0b"}}, "without a path"),
    "a file that is missing": ({"weight_map": {"a": "model-1.safetensors"}}, "which is not in its folder"),
    "no weight_map": ({"metadata": {}}, "has no weight_map"),
    "a list": ([], "has no weight_map"),
    "a weight_map that is a list": ({"weight_map": ["model.safetensors"]}, "has no weight_map"),
    "an empty weight_map": ({"weight_map": {}}, "empty weight_map"),
    "a number for a file": ({"weight_map": {"a": 3}}, "the file of 'a' is 3, not a name"),
    "a list for a file": ({"weight_map": {"a": ["model.safetensors"]}}, "not a name"),
    "nothing": (b"", "cannot be read as JSON"),
    "half of it": (b'{"weight_map": {"a": "mod', "cannot be read as JSON"),
    "other bytes": (b"\xff\xfe\x00", "cannot be read as JSON"),
    "too deep": (b'{"weight_map": ' + b"[" * 100_000, "cannot be read as JSON"),
    "a long number": (b'{"weight_map": ' + b"9" * 10_000 + b"}", "cannot be read as JSON"),
    "no safetensors": ({"weight_map": {"a": "config.json"}}, "cannot be read as safetensors"),
}


def test_wrong_indexes(tmp_path):
    folder = tmp_path / "folder"
    model = saved("gpt2", folder)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    (folder / "inside").mkdir()
    outside = tmp_path / "outside.safetensors"
    for other in (outside, folder / "inside" / "model.safetensors"):
        shutil.copy(folder / "model.safetensors", other)
    for name, (content, message) in WRONG_INDEXES.items():
        if not isinstance(content, bytes):
            text = json.dumps(content).replace("{outside}", outside.name).replace("{absolute}", str(outside))
            content = text.encode()
        (folder / INDEX_NAME).write_bytes(content)
        for read in (patrickstar.from_pretrained, SafetensorsFolder, lambda path: load_into(model, path)):
            with pytest.raises(ValueError, match=message) as caught:
                read(folder)
            assert str(caught.value).startswith(str(folder)) and "\n" not in str(caught.value), name
    assert_same_bits(dict(model.state_dict()), before)


def test_files_of_a_cache_are_links(tmp_path):
    saved("llama", tmp_path / "blobs", max_shard_size="20kB")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (folder / file.name).symlink_to(file)
    assert [path.parent for path in weight_files(folder)] == [folder] * len(list(folder.glob("*.safetensors")))
    patrickstar.from_pretrained(folder)
    next(folder.glob("*.safetensors")).resolve().unlink()
    with pytest.raises(ValueError, match="which is not in its folder"):
        patrickstar.from_pretrained(folder)


def test_another_shape_is_found_before_anything_is_loaded(tmp_path):
    model = saved("gpt2", tmp_path)
    values = {key: value + 1 for key, value in load_file(tmp_path / "model.safetensors").items()}
    last = list(values)[-1]
    save_file({**values, last: torch.zeros(3)}, tmp_path / "model.safetensors")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=rf"{last} has shape \(3,\), in the model"):
        load_into(model, tmp_path)
    assert_same_bits(dict(model.state_dict()), before)
    save_file(values, tmp_path / "model.safetensors")
    assert load_into(model, tmp_path) == ([], [])
    assert_same_bits({key: model.state_dict()[key] for key in values}, values)


MEMORY_SCRIPT = """
import sys, torch, resource, transformers, patrickstar
from patrickstar.runtime import initialize_engine
model = patrickstar.from_pretrained(sys.argv[1])
num_bytes = 4 * sum(p.numel() for p in model.parameters())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
engine, _ = initialize_engine(lambda: model, 0, {})
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print((peak - before) / num_bytes)
"""


def test_memory(tmp_path):
    """The chunks' 4 bytes per parameter, and up to 4 more of memory-mapped files. A copy would be a third."""
    config = transformers.GPT2Config(vocab_size=2000, n_embd=512, n_layer=12, n_head=8, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path, max_shard_size="30MB")
    ratio = float(
        subprocess.run(
            [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True
        ).stdout.splitlines()[-1]
    )
    print(f"{4 * ratio:.2f} bytes per parameter at the peak, mapped files included")
    assert ratio < 2.3
