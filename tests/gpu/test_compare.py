"""``benchmark.compare`` on a GPU: limits bind, the profiler's figures are there, and all train the same thing."""

import json

import pytest

from benchmark import compare

pytestmark = pytest.mark.gpu

LIMIT_BYTES = 4 * 2**30


def test_compare(tmp_path, capsys):
    systems = ["patrickstar", "fsdp2", "fsdp2-offload"]
    flags = "--model 0.1b --batch 2 --length 256 --warmup 2 --steps 3 --gpu-mem 4GiB --clipping 1.0 --json"
    assert compare.main([*flags.split(), str(tmp_path / "out.json"), "--system", *systems]) == 0
    print(capsys.readouterr().out)
    results = json.loads((tmp_path / "out.json").read_text())
    by_name = {system["system"]: system for system in results["systems"]}
    num_parameters = results["num_parameters"]
    for system in by_name.values():
        assert system["outcome"] == "trained", system
        assert system["losses"] == pytest.approx(by_name["patrickstar"]["losses"], abs=2e-2)
        assert 0 < system["device_peak_bytes"] <= LIMIT_BYTES
        assert system["gpu_activity"] is not None, system["gpu_activity_missing_because"]
        assert system["gpu_activity"]["computing_seconds"] > 0
        assert 0 <= system["exposed_seconds"] < system["step_seconds"]
    offloaded = by_name["fsdp2-offload"]["gpu_activity"]  # all parameters up, all gradients down
    assert offloaded["uploaded_bytes"] > 2 * num_parameters
    assert offloaded["downloaded_bytes"] > 2 * num_parameters
