import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.failing_allocations import SCENARIOS

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def failing_new(tmp_path_factory):
    library = tmp_path_factory.mktemp("failing") / "failing_new.so"
    compiler = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-shared", "-fPIC"]
    subprocess.run([*compiler, "-o", str(library), str(HERE / "failing_new.cpp")], check=True)
    return library


def fail_each(library, stride, first, scenarios):
    command = [sys.executable, "-m", "tests.engine.failing_allocations", str(stride), str(first), *scenarios]
    environment = {**os.environ, "LD_PRELOAD": str(library), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{ended.returncode}: {ended.stderr[-4000:]}"
    return json.loads(ended.stdout)


def check(results):
    for scenario, outcomes in results.items():
        print(f"{scenario}: {outcomes}")
        assert {outcome.split()[0] for outcome in outcomes} == {"forward", "backward", "step"}
        refused = [outcome for outcome in outcomes if "refused" in outcome]
        assert refused == (["backward refused until a checkpoint was loaded"] if "commit" in scenario else [])


def test_some_allocations(failing_new):
    results = fail_each(failing_new, 61, 7, ["settled", "commit", "disk"])
    check(results)
    assert sum(sum(outcomes.values()) for outcomes in results.values()) > 40


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_allocation(scenario, failing_new):
    results = fail_each(failing_new, 1, 1, [scenario])
    check(results)
    assert sum(results[scenario].values()) > 200
