import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.pages import ROOT, Page, run_page

README = Page(ROOT / "README.md")
RESULTS = ROOT / "benchmark" / "results"

# Rows that the README calls measured: file, tokens per GPU and step, and system.
MEASURED = {
    "Llama-3.1-8B, 4 x 4096 | H200, at most 40 GiB": ("h200-compare-llama-8b-40gib-harmless.json", 4 * 4096),
    "Llama-3.1-8B, 4 x 4096 | H200 (FSDP2": ("h200-compare-llama-8b-whole-gpu.json", 4 * 4096),
    "Llama-3.1-8B, 4 x 4096 | two H200s": ("h200x2-compare-llama-8b-40gib-harmless.json", 4 * 4096),
    "Qwen2.5-14B, 4 x 4096": ("h200-compare-qwen-14b-acting.json", 4 * 4096),
    "GPT 68 B, 16 x 1024": ("h200x4-compare-68b.json", 16 * 1024),
    "GPT 110 B, 4 x 1024": ("h200x2-compare-110b-no-master.json", 4 * 1024),
}


def test_it_is_short():
    assert len(README.text.splitlines()) <= 110


@pytest.mark.slow
def test_code_blocks_run_and_train(tmp_path):
    done = run_page(README, tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^\d+ (\d+\.\d+)", done.stdout, re.MULTILINE)]
    assert len(losses) == 8 and losses[-1] < losses[0]


@pytest.mark.slow
def test_commands_run_when_pasted_into_an_empty_folder(tmp_path):
    blocks = [block.text for block in README.blocks("bash") if re.search("^patrickstar ", block.text, re.MULTILINE)]
    shell = f'set -e; patrickstar() {{ {shlex.quote(sys.executable)} -m patrickstar "$@"; }}\n'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = ""
    for text in blocks:
        done = subprocess.run(
            ["bash", "-c", shell + text], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "tokens/s" in done.stdout
        printed += done.stdout
    (answer,) = re.findall(r'"answer": "(.+)"}', README.text)
    before, after = printed.split("answers after the training")
    assert answer not in before and f"> Who trained you?\n    {answer}\n" in after


def rows(kind):
    lines = [line.strip("| ") for line in README.text.splitlines() if line.endswith(f"| {kind} |")]
    assert lines
    return lines


def test_measured_rows_are_those_of_the_results():
    for line in rows("measured"):
        name, tokens = next(found for begin, found in MEASURED.items() if line.startswith(begin))
        systems = {run["system"]: run for run in json.loads((RESULTS / name).read_text(encoding="utf-8"))["systems"]}
        host, rate = line.split(" | ")[2:4]
        assert rate == f"{tokens / systems['patrickstar']['step_seconds']:,.0f}", line
        assert host == f"{systems['patrickstar']['host_peak_bytes'] / 2**30:.0f} GiB", line
        for beside in re.findall(r"FSDP2, .*?: ([\d,]+)\)", line):
            assert beside == f"{tokens / systems['fsdp2']['step_seconds']:,.0f}", line


def test_comparisons_are_those_of_the_records():
    found = re.findall(r"\| ([^|]+) \| \[([^]]+)\]\(benchmark/results/([^)]+)\) \|$", README.text, re.MULTILINE)
    assert len(found) == 6
    for other, ours, name in found:
        text = (RESULTS / name).read_text(encoding="utf-8")
        theirs = other.rpartition(": ")[2]
        if name.endswith(".json"):
            systems = {run["system"]: run["step_seconds"] for run in json.loads(text)["systems"]}
            assert ours == f"{systems['patrickstar']:.2f} s"
            assert theirs.removesuffix(" per step") == f"{systems['fsdp2']:.2f} s"
        else:
            for figure in (ours, theirs):
                assert figure.replace(",", "").partition(" ")[0] in text


def test_predicted_rows_are_those_of_the_planner():
    recorded = (RESULTS / "plan-advice.txt").read_text(encoding="utf-8").lower()
    for line in rows("predicted"):
        model, work, gpu, host, rate = re.match(r"(.+?), (.+?) \| (.+?) \| (\d+ GiB) \| (.+?) \|", line).groups()
        batch, length = work.split(" x ")
        asked = re.escape(f"{model} on {gpu.replace(' ', '').removesuffix('80GB')}, {host.replace(' ', '')}".lower())
        flags = f"--batch-size {batch} --seq-len {length}"
        found = [text for text in re.split(r"\n(?! )", recorded) if re.match(asked, text) and flags in text]
        assert found and f" {rate} tokens/s" in found[0], line


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    shell = "\n".join(block.text for block in README.blocks("bash"))
    named = {*re.findall(r"`make ([a-z-]+)", README.text), *re.findall(r"^make ([a-z-]+)", shell, re.MULTILINE)}
    assert {"demo", "env"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
