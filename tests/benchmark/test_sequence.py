import argparse
import json
import re
import sys

import pytest

from benchmark import run, sequence

pytestmark = pytest.mark.slow

SMALL = "--lengths 64 128 --heads 4 --key-heads 2 --head-dim 16 --warmup 1 --iterations 3 --dtype float32"


def options(text):
    parser = argparse.ArgumentParser()
    sequence.add_arguments(parser)
    return parser.parse_args(text.split())


def test_systems_compute_the_same_and_those_that_fail_are_named(monkeypatch, capsys):
    systems = "sdpa-flash sdpa-cudnn zigzag ring ulysses context-parallel-allgather-flash"
    monkeypatch.setattr(sys, "argv", ["run", "sequence", "--json", *SMALL.split(), "--systems", *systems.split()])
    run.main()
    result = json.loads(capsys.readouterr().out)
    print(sequence.format_table(result))
    measured = [(row["system"], row["ranks"], row["length"]) for row in result["rows"]]
    assert measured == [
        (system, 1 if system == "sdpa-flash" else 2, length)
        for system in ("sdpa-flash", "zigzag", "ring", "ulysses")
        for length in (64, 128)
    ]
    for row in result["rows"]:
        assert row["gap"] < 1e-5 and row["of_linear"] > 0 and len(row["seconds"]) == 3
        assert 0 < row["median_forward_seconds"] < row["median_seconds"]
    assert [failure["system"] for failure in result["failures"]] == ["sdpa-cudnn", "context-parallel-allgather-flash"]
    assert all(re.match(r"rank \d: ", failure["reason"]) for failure in result["failures"])
    assert "sdpa-cudnn failed: rank 0: " in sequence.format_table(result)


def test_a_system_that_takes_too_long_is_ended():
    result = sequence.run(options(f"{SMALL} --systems zigzag --timeout 0.5"))
    assert result["rows"] == [] and result["failures"] == [{"system": "zigzag", "reason": "more than 0.5 s"}]


def test_a_length_that_fails_leaves_those_before_it():
    result = sequence.run(options(f"{SMALL} --lengths 16 34 --systems zigzag"))
    assert [row["length"] for row in result["rows"]] == [16]
    assert "17 tokens, which are not two equal slices" in result["failures"][0]["reason"]
