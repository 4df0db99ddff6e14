import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import helper
import torch
from patrickstar.runtime import initialize_engine

assert __name__ == "__main__"
steps, status = map(int, sys.argv[1:])
model, optimizer = initialize_engine(helper.make, config={"device_memory": "400KB", "default_chunk_size": 4096})
for step in range(steps):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 64)).square().mean()
    model.backward(loss)
    optimizer.step()
print("trained", steps)
sys.exit(status)
"""
HELPER = """
from torch import nn

def make():
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "helper.py").write_text(HELPER)
    path = tmp_path / "train me.py"
    path.write_text(SCRIPT)
    return path


def profile(*arguments, cwd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "patrickstar.profile", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)


def test_profile(script, tmp_path):
    done = profile("--step", 3, "--output", "out", script, 5, 0, cwd=tmp_path)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "trained 5"
    assert lines[1].startswith("step 3: ")
    assert any(line.strip().startswith("roofline") for line in lines)
    out = tmp_path / "out"
    names = ["step3.svg", "step3.trace.json", "step3.txt"]
    assert sorted(file.name for file in out.iterdir()) == names
    assert all(str(out / name) in lines[-1] for name in names)
    assert json.loads((out / "step3.trace.json").read_text())["otherData"]["step"] == 3


def test_the_status_of_the_script(script, tmp_path):
    done = profile(script, 4, 7, cwd=tmp_path)
    assert done.returncode == 7
    assert (tmp_path / "profile" / "step4.txt").read_text() in done.stdout


def test_a_script_that_ends_too_early(script, tmp_path):
    done = profile(script, 3, 0, cwd=tmp_path)
    assert done.returncode == 1
    assert "no step was profiled" in done.stderr
    assert "trained 3" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"), [(["nowhere.py"], "no script nowhere.py"), (["--step", "0", "x.py"], "--step: it is '0'")]
)
def test_errors(arguments, message, tmp_path):
    done = profile(*arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr
