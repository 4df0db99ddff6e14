"""Names of models and GPUs, and mistakes in a command line."""

import subprocess
import sys

import pytest
import torch
import transformers

from patrickstar.plan import main
from patrickstar.planning.gpus import DATA_SHEETS, gpu_name
from patrickstar.planning.known_models import KNOWN_MODELS, known_name
from patrickstar.planning.models import model_config


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-24b"),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral-small-24b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"),
        ("google/gemma-3-4b-it", "gemma-3-4b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("zai-org/GLM-4-9B-0414", "glm-4-9b"),
        ("microsoft/Phi-4-mini-instruct", "phi-4-mini"),
        ("allenai/OLMo-2-1124-7B", "olmo-2-7b"),
        ("llama-8b", "llama-3.1-8b"),
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


# Parameters of the published weights.
NUM_PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "gemma-3-1b": 999_885_952,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "phi-4": 14_659_507_200,
    "olmo-2-7b": 7_298_617_344,
    "mistral-small-24b": 23_572_403_200,
    "glm-4-9b": 9_400_279_040,
}


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_configurations_are_those_of_the_published_weights(name):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(model_config(name, 1024))
    assert sum(param.numel() for param in model.parameters()) == NUM_PARAMETERS[name]


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
