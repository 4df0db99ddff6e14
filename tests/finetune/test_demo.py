import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.example_runs import check_report, figure, run_example


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("demo") / "output"
    small = ("--hidden", 128, "--vocab-size", 400, "--seq-len", 96, "--batch-size", 1, "--lr", "5e-3")
    flags = (*small, "--device-memory", "8MiB", "--steps", 50, "--precision", "fp32", "--output-dir", folder)
    result = run_example("finetune_llm.py", "--demo", *flags)
    assert result.returncode == 0, result.stderr
    return folder, result.stdout


def commands_after(output: str) -> list[str]:
    lines = output.split("\nNext:\n")[1].splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def run_in_shell(command: str) -> str:
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_demo_learns_and_keeps_its_budget(demo):
    folder, output = demo
    check_report(output.split("\nThe same run")[0], "unigram baseline")
    summary = output.split("\nDemo\n")[1]
    assert "50 losses, 6 held-out scores: bitwise the same without the budget" in summary
    assert "final state_dict: bitwise the same without the budget" in summary
    budget = figure(summary, r"device budget +([0-9.]+) MiB")
    picture = Path(re.search(r"picture +(\S+\.svg)", summary).group(1))
    assert picture.is_relative_to(folder) and picture.stat().st_size > 10_000
    assert figure(summary, r"device peak +([0-9.]+) MiB") <= budget < figure(summary, r"model data +([0-9.]+) MiB")


@pytest.mark.slow
def test_the_commands_that_the_demo_prints_work(demo):
    folder, output = demo
    ask, tune, plan, flags = commands_after(output)
    assert all(command.count(sys.executable) == 1 for command in (ask, tune, plan, flags))
    assert run_in_shell(ask)
    assert f"saved to {folder}/next/adapter" in run_in_shell(f"{tune} --steps 1 --samples 0")
    assert run_in_shell(plan).startswith("FITS: ")
    assert "(default: demo-output" not in run_in_shell(flags)
