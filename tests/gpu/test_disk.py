import pytest

from tests.engine.test_disk import check_passed_through, config_of, on_disk
from tests.gpu.test_equality import MIB, WIDE
from tests.training import assert_same, train

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]
CHUNKS = {"default_chunk_size": MIB}


@pytest.mark.parametrize("speculation", ["never", "always", "commit"])
@pytest.mark.parametrize("on_device", [False, True])
def test_no_number_changes(speculation, on_device, tmp_path):
    expected = train(WIDE, config_of(on_device=on_device, speculation=speculation, **CHUNKS))
    budget = expected.report["num_parameters"] * 14 // (2 if on_device else 4)  # a quarter has no room for states
    more = {"speculation": speculation, "on_device": on_device, "device_memory": budget}
    run = train(WIDE, on_disk(tmp_path, 0.2, case=WIDE, **more, **CHUNKS))
    print(f"{run.report['num_disk_chunks']} of {run.report['num_chunks']} chunks on disk, {run.report['disk_io']}")
    assert_same(run, expected)
    check_passed_through(run.report)
    assert (run.report["num_device_state_chunks"] > 0) == on_device


@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_formats_of_states(states, tmp_path):
    expected = train(WIDE, config_of(states=states, **CHUNKS))
    run = train(WIDE, on_disk(tmp_path, 0.2, case=WIDE, states=states, **CHUNKS))
    assert_same(run, expected)
    check_passed_through(run.report)
