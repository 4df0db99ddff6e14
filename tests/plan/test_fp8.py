import json

import pytest
import transformers

from patrickstar.plan import main

QUESTION = "--model llama-3.1-8b --gpu h200 --host-memory 126GiB --batch-size 4 --seq-len 4096"


def ask(capsys, more=""):
    assert main([*QUESTION.split(), *more.split(), "--json", "--no-advice"]) == 0
    return json.loads(capsys.readouterr().out)


def test_products_in_8_bits_take_less_time_and_keep_smaller_activations(capsys):
    plain, finest, fastest = ask(capsys), ask(capsys, "--fp8 block"), ask(capsys, "--fp8 rowwise")
    assert fastest["config"]["fp8"] == {"recipe": "rowwise"} and "fp8" not in plain["config"]
    assert plain["step_seconds"] > finest["step_seconds"] > fastest["step_seconds"]
    assert fastest["step_seconds"] == pytest.approx(1.390, rel=0.05)  # benchmark/results/h200-fp8.txt
    assert fastest["model_tflops"] / plain["model_tflops"] == pytest.approx(
        plain["step_seconds"] / fastest["step_seconds"], rel=1e-3
    )


def test_experts_take_less_time_where_pytorch_multiplies_groups_in_8_bits(capsys, tmp_path):
    config = transformers.Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=1024, num_experts=128, num_experts_per_tok=8, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, vocab_size=1024, architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    shorter = {}
    for gpu in ("h200", "b200"):
        model = f"--model {tmp_path} --gpu {gpu} --batch-size 16"
        plain, in_8_bits = (ask(capsys, f"{model} {flags}")["step_seconds"] for flags in ("", "--fp8 rowwise"))
        shorter[gpu] = 1 - in_8_bits / plain
    assert shorter["h200"] > 0.08 > shorter["b200"] > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gpu a100 --fp8 block", "a100 is no Ada, Hopper or Blackwell GPU"),
        ("--precision fp16 --fp8 block", "FP8 needs --precision bf16"),
        ("--gpus-per-node 2 --tensor-parallel 1x2 --fp8 block", "--tensor-parallel is given with --fp8"),
        ("--model gpt:64x2 --fp8 block", "no linear layer that can multiply in 8 bits"),
    ],
)
def test_refusals(capsys, flags, message):
    assert main([*QUESTION.split(), *flags.split()]) == 2
    said = capsys.readouterr()
    assert message in said.out + said.err
