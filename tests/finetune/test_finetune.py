import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from patrickstar.finetune import training, usage
from patrickstar.finetune.conversations import read_conversations
from patrickstar.finetune.encoding import ChatEncoder
from patrickstar.finetune.recipe import warmup_then_cosine
from tests.bits import assert_same_bits
from tests.example_runs import figure, run_example, stop_after
from tests.finetune.tiny import FLAGS, MODELS, TURNS, answer_losses, run, write_lines

ROOT = Path(__file__).resolve().parents[2]


def logits_of(model, tokenizer) -> torch.Tensor:
    ids = torch.tensor([tokenizer("What is 3?").input_ids])
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize("kind", MODELS)
def test_every_model_trains_within_a_budget_and_is_saved(kind, folders, chat, monkeypatch, tmp_path, capsys):
    folder, output = folders(kind), tmp_path / "output"
    memory = ("--device-memory", "8MiB", "--checkpointing")
    flags = ("--model", folder, "--data", chat, "--eval-data", chat, "--packing", "--seq-len", 128, "--steps", 2)
    seen = run(monkeypatch, *flags, *memory, "--output-dir", output)
    assert seen.code == 0
    printed = capsys.readouterr().out
    assert f"saved to {output / 'model'}" in printed and "answers after the training" in printed
    counts = re.findall(r"^  (\d) of (\d) answers are the held-out ones, word for word$", printed, re.MULTILINE)
    assert counts == [("0", str(printed.count("\n  > ") // 2))] * 2  # two steps teach nothing
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoder = ChatEncoder(tokenizer)
    tokens = [each for conversation in read_conversations(chat) for each in encoder.tokens(conversation)]
    before, after = AutoModelForCausalLM.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(output / "model")
    for step, model in ((0, before), (2, after)):
        expected = answer_losses(model.eval(), tokenizer, tokens).mean().item()
        assert seen.run.evaluations[step].loss == pytest.approx(expected, rel=1e-5)
    saved = AutoTokenizer.from_pretrained(output / "model")
    assert saved.apply_chat_template(TURNS, tokenize=False) == tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert torch.equal(logits_of(after, saved), logits_of(seen.run.module, tokenizer))


# Runs that go on, adapters.


@pytest.mark.parametrize(
    "adapts", [pytest.param(False, id="full"), pytest.param(True, id="lora", marks=pytest.mark.slow)]
)
def test_a_run_that_goes_on_is_bitwise_one_that_never_stopped(adapts, folders, chat, monkeypatch, tmp_path, capsys):
    lora = ("--lora", "--lora-rank", 4) if adapts else ()
    flags = ("--model", folders("llama"), "--data", chat, *lora, "--gradient-accumulation", 2, "--steps", 4)
    straight = run(monkeypatch, *flags, "--output-dir", tmp_path / "straight")
    parts = (*flags, "--output-dir", tmp_path / "parts")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "log").touch()  # what a run wrote before its first checkpoint
    for ended, signum in ((2, signal.SIGTERM), (3, signal.SIGUSR1)):
        with monkeypatch.context() as patch:
            stop_after(2 if ended == 2 else 1, patch, signum)
            assert run(monkeypatch, *parts, "--resume", "auto").code == 75
        printed = capsys.readouterr().out
        assert f"ended after step {ended}; saved to" in printed
        assert printed.rstrip().endswith("--resume auto")
    resumed = run(monkeypatch, *parts, "--device-memory", "8MiB", "--resume", "auto")
    assert "resumed from" in capsys.readouterr().out
    assert resumed.run.scores == straight.run.scores and resumed.run.evaluations == straight.run.evaluations
    kind, name = ("adapter", "adapter_model.safetensors") if adapts else ("model", "model.safetensors")
    first, second = (load_file(tmp_path / run_name / kind / name) for run_name in ("straight", "parts"))
    assert len(first) > 10
    assert_same_bits(second, first)


def test_adapters_load_with_peft(folders, chat, monkeypatch, tmp_path):
    folder = folders("qwen2")
    flags = ("--model", folder, "--data", chat, "--lora", "--packing", "--steps", 3, "--output-dir", tmp_path / "out")
    seen = run(monkeypatch, *flags)
    assert seen.run.final.loss < seen.run.evaluations[0].loss
    base = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "adapter")
    before = logits_of(base, tokenizer)
    after = logits_of(PeftModel.from_pretrained(base, tmp_path / "out" / "adapter"), tokenizer)
    torch.testing.assert_close(after, logits_of(seen.run.module, tokenizer), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(after, before, atol=1e-3)


def test_a_frozen_model_in_4_bits(folders, chat, monkeypatch, tmp_path):
    flags = ("--model", folders("llama"), "--data", chat, "--lora", "--steps", 3, "--output-dir")
    losses = [
        run(monkeypatch, *flags, tmp_path / name, *more).run.evaluations[0].loss
        for name, more in (("whole", ()), ("nf4", ("--quantization", "nf4")))
    ]
    assert losses[0] != losses[1]  # the same model, a little off
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_schedulers_signals_are_one_request(signum, monkeypatch):
    clock = itertools.count(0, 10)
    monkeypatch.setattr(usage.time, "monotonic", lambda: next(clock))
    with usage.stop_requests() as stop:
        assert not stop.is_made
        for number in (signum, signum, signal.SIGTERM, signal.SIGUSR1):
            signal.raise_signal(number)
            assert stop.is_made
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with usage.stop_requests():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)  # what torchrun makes of the second Ctrl-C


def test_ctrl_c_saves_and_the_printed_command_goes_on(folders, chat, tmp_path):
    flags = (
        "--model",
        folders("llama"),
        "--data",
        chat,
        "--steps",
        50,
        "--samples",
        0,
        "--output-dir",
        tmp_path / "o",
    )
    command = [sys.executable, "-m", "patrickstar", "finetune", *map(str, (*FLAGS[:-4], *flags))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line.startswith("step 0:"):
                break
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        output, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "finishing this step" in error and "Traceback" not in error
    printed = output.splitlines()
    assert re.fullmatch(rf"ended after step \d+; saved to {tmp_path}/o/checkpoint; go on with", printed[-2])
    done = subprocess.run(printed[-1].strip(), shell=True, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stdout and f"saved to {tmp_path}/o/model" in done.stdout
    assert "50/50" in done.stderr


@pytest.mark.slow
def test_two_ranks_train_as_one_with_their_batches_together(folders, chat, monkeypatch, tmp_path):
    flags = ["--model", folders("llama"), "--data", chat, "--steps", 4, "--clip", 0, "--lr", "1e-3"]
    one = run(monkeypatch, *flags, "--batch-size", 4, "--output-dir", tmp_path / "one")
    rest = ["--lr", "1e-3", "--precision", "fp32", "--samples", 1, "--sample-tokens", 4, "--batch-size", 2]
    two = run_example("finetune_llm.py", *flags, *rest, "--output-dir", tmp_path / "two", ranks=2, timeout_seconds=200)
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("answers after the training") == two.stdout.count("saved to") == 1
    assert figure(two.stdout, r"held-out loss +([0-9.]+)") == pytest.approx(one.run.final.loss, rel=1e-4)
    assert figure(two.stdout, r"training loss +([0-9.]+)") == pytest.approx(one.run.scores[-1].loss, rel=1e-4)
    weights = [load_file(tmp_path / folder / "model" / "model.safetensors") for folder in ("one", "two")]
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, rtol=1e-2, atol=1e-3)


# Runs that are resumed with another length, or as another run.


def stopped_run(folders, chat, monkeypatch, tmp_path, *more: object) -> tuple[object, ...]:
    flags = ("--model", folders("llama"), "--data", chat, "--samples", 0, "--output-dir", tmp_path / "out", *more)
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        assert run(monkeypatch, *flags, "--steps", 6).code == 130
    return flags


def learning_rates(monkeypatch) -> list[float]:
    found, train_step = [], training.train_step

    def watched(model, optimizer, *rest):
        found.append(optimizer.param_groups[0]["lr"])
        return train_step(model, optimizer, *rest)

    monkeypatch.setattr(training, "train_step", watched)
    return found


@pytest.mark.parametrize(("flag", "value", "num_steps"), [("--steps", 5, 5), ("--epochs", 3, 9), ("--steps", 3, 3)])
def test_a_resumed_run_may_have_another_length(flag, value, num_steps, folders, chat, monkeypatch, tmp_path, capsys):
    flags = stopped_run(folders, chat, monkeypatch, tmp_path)
    rates = learning_rates(monkeypatch)
    capsys.readouterr()
    resumed = run(monkeypatch, *flags, flag, value, "--resume")
    assert resumed.code == 0 and len(resumed.run.scores) == num_steps
    factor = warmup_then_cosine(1, num_steps)
    assert rates == [1e-2 * factor(step) for step in range(3, num_steps)]
    assert max(resumed.run.evaluations) == num_steps
    printed = capsys.readouterr().out
    assert f"the run had 6 steps and now has {num_steps}: the learning rate falls to 0 at step {num_steps}" in printed
    assert f"is {1e-2 * factor(3):.1e} in the next step instead of" in printed


def test_a_finished_run_goes_on_if_it_saved_checkpoints(folders, chat, monkeypatch, tmp_path):
    flags = ("--model", folders("llama"), "--data", chat, "--samples", 0, "--output-dir", tmp_path / "out")
    assert run(monkeypatch, *flags, "--steps", 2, "--save-every", 10).code == 0
    resumed = run(monkeypatch, *flags, "--steps", 3, "--resume")
    assert resumed.code == 0 and len(resumed.run.scores) == 3


def test_another_run_is_refused_before_a_model_is_loaded(folders, chat, monkeypatch, tmp_path, capsys):
    flags = stopped_run(folders, chat, monkeypatch, tmp_path)
    other = write_lines(tmp_path / "other.jsonl", [{"prompt": "a", "answer": "b"}] * 9)
    monkeypatch.setattr(training, "initialize_engine", None)
    for change, differences in {
        ("--steps", 2): ["has made 3 steps, more than 2; give --steps 3 to save its model as it is, or more"],
        ("--steps", 6, "--data", other): ["training data"],
        ("--steps", 6, "--lora", "--lr", 1e-3): ["--method full, not lora", "--lr 0.01, not 0.001"],
        ("--steps", 6, "--model", folders("qwen2")): ["--model llama (", "training data"],
        ("--steps", 6, "--packing", "--batch-size", 1): ["--packing False, not True", "--batch-size 2, not 1"],
    }.items():
        capsys.readouterr()
        assert run(monkeypatch, *flags, *change, "--resume").code == 2
        error = capsys.readouterr().err
        assert all(difference in error for difference in differences), error
        assert all("--resume: the run in " in line for line in error.splitlines())
