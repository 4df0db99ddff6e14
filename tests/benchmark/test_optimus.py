import json
import sys

import pytest

from benchmark import optimus, run


@pytest.mark.slow
def test_steps_are_those_that_are_planned(monkeypatch, capsys):
    small = "--gpus 4 --layers 2 --hidden-per-side 256 --batch-per-side 4 --seq-len 128 --gpus-per-node 2 --links ib400"
    monkeypatch.setattr(sys, "argv", ["run", "optimus", "--json", *small.split()])
    run.main()
    result = json.loads(capsys.readouterr().out)
    (row,) = result["rows"]
    assert result["simulated"] and row["paper_speedup"] == 0.86
    ways = row["ways"]
    assert (ways["square"]["rows"], ways["square"]["columns"], ways["1D"]["columns"]) == (2, 2, 4)
    assert ways["fewest"]["received_bytes"] <= ways["square"]["received_bytes"]
    assert ways["square"]["speedup"] == ways["1D"]["step_seconds"] / ways["square"]["step_seconds"]
    for way in ways.values():
        assert way["speedup_over_best"] < way["speedup"]
        assert 0 < way["exposed_seconds"] < way["step_seconds"]
    table = optimus.format_table(result)
    assert table.startswith("SIMULATED, nothing ran") and " 2 x 2 " in table


def test_meshes_that_are_no_squares_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run", "optimus", "--gpus", "8"])
    with pytest.raises(ValueError, match="--gpus 8 is no square"):
        run.main()
