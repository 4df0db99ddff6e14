import json
import sys

import pytest

from benchmark import panels, run

SMALL = "--model tiny --seq-len 16 --batch-size 2 --chunk-numel 65536 --warmup 2 --steps 1"


def measured(monkeypatch, capsys, *more):
    monkeypatch.setattr(sys, "argv", ["run", "panels", "--json", *SMALL.split(), *more])
    run.main()
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_panels_come_from_the_host_with_the_same_losses(monkeypatch, capsys):
    result = measured(monkeypatch, capsys, "--device-memory", "2MiB")
    resident, chunks = result["rows"]
    assert resident["uploaded_bytes"] == 0 and resident["num_device_state_chunks"] == resident["num_chunks"]
    assert chunks["uploaded_bytes"] > 0 and chunks["num_device_state_chunks"] < chunks["num_chunks"]
    assert result["same_losses"] and len(resident["losses"]) == 3 and resident["losses"] == chunks["losses"]
    assert result["of_resident"] == resident["step_seconds"] / chunks["step_seconds"] > 0
    assert resident["tflops_per_gpu"] * resident["step_seconds"] == pytest.approx(
        chunks["tflops_per_gpu"] * chunks["step_seconds"]
    )
    table = panels.format_table(result)
    assert "over 1 x 2" in table and "the same losses" in table and "failed" not in table


def test_runs_that_fail_have_a_reason_and_no_figures(monkeypatch, capsys):
    result = measured(monkeypatch, capsys, "--timeout", "0.01")
    assert [row["reason"].split(":")[0] for row in result["rows"]] == ["timed out"] * 2
    assert result["of_resident"] is None
    assert "host chunks   failed: timed out: more than 0.01 s" in panels.format_table(result)
