import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel

from patrickstar.finetune import training
from patrickstar.finetune.batches import Score
from patrickstar.finetune.tasks import Run, Task
from tests.bits import assert_same_bits
from tests.example_runs import check_report, figure, imported_example, is_png, run_example, stop_after

TINY = ("--model-size", "tiny", "--seq-len", 32, "--vocab-size", 300, "--batch-size", 16)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("gpt2")
    result = run_example("finetune_gpt2.py", *TINY, "--steps", 160, "--lr", "3e-3", "--save", "--output-dir", folder)
    assert result.returncode == 0, result.stderr
    assert "160/160" in result.stderr  # the progress bar
    return folder, result.stdout


@pytest.mark.slow
def test_learns_the_python_reference(trained):
    folder, output = trained
    check_report(output, "unigram baseline")
    assert is_png(folder / "gpt2-curves.png")


@pytest.mark.slow
def test_finetunes_a_local_model_on_own_text(trained, tmp_path):
    folder, _ = trained
    text = tmp_path / "text.txt"
    text.write_text("The chunk moves between the host and the device, and no number changes. " * 400, encoding="utf-8")
    data = ("--pretrained", folder / "model", "--text", text, "--seq-len", 32, "--output-dir", tmp_path / "output")
    training = ("--steps", 60, "--lr", "5e-3", "--batch-size", 4, "--accumulation", 2, "--precision", "bf16")
    memory = ("--checkpointing", "--device-memory", "24MiB", "--host-memory", "1GiB", "--chunk-size", 65536)
    result = run_example("finetune_gpt2.py", *data, *training, *memory)
    assert result.returncode == 0, result.stderr
    check_report(result.stdout, "unigram baseline")
    assert figure(result.stdout, r"device peak +([0-9.]+) MiB of a budget of 24.0 MiB") <= 24


def test_demo_is_bitwise_equal_within_the_budget(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text(encoding="utf-8") * 4, encoding="utf-8")
    model = ("--hidden", 256, "--layers", 4, "--heads", 4, "--seq-len", 32, "--batch-size", 8, "--text", text)
    flags = ("--steps", 12, "--precision", "fp32", "--device-memory", "24MiB", "--output-dir", tmp_path / "output")
    result = run_example("finetune_gpt2.py", "--demo", *model, *flags)
    assert result.returncode == 0, result.stderr
    summary = result.stdout.split("\nDemo\n")[1]
    assert figure(summary, r"device budget +([0-9.]+) MiB") == 24
    assert figure(summary, r"device peak +([0-9.]+) MiB") <= 24
    assert figure(summary, r"without the budget: ([0-9.]+) MiB") > 24
    assert figure(summary, r"model data +([0-9.]+) MiB") > 24
    assert figure(summary, r"final loss +([0-9.]+)") > 0
    assert "12 losses, 5 held-out scores: bitwise the same without the budget" in summary
    assert "final state_dict: bitwise the same without the budget" in summary


@pytest.mark.slow
def test_two_ranks_train_as_one_with_their_batches_together(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text(encoding="utf-8") * 2, encoding="utf-8")
    flags = ("--hidden", 64, "--layers", 2, "--heads", 2, "--seq-len", 32, "--vocab-size", 300, "--text", text)
    flags += ("--steps", 12, "--lr", "5e-3", "--save", "--output-dir")
    one = run_example("finetune_gpt2.py", *flags, tmp_path / "one", "--batch-size", 8)
    two = run_example("finetune_gpt2.py", *flags, tmp_path / "two", "--batch-size", 4, ranks=2, timeout_seconds=120)
    assert one.returncode == two.returncode == 0
    assert two.stdout.count("training loss") == 1 and "12 steps on 2 ranks" in two.stdout
    for number in (r"training loss +([0-9.]+)", r"held-out loss +([0-9.]+)", r"held-out accuracy +([0-9.]+)"):
        assert figure(two.stdout, number) == pytest.approx(figure(one.stdout, number), rel=1e-3)
    weights = [GPT2LMHeadModel.from_pretrained(tmp_path / name / "model").state_dict() for name in ("one", "two")]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-2, atol=2e-3)


@pytest.fixture(scope="module")
def example():
    with imported_example("finetune_gpt2") as module:
        yield module


def test_an_output_folder_with_something_in_it_is_refused_before_the_training(example, tmp_path, capsys):
    (tmp_path / "mine").write_text("")
    assert example.main(["--output-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("finetune_gpt2.py: --output-dir") and "exists and is not empty; give --resume" in error
    assert error.count("\n") == 1


def test_a_run_that_goes_on_is_bitwise_one_that_never_stopped(example, tmp_path, capsys, monkeypatch):
    (tmp_path / "text.txt").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    model = "--hidden 32 --layers 2 --heads 2 --seq-len 16 --vocab-size 300 --dropout 0.1 --batch-size 2"
    flags = f"{model} --accumulation 2 --steps 6 --save --text {tmp_path / 'text.txt'} --output-dir"
    assert example.main([*flags.split(), str(tmp_path / "straight")]) == 0
    parts = [*flags.split(), str(tmp_path / "parts")]
    stop_after(3, monkeypatch)
    assert example.main(parts) == 130
    assert "--resume" in capsys.readouterr().out
    monkeypatch.undo()
    assert example.main([*parts, "--resume", "--seed", "1"]) == 2
    assert "has --seed 0, not 1; give that" in capsys.readouterr().err
    assert example.main([*parts, "--resume", "--device-memory", "1MiB"]) == 0
    assert "after step 3 of 6" in capsys.readouterr().out
    first, second = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("straight", "parts"))
    assert_same_bits(second, first)


@pytest.mark.parametrize("difference", ["none", "loss", "held-out loss", "state"])
def test_demo_notices_every_difference(difference, example, monkeypatch, capsys, tmp_path):
    report = {"num_parameters": 1, "device_budget_bytes": 1, "device_peak_bytes": 1, "host_peak_bytes": 1}
    score = Score(2.0, 0.5)
    run = Run(
        module=torch.nn.Linear(1, 1),
        report=report | {"uploaded_bytes": 1},
        scores=[score],
        evaluations={1: score},
        test=None,
        tokens_per_second=1.0,
    )
    other = dataclasses.replace(score, loss=2.0000000000000004)
    changes = {
        "none": {},
        "loss": {"scores": [other]},
        "held-out loss": {"evaluations": {1: other}},
        "state": {"module": torch.nn.Linear(1, 1)},
    }
    monkeypatch.setattr(training, "train", lambda *_: dataclasses.replace(run, **changes[difference]))
    task = Task(name="task", train={}, held_out={}, baseline=score, baseline_name="baseline")
    args = example.parse_arguments(["--demo", "--output-dir", str(tmp_path)])
    same = example.compare_with_unbounded(run, task, args, lambda: None, ranks=example.Ranks())
    assert same == (difference == "none")
    assert ("DIFFERENT" in capsys.readouterr().out) == (difference != "none")
