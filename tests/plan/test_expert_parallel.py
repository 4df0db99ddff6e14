import json

import pytest

from patrickstar.plan import main

LAYERS, HIDDEN, CHOSEN = 48, 2048, 8  # Qwen3-30B-A3B
QUESTION = (
    "--model qwen3-30b-a3b --gpu h200 --host-memory 512GiB --gpus-per-node 4 --batch-size 1 --seq-len 512 "
    "--no-checkpointing"
)


def ask(capsys, more=""):
    assert main([*QUESTION.split(), *more.split(), "--json", "--no-advice"]) == 0
    return json.loads(capsys.readouterr().out)


def test_experts_are_not_gathered_and_tokens_travel(capsys):
    shared, divided = ask(capsys), ask(capsys, "--expert-parallel 4")
    assert shared["expert_parallel"] is None
    assert divided["config"]["expert_parallel"] == {"size": 4}
    rows = 512 * CHOSEN * HIDDEN * 2
    travels = 4 * LAYERS * rows * 3 / 4  # to the experts and back, in forward and backward
    assert divided["expert_parallel"]["received_bytes"] == pytest.approx(travels, rel=1e-6)
    assert divided["gathered_bytes"] < shared["gathered_bytes"] / 10
    assert divided["num_parameters"] == shared["num_parameters"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--expert-parallel 3", "4 GPUs, which are not groups of 3"),
        ("--expert-parallel 2 --sequence-parallel 2", "does not go together with"),
        ("--model llama-3.2-1b --expert-parallel 2", "LlamaForCausalLM has no experts"),
    ],
)
def test_what_cannot_be_divided_is_said(capsys, flags, message):
    assert main([*QUESTION.split(), *flags.split()]) == 2
    said = capsys.readouterr()
    assert message in said.out + said.err


@pytest.mark.slow
def test_advice_says_which_is_faster(capsys):
    few, many = QUESTION.split(), [*QUESTION.split(), "--checkpointing", "--batch-size", "4", "--seq-len", "4096"]
    for words, size in ((few, "4"), ([*many, "--expert-parallel", "2"], "1")):
        assert main([*words, "--json"]) == 0
        advice = json.loads(capsys.readouterr().out)["advice"]
        assert ["--expert-parallel", size] in [item["flags"] for item in advice]
