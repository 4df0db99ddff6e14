import json
import re
import sys

import pytest

from benchmark import run, tensor2d

SMALL = "--seq-len 8 --hidden 16 --heads 2 --layers 1 --dtype float32 --warmup 0 --iterations 2 --rounds 1"


def measured(monkeypatch, capsys, *more):
    monkeypatch.setattr(sys, "argv", ["run", "tensor2d", "--json", *SMALL.split(), *more])
    run.main()
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_systems_compute_the_same_and_those_that_fail_are_named(monkeypatch, capsys):
    systems = ["dtensor", "columns", "rows", "one-dimension", "square"]
    result = measured(monkeypatch, capsys, "--tokens", "32", "16", "--systems", *systems)
    assert [(row["system"], row["mesh"], row["tokens"]) for row in result["rows"]] == [
        (system, mesh, tokens)
        for system, mesh in (("dtensor", "1D"), ("columns", "1 x 2"), ("rows", "2 x 1"), ("one-dimension", "1D"))
        for tokens in (16, 32)
    ]
    for row in result["rows"]:
        assert row["gap"] < 1e-5 and 0 < row["of_best"] <= 1 and len(row["seconds"]) == 2
        assert 0 < row["median_forward_seconds"] < row["median_seconds"] and row["exposed_seconds"] is None
    assert [failure["system"] for failure in result["failures"]] == ["square"]
    table = tensor2d.format_table(result)
    assert re.search(r"square failed: rank \d: ValueError: 2 ranks are no square mesh", table)
    assert "OTHER NUMBERS" not in table and "longest kernels" not in table


@pytest.mark.slow
def test_a_system_takes_its_turns(monkeypatch, capsys):
    result = measured(monkeypatch, capsys, "--tokens", "16", "--systems", "columns", "--rounds", "2")
    (row,) = result["rows"]
    assert len(row["seconds"]) == 4 and len(row["round_medians"]) == 2 and row["of_best"] == 1.0


def test_tokens_that_are_no_whole_sequences_are_refused(monkeypatch, capsys):
    with pytest.raises(ValueError, match="--tokens 20 are no whole sequences of 8"):
        measured(monkeypatch, capsys, "--tokens", "20")


def test_kernels_of_the_fastest_and_of_ours_are_under_the_table():
    def row(system, seconds):
        kernels = [{"name": f"kernel of {system}", "seconds": seconds / 2, "number": 3}]
        return {"system": system, "tokens": 16, "median_seconds": seconds, "profile": {"kernels": kernels}}

    rows = [row("columns", 0.4), row("dtensor", 0.1), row("rows", 0.2), row("dtensor-compiled-async", 0.3)]
    assert tensor2d._kernels(rows) == [
        "longest kernels of dtensor, 16 tokens, on rank 0:",
        "     50.00 ms     3 x  kernel of dtensor",
        "longest kernels of rows, 16 tokens, on rank 0:",
        "    100.00 ms     3 x  kernel of rows",
    ]
    assert len(tensor2d._kernels([row("columns", 0.4), row("rows", 0.2)])) == 2
    assert tensor2d._kernels([{"system": "rows", "profile": None, "median_seconds": 1.0}]) == []
