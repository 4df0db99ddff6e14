"""Names of models and GPUs, and mistakes in a command line."""

import subprocess
import sys

import pytest

from patrickstar.plan import main
from patrickstar.planning.gpus import DATA_SHEETS, gpu_name
from patrickstar.planning.known_models import KNOWN_MODELS, known_name
from patrickstar.planning.models import build_model


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-24b"),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral-small-3.1-24b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"),
        ("google/gemma-3-4b-it", "gemma-3-4b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("zai-org/GLM-4-9B-0414", "glm-4-9b"),
        ("microsoft/Phi-4-mini-instruct", "phi-4-mini"),
        ("allenai/OLMo-2-1124-7B", "olmo-2-7b"),
        ("llama-8b", "llama-3.1-8b"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3-next-80b-a3b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("zai-org/GLM-4.5-Air-FP8", "glm-4.5-air"),
        ("allenai/OLMoE-1B-7B-0924-Instruct", "olmoe-1b-7b"),
        ("ai21labs/Jamba-v0.1", "jamba-mini"),
        ("ai21labs/AI21-Jamba-Mini-1.7", "jamba-mini"),
        ("ibm-granite/granite-4.0-h-small-base", "granite-4.0-h-small"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama-4-scout"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-vl-7b"),
        ("Qwen/Qwen3-VL-30B-A3B-Thinking", "qwen3-vl-30b-a3b"),
        ("llava-hf/llava-1.5-7b-hf", "llava-1.5-7b"),
        ("HuggingFaceTB/SmolVLM-Instruct", "smolvlm-2.2b"),
        ("HuggingFaceTB/SmolVLM2-500M-Video-Instruct", "smolvlm-500m"),
        ("OpenGVLab/InternVL3-8B-hf", "internvl3-8b"),
        ("google/gemma-3n-E4B-it", "gemma-3n-e4b"),
        ("nobody/knows-7b", None),
    ],
)
def test_models(text, name):
    assert known_name(text) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a100-80", "a100"),
        ("A100 80GB", "a100"),
        ("a100-40gb", "a100-40"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("NVIDIA H100 80GB", "h100"),
        ("Tesla T4", "t4"),
        ("RTX A6000", "a6000"),
        ("h200", "h200"),
    ],
)
def test_gpus(text, name):
    assert gpu_name(text) == name


def test_every_name_is_its_own():
    assert [gpu_name(name) for name in DATA_SHEETS] == list(DATA_SHEETS)
    assert [known_name(name) for name in KNOWN_MODELS] == list(KNOWN_MODELS)


# Parameters of the published weights, or the number that their authors name in billions.
NUM_PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "gemma-3-1b": 999_885_952,
    "phi-4": 14_659_507_200,
    "olmo-2-7b": 7_298_617_344,
    "mistral-small-24b": 23_572_403_200,
    "glm-4-9b": 9_400_279_040,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140.6,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-next-80b-a3b": 80,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v3": 671,
    "glm-4.5-air": 106,
    "glm-4.5": 355,
    "olmoe-1b-7b": 6_919_161_856,
    "jamba-mini": 51_570_323_328,
    "jamba-large": 398,
    "granite-4.0-h-tiny": 6_939_037_248,
    "granite-4.0-h-small": 32_207_337_984,
    "llama-4-scout": 108_641_793_536,
    "llama-4-maverick": 401_583_781_376,
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen2.5-vl-32b": 33_452_718_336,
    "qwen2.5-vl-72b": 73_410_777_344,
    "qwen3-vl-2b": 2_127_532_032,
    "qwen3-vl-4b": 4_437_815_808,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "llava-1.5-7b": 7_063_427_072,
    "smolvlm-256m": 256_484_928,
    "smolvlm-500m": 507_482_304,
    "smolvlm-2.2b": 2_246_272_880,
    "internvl3-8b": 7.94,
    "gemma-3-4b": 4_300_079_472,
    "gemma-3-12b": 12_187_325_040,
    "gemma-3-27b": 27_432_406_640,
    "mistral-small-3.1-24b": 24_011_361_280,
}
NUM_ACTIVE = {  # billions that their authors name, of all parameters with both embeddings
    "mixtral-8x7b": 12.9,
    "mixtral-8x22b": 39,
    "qwen3-235b-a22b": 22,
    "jamba-mini": 12,
    "olmoe-1b-7b": 1.28,
}


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_configurations_are_those_of_the_published_weights(name):
    model, published = build_model(name, 1, 8, checkpointing=False), NUM_PARAMETERS[name]
    if isinstance(published, int) and published > 1e6:
        assert model.num_params == published
    else:
        assert model.num_params / 1e9 == pytest.approx(published, rel=0.01)
    if name in NUM_ACTIVE:
        assert model.num_active / 1e9 == pytest.approx(NUM_ACTIVE[name], rel=0.01)


def test_all_mistakes_are_said_at_once(capsys):
    words = "--model qwen9 --gpu rtx409 --batch-size 0 --precision fp64 --speculation commit --clip 1 --bach 3"
    assert main(words.split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6
    for said in (
        "--gpu: it is 'rtx409'; did you mean rtx4090?",
        "--batch-size: it is '0'; give a whole number of at least 1",
        "--precision: it is 'fp64'; give one of bf16, fp16, fp32",
        "there is no flag --bach",
        "--model is 'qwen9'; give a name (qwen3-8b",
        "--speculation commit updates in every backward, for good; leave out",
    ):
        assert any(said in line for line in lines), (said, lines)


def test_help_imports_nothing_heavy():
    code = """
import sys
from patrickstar.command.main import main
try:
    main(["plan", "--help"])
except SystemExit:
    print(sorted({"torch", "numpy", "pydantic", "transformers"} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--batch-size" in done.stdout and done.stderr.strip() == "[]"
