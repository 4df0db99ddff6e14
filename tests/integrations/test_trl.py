import pytest
from trl import DPOTrainer, SFTTrainer

from tests.integrations import trl_runs
from tests.training import relative_error

MEASURED = ("step_time", "runtime", "per_second")


def numbers(run):
    own = ("patrickstar/", "total_flos", "train_")
    return [
        {key: value for key, value in entry.items() if not key.startswith(own) and not key.endswith(MEASURED)}
        for entry in run.history
    ]


@pytest.mark.parametrize("kind", ["sft", "dpo", "dpo_lora"])
def test_logs_are_those_of_one_process(two_ranks, tmp_path, kind):
    if kind == "sft":
        plain = trl_runs.sft(SFTTrainer, tmp_path)
    else:
        plain = trl_runs.dpo(DPOTrainer, tmp_path, lora=kind == "dpo_lora")
    assert len(plain.losses) == 3 and len(plain.evals) == 2
    for rank in two_ranks:
        run = rank["trl"][kind]
        for entry, expected in zip(numbers(run), numbers(plain), strict=True):
            assert entry == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert relative_error(run, plain) < 2e-5
