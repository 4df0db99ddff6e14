import json

import pytest

from tests.checkpoint.resumed_run import run
from tests.distributed import run_python

pytestmark = pytest.mark.slow

N, M = 4, 4
DEVICE_MEMORY = 400_000
UNLIKE = ("losses", "evictions", "skipped_before_saving")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_new_process_goes_on_bit_for_bit(tmp_path, precision):
    folder = str(tmp_path)
    whole = run(precision, N + M)
    saving = run(precision, N + M, save_at=N, save=folder)
    assert saving["skipped_before_saving"] == (precision == "fp16")
    assert {key: saving[key] for key in whole} == whole  # saving changes nothing
    runs = [
        {"precision": precision, "steps": M, "load": folder},
        {
            "precision": precision,
            "steps": M,
            "load": folder,
            "device_memory": DEVICE_MEMORY,
            "default_chunk_size": 4096,
        },
    ]
    done = run_python("-m", "tests.checkpoint.resumed_run", json.dumps(runs))
    assert done.returncode == 0, done.stderr[-3000:]
    resumed = json.loads(done.stdout.splitlines()[-1])
    assert resumed[1]["evictions"] > 0
    for result in resumed:
        assert result.pop("client_state_is_right")
        assert result["losses"] == whole["losses"][N:]
        for key in result.keys() - set(UNLIKE):
            assert result[key] == whole[key], key
