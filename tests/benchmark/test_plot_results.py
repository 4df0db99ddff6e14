import json
from pathlib import Path

from benchmark.plot_results import plot, step_seconds

RESULTS = Path(__file__).resolve().parents[2] / "benchmark" / "results"


def test_systems_of_the_file_and_of_the_log(tmp_path):
    result = json.loads((RESULTS / "h200-compare-4.3b-24gib.json").read_text())
    log = (RESULTS / "h200-compare-4.3b-24gib.log").read_text()
    seconds = step_seconds(result, log)
    assert list(seconds) == ["patrickstar", "fsdp2", "fsdp2-offload", "deepspeed-zero3-offload"]
    measured = {run["system"]: run["step_seconds"] for run in result["systems"]}
    assert all(seconds[system] == value for system, value in measured.items())
    assert seconds["deepspeed-zero3-offload"] == 2.807  # the middle of five
    plot(result, log, tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()
