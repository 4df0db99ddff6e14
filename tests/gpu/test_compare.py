import json

import pytest

from benchmark import compare

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

LIMIT_BYTES = 4 * 2**30


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    done = {}

    def run(system):
        if system not in done:
            results = tmp_path_factory.mktemp(system) / "out.json"
            flags = (
                "--model 0.1b --batch-size 2 --seq-len 256 --warmup 2 --steps 3 --device-memory 4GiB --clip 1.0 --json"
            )
            assert compare.main([*flags.split(), str(results), "--system", system]) == 0
            done[system] = json.loads(results.read_text())
        return done[system]["systems"][0], done[system]["num_parameters"]

    return run


@pytest.mark.parametrize("name", ["patrickstar", "fsdp2", "fsdp2-offload"])
def test_a_system_stays_within_its_limit_and_is_measured(run, name):
    system, num_parameters = run(name)
    assert system["outcome"] == "trained", system
    assert 0 < system["device_peak_bytes"] <= LIMIT_BYTES
    activity = system["gpu_activity"]
    assert activity is not None, system["gpu_activity_missing_because"]
    assert activity["computing_seconds"] > 0
    assert 0 <= system["exposed_seconds"] < system["step_seconds"]
    if name == "fsdp2-offload":  # all parameters up, all gradients down
        assert activity["uploaded_bytes"] > 2 * num_parameters
        assert activity["downloaded_bytes"] > 2 * num_parameters


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2-offload"])
def test_a_peer_trains_the_same_thing(run, name):
    assert run(name)[0]["losses"] == pytest.approx(run("patrickstar")[0]["losses"], abs=2e-2)
