"""Weights that go from safetensors into chunks: what transformers loads, and no more memory than a piece."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
import torch
import transformers

import patrickstar
from patrickstar.runtime import initialize_engine
from tests.models import MODELS, token_batch


def saved(name, folder, **options):
    torch.manual_seed(3)
    model = MODELS[name].build()
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.parametrize(("name", "options"), [("gpt2", {}), ("llama", {"max_shard_size": "20kB"}), ("t5", {})])
def test_values_are_those_of_the_folder(tmp_path, name, options):
    """One file or several, tied weights, buffers; and the model computes the same."""
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
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
        torch.testing.assert_close(engine.module(**batch).logits, expected, rtol=0, atol=0)


def test_a_body_gets_a_new_head(tmp_path, caplog):
    """The prefix of the body is added; what the folder lacks is initialised, and said."""
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
        assert all(torch.equal(state[f"transformer.{key}"], value) for key, value in body.state_dict().items())
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
    """The chunks' 4 bytes per parameter, and of the memory-mapped files what the system likes to keep: up to
    4 more. A copy would be a third."""
    config = transformers.GPT2Config(vocab_size=2000, n_embd=512, n_layer=12, n_head=8, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path, max_shard_size="30MB")
    ratio = float(
        subprocess.run(
            [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True
        ).stdout.splitlines()[-1]
    )
    print(f"{4 * ratio:.2f} bytes per parameter at the peak, mapped files included")
    assert ratio < 2.3
