"""Families that test_zoo.py tries and tools/support_table.py shows."""

from typing import Any

import torch
import torch.distributed as dist

from patrickstar import RankFailure
from patrickstar.runtime import initialize_engine
from tests.ranks.mixed_models import MIXTURES, VISION_MODELS, batch, build
from tests.training import make_config

STEPS = 3
ZOO = {
    "Qwen3Moe": "Qwen3-MoE (30B-A3B, 235B-A22B)",
    "Qwen3Next": "Qwen3-Next",
    "Qwen3_5Moe": "Qwen3.5-MoE",
    "GptOss": "gpt-oss",
    "DeepseekV3": "DeepSeek-V3",
    "Glm4Moe": "GLM-4.5, GLM-4.5-Air",
    "Mixtral": "Mixtral",
    "Olmoe": "OLMoE",
    "GraniteMoeHybrid": "Granite 4 hybrids",
    "Llama4": "Llama 4",
    "Llama4Text": "Llama 4, decoder",
    "Jamba": "Jamba",
    "Qwen2_5_VL": "Qwen2.5-VL",
    "Qwen3VL": "Qwen3-VL",
    "Qwen3VLMoe": "Qwen3-VL-MoE",
    "Qwen3_5": "Qwen3.5",
    "Llava": "LLaVA 1.5",
    "SmolVLM": "SmolVLM",
    "InternVL": "InternVL",
    "Gemma3": "Gemma 3",
    "Gemma3nText": "Gemma 3n, decoder",
    "Mistral3": "Mistral Small 3",
}
"""By family of ``tests/ranks/mixed_models.py``: its usual name."""
IMPLEMENTATIONS = ("batched_mm", "grouped_mm")
"""Products of experts that are tried beside ``eager``."""
ROUTES = [*(family for family in MIXTURES if family != "Llama4Text"), "Qwen3VLMoe", "Qwen3_5Moe"]
"""Families whose experts' implementation can be chosen."""
DENSE = ["Qwen2", "Qwen3", "Mistral", "Gemma2", "Phi3", "Olmo2", "Glm4"]
"""Dense decoders that are tried with adapters."""
ADAPTED = ["Llama", *DENSE, *ZOO]
"""Families whose adapters are tried, beside 16-bit bases and quantised ones; Llama's in test_peft.py and test_qlora.py.
"""
DIVIDED = {"sequences": {"sequence_parallel": {"size": 2}}, "matrices": {"tensor_parallel": {"rows": 1, "columns": 2}}}
"""Options with which several ranks share an image's batch."""


def vision_families() -> list[str]:
    return [family for family in ZOO if family in VISION_MODELS]


def refusals(families: list[str], ways: list[dict[str, Any]]) -> list[list[str]]:
    """Returns by way and family the error of a forward with images; empty: there was none."""
    dist.init_process_group("gloo")
    found = [[_refusal(family, options) for family in families] for options in ways]
    dist.barrier()
    dist.destroy_process_group()
    return found


def _refusal(family: str, options: dict[str, Any]) -> str:
    torch.manual_seed(0)
    try:
        engine, _ = initialize_engine(build(family), 0, make_config("fp32", steps_per_print=0, **options))
        with engine:
            engine.train()
            engine(**batch(family, 0, True, True), use_cache=False)
    except (ValueError, RankFailure) as error:
        return str(error)
    return ""
