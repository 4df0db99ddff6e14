"""Plans of mixtures of experts and of vision-language models."""

import json

import pytest
import torch
import transformers

from patrickstar.module.preprocess import plan_params
from patrickstar.plan import main
from patrickstar.planning.machines import H200
from patrickstar.planning.models import build_model
from patrickstar.planning.uses import trace_uses
from tests.ranks.mixed_models import MIXTURES, TEXT, build

BATCH, LENGTH = 2, 64


def flops(model):
    tokens = torch.empty(BATCH, LENGTH, dtype=torch.long, device="meta")
    params = plan_params(model, torch.bfloat16, use_cpu_embedding=False)
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    return trace_uses(model, params, torch.bfloat16, inputs, H200.gpu).flops


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss", "DeepseekV3"])
def test_work_counts_experts_that_are_chosen(family, experts):
    with torch.device("meta"):
        models = [build(family, experts)() for _ in range(2)]
    for layer in models[1].model.layers:
        layer.mlp.experts.forward = lambda hidden, _, weights: hidden * weights.sum(-1, keepdim=True)
    routed = [child for child in models[0].modules() if hasattr(child, "gate_up_proj") and hasattr(child, "down_proj")]
    weights = sum(p.numel() for child in routed for p in (child.gate_up_proj, child.down_proj) if p.dim() == 3)
    of_experts = flops(models[0]) - flops(models[1])
    assert of_experts == 6 * (weights // 4 * 2) * BATCH * LENGTH  # two of four experts
    assert weights > 0


def plan(capsys, folder, config, *flags):
    config.save_pretrained(folder)
    assert main(["--model", str(folder), "--seq-len", "64", "--no-advice", "--host-memory", "1GiB", *flags]) == 0
    return capsys.readouterr().out


def test_active_parameters_of_a_mixture(capsys, tmp_path):
    config = transformers.Qwen3MoeConfig(**{**TEXT, **MIXTURES["Qwen3Moe"]}, architectures=["Qwen3MoeForCausalLM"])
    said = json.loads(plan(capsys, tmp_path, config, "--json"))
    idle = 2 * 2 * 3 * 32 * 16  # layers, experts, matrices of an expert
    assert said["num_active_parameters"] == said["num_parameters"] - idle
    assert said["num_unused_parameters"] == 0
    model = build_model(str(tmp_path), BATCH, LENGTH, checkpointing=False)
    tokens = BATCH * LENGTH
    assert model.model_flops(BATCH, LENGTH) == 6 * said["num_active_parameters"] * tokens + 6 * 2 * 32 * LENGTH * tokens
    adapted = build_model(str(tmp_path), BATCH, LENGTH, checkpointing=False, lora_rank=2)
    assert adapted.num_params - adapted.num_active == idle
    assert adapted.num_active_trained == adapted.num_trained > 0


def test_a_vision_language_model_is_planned_for_text(capsys, tmp_path):
    with torch.device("meta"):
        model = build("Qwen3VLMoe")()
    tower = sum(param.numel() for param in model.model.visual.parameters())
    said = json.loads(plan(capsys, tmp_path, model.config, "--json"))
    assert said["num_unused_parameters"] == tower
    assert said["num_parameters"] == sum(param.numel() for param in model.parameters())
    assert said["num_active_parameters"] == said["num_parameters"] - tower - 2 * 2 * 3 * 32 * 16
    lines = plan(capsys, tmp_path, model.config).splitlines()
    assert "B active)" in lines[0]
    assert lines[2].startswith("planned for text alone: ")


def test_a_model_whose_shapes_follow_from_values_is_refused(capsys, tmp_path):
    config = transformers.LongcatFlashConfig(num_layers=1, architectures=["LongcatFlashForCausalLM"])
    config.save_pretrained(tmp_path)
    assert main(["--model", str(tmp_path), "--seq-len", "16", "--no-advice", "--host-memory", "900GiB"]) == 2
    assert "LongcatFlashForCausalLM computes with shapes that follow from values" in capsys.readouterr().err
