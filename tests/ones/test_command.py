import json
import math
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from patrickstar.command.ones import main
from patrickstar.ones import Cluster, artifact_mix, figures, make_policy, philly_like, read_trace, simulate, write_trace
from patrickstar.ones.report import mean_and_interval
from tests.ones.jobs import linear_job


@pytest.mark.parametrize("make", [artifact_mix, philly_like])
def test_traces_come_back_as_they_were_written(make, tmp_path):
    trace = make(6, seed=4)
    write_trace(tmp_path / "jobs.jsonl", trace)
    assert read_trace(tmp_path / "jobs.jsonl") == trace
    assert make(6, seed=4) == trace and make(6, seed=5) != trace


def test_the_mix_is_the_artifacts():
    trace = artifact_mix(2000, seed=0)
    gaps = np.diff([item.job.arrival_s for item in trace])
    assert math.isclose(gaps.mean(), 30, rel_tol=0.06) and math.isclose(gaps.std(), 30, rel_tol=0.1)
    sizes = [item.job.requested_gpus for item in trace]
    assert all(math.isclose(sizes.count(n), 500, rel_tol=0.12) for n in (2, 4, 8, 16))
    assert len({item.job.workload for item in trace}) == 10


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is no trace: its first line must be"),
        (["{}"], "is no trace"),
        (["HEAD", "[1]"], ":2: '.1.' is no JSON object"),
        (["HEAD", "{"], ":2: no JSON"),
        (["HEAD", "{}"], ":2: the key 'job' is missing"),
        (["HEAD", "JOB", "", "JOB"], ":4: there is a job 0000-.* before"),
        (["HEAD", "WRONG"], ":2: job 0000-.*: min_gpus 0"),
        (["HEAD", "OTHER"], ":2: .*unexpected keyword argument 'colour'"),
    ],
)
def test_wrong_traces_are_named_by_their_line(lines, message, tmp_path):
    write_trace(tmp_path / "good", artifact_mix(1, seed=0))
    head, job = (tmp_path / "good").read_text().splitlines()
    wrong = job.replace('"min_gpus": 1', '"min_gpus": 0')
    known = {"HEAD": head, "JOB": job, "WRONG": wrong, "OTHER": job[:-1] + ', "colour": 1}'}
    (tmp_path / "bad").write_text("\n".join(known.get(line, line) for line in lines))
    with pytest.raises(ValueError, match=message):
        read_trace(tmp_path / "bad")


def test_figures_are_those_of_the_schedule():
    """One node of 4 GPUs: a holds all from 0 to 100, b (arrives at 10) two of them from 100 to 130."""
    trace = (linear_job("a", 0, 4, 100), linear_job("b", 10, 2, 30))
    found = figures(simulate(trace, make_policy("fifo"), Cluster(4)))
    assert math.isclose(found.mean_jct_s, (100 + 120) / 2) and math.isclose(found.makespan_s, 130)
    assert math.isclose(found.p99_jct_s, 119.8) and math.isclose(found.utilisation, (400 + 60) / (4 * 130))


def test_intervals_are_students():
    values = np.random.default_rng(0).normal(size=12)
    low, high = stats.t.interval(0.95, 11, loc=values.mean(), scale=stats.sem(values))
    mean, half = mean_and_interval(list(values))
    np.testing.assert_allclose([mean - half, mean + half], [low, high], rtol=1e-3)
    assert math.isnan(mean_and_interval([1.0])[1])


def test_the_command_compares_and_draws(tmp_path, capsys):
    assert main(["trace", str(tmp_path / "t.jsonl"), "--jobs", "3", "--seed", "1"]) == 0
    arguments = ["simulate", "--trace", str(tmp_path / "t.jsonl"), "--policies", "fifo,srtf", "--resize-s", "5"]
    assert main([*arguments, "--compare-to", "fifo", "--pictures", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "64 GPUs, 5 s per resize" in printed and "x fifo" in printed
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == ["gantt-fifo-5s.png", "gantt-srtf-5s.png", "jct-5s.png"]
    assert (tmp_path / "gantt-fifo-5s.png").read_bytes().startswith(b"\x89PNG")
    assert main([*arguments, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["policy"], row["resize_s"]) for row in rows] == [("fifo", 5.0), ("srtf", 5.0)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "fifo,drl"], "there is no policy 'drl'; choose among fifo"),
        (["--resize-s", "5,-1"], "--resize-s: it is '-1'; give a number of at least 0"),
        (["--policies", "fifo", "--compare-to", "srtf"], "--compare-to srtf is none of --policies fifo"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_wrong_arguments_are_said_in_a_line(arguments, message, capsys):
    try:
        status = main(["simulate", *arguments])
    except SystemExit as stop:
        status = stop.code
    said = capsys.readouterr().err
    assert status == 2 and message in said and said.count("\n") == 1


def test_neither_pytorch_nor_the_extension_nor_matplotlib_is_imported():
    code = "import sys, patrickstar.command.ones; print([m for m in sys.modules if m in "
    code += "('torch', 'patrickstar._C', 'matplotlib')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
