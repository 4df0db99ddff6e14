"""Trainers, adapters and ranks over folders whose files transformers converts."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import Trainer

import patrickstar
from patrickstar.integrations.transformers import PatrickStarTrainer
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import run_python, run_ranks
from tests.integrations.trainer_runs import Tokens, arguments
from tests.module.test_conversions import build
from tests.ranks.mixed_models import build as build_family
from tests.training import make_config


def test_a_trainer_saves_and_resumes(tmp_path):
    build("Qwen3Moe").save_pretrained(tmp_path / "initial")
    options: dict[str, Any] = {"max_steps": 2, "save_steps": 1, "save_strategy": "steps"}
    plain = Trainer(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "initial"),
        arguments(tmp_path / "plain", **options),
        train_dataset=Tokens(8, 0),
    )
    plain.train()
    trainer = PatrickStarTrainer(
        patrickstar.from_pretrained(tmp_path / "initial"),
        arguments(tmp_path / "own", **options),
        train_dataset=Tokens(8, 0),
        patrickstar_config={},
    )
    trainer.train()
    trainer.close()
    for step in ("checkpoint-1", "checkpoint-2"):
        own, expected = (load_file(tmp_path / kind / step / "model.safetensors") for kind in ("own", "plain"))
        assert own.keys() == expected.keys() and "model.layers.0.mlp.experts.3.up_proj.weight" in own
        for name, value in expected.items():
            torch.testing.assert_close(own[name], value, rtol=1e-4, atol=2e-4)
    resumed = PatrickStarTrainer(
        patrickstar.from_pretrained(tmp_path / "initial"),
        arguments(tmp_path / "more", **options),
        train_dataset=Tokens(8, 0),
        patrickstar_config={},
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-1"))  # of an ordinary Trainer
    resumed.close()
    final = load_file(tmp_path / "more" / "checkpoint-2" / "model.safetensors")
    for name, value in load_file(tmp_path / "plain" / "checkpoint-2" / "model.safetensors").items():
        torch.testing.assert_close(final[name], value, rtol=1e-4, atol=2e-4)


def test_adapters_of_experts(tmp_path):
    build("Qwen3Moe").save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets)
    model = get_peft_model(patrickstar.from_pretrained(tmp_path / "base"), lora)
    engine, optimizer = initialize_engine(lambda: model, 0, make_config())
    tokens = torch.arange(3, 27).view(2, 12)
    with engine:
        engine.backward(engine.module(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        engine.module.save_pretrained(tmp_path / "adapter")
        trained = engine.state_dict()
        with torch.no_grad():
            logits = engine.module.eval()(input_ids=tokens).logits
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert_same_bits(dict(loaded.state_dict()), dict(trained))
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=tokens).logits, logits)


def export_on_ranks(folder: str) -> dict[str, torch.Tensor]:
    model = patrickstar.from_pretrained(f"{folder}/initial")
    engine, _ = initialize_engine(lambda: model, 0, make_config(default_chunk_size=4096))
    with engine:
        engine.export_weights(f"{folder}/exported", max_file_bytes=40_000)
        return engine.state_dict()


def test_two_ranks(tmp_path):
    model = build("Mixtral")
    model.save_pretrained(tmp_path / "initial")
    for state in run_ranks(2, export_on_ranks, str(tmp_path)):
        assert_same_bits(dict(state), dict(model.state_dict()))
    files = sorted(Path(tmp_path, "exported").glob("*.safetensors"))
    assert len(files) > 2
    found = {name: value for file in files for name, value in load_file(file).items()}
    assert_same_bits(found, load_file(tmp_path / "initial" / "model.safetensors"))


MEMORY_SCRIPT = """
import sys, patrickstar
from patrickstar.runtime import initialize_engine
from tests.peak_memory import PeakMemory
model = patrickstar.from_pretrained(sys.argv[1])
numel = sum(p.numel() for p in model.parameters())
config = {"bf16": {"enabled": True}, "device_memory": "48MiB", "default_chunk_size": 2**20}
with PeakMemory() as memory:
    engine, _ = initialize_engine(lambda: model, 0, config)
print(memory.peak / numel, memory.end / numel)
"""


@pytest.mark.slow
def test_memory_of_a_folder(tmp_path):
    """50 M parameters, whose states take 14 bytes each."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 8, "num_hidden_layers": 16}
    build_family("Qwen3Moe", **sizes)().bfloat16().save_pretrained(tmp_path)
    done = run_python("-c", MEMORY_SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr
    peak, held = map(float, done.stdout.splitlines()[-1].split())
    print(f"bytes per parameter: {peak:.2f} at the peak of loading, {held:.2f} afterwards")
    assert 4 <= held < 4.2  # moments come with the first step
    assert peak - held < 0.05 * 14
