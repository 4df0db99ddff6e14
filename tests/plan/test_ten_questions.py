"""Ten first questions to ``patrickstar plan``. Verdicts follow from bytes: with exact states a parameter takes some 14
bytes of host memory, with LoRA 2, with a base in 4 bits half a byte; the GPU's memory holds what the host does not.
"""

import json

import pytest

from patrickstar.plan import main

QUESTIONS = {  # question: fits, a flag that is advised if not
    "--model llama-3.1-8b --gpu rtx4090 --host-memory 128GiB": (True, None),
    "--model meta-llama/Llama-3.1-8B-Instruct --gpu 4090 --host-memory 64GiB": (False, "--states"),
    "--model Qwen/Qwen3-8B --gpu rtx3090 --host-memory 32GiB": (False, "--quantization"),
    "--model qwen3-8b --gpu rtx3090 --host-memory 32GiB --quantization nf4": (True, None),
    "--model llama-3.2-1b --gpu t4 --precision fp16 --host-memory 24GiB": (True, None),
    "--model Qwen/Qwen2.5-14B --gpu a100-80 --host-memory 256GiB": (True, None),
    "--model mistralai/Mistral-7B-Instruct-v0.3 --gpu rtx3060 --host-memory 32GiB --lora-rank 16": (True, None),
    "--model google/gemma-3-27b-it --gpu rtx5090 --host-memory 64GiB": (False, "--quantization"),
    "--model gpt2-xl --gpu v100 --precision fp16 --host-memory 32GiB": (True, None),
    "--model microsoft/phi-4 --gpu a6000 --host-memory 128GiB": (False, "--states"),
}


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS)
def test_verdict(capsys, question):
    fits, advised = QUESTIONS[question]
    assert main([*question.split(), "--json"]) == (0 if fits else 1)
    said = json.loads(capsys.readouterr().out)
    assert said["fits"] == fits
    if fits:
        assert said["device_peak_bytes"] <= said["device_budget_bytes"]
        return
    print(*(advice["flags"] for advice in said["advice"]), sep="\n")
    flags = [advice["flags"] for advice in said["advice"]]
    assert any(advised in words for words in flags)
    bought = [bool({"--host-memory", "--gpus-per-node"} & set(words)) for words in flags]
    assert bought == sorted(bought)  # what the machine has comes first
