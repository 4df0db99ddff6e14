import signal

import pytest

from patrickstar.checkpoint import latest_tag, tags
from patrickstar.engine import saved_run
from tests.bits import assert_same_bits
from tests.distributed import rank_outcomes, run_ranks
from tests.engine.saved_run import STEPS, trained

PREEMPTED = 75


def test_a_run_that_a_signal_ends_goes_on_with_the_same_bits(tmp_path):
    former = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(SystemExit) as ended:
        trained(tmp_path / "stopped", stop_after=3)
    assert ended.value.code == PREEMPTED
    assert signal.getsignal(signal.SIGUSR1) is former
    begin, found = trained(tmp_path / "stopped")
    assert begin == 4
    assert_same_bits(found, trained(tmp_path / "whole")[1])
    assert tags(tmp_path / "whole") == []


def test_one_ranks_signal_ends_all_in_the_same_step(tmp_path):
    ended = rank_outcomes(2, trained, str(tmp_path), 2, 1)
    assert [rank.error for rank in ended] == [f"SystemExit: {PREEMPTED}"] * 2
    assert latest_tag(tmp_path) == "global_step3"
    assert [begin for begin, _ in run_ranks(2, trained, str(tmp_path))] == [3, 3]


def test_saves_of_the_clock_go_on_beside_training(tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr(saved_run.time, "monotonic", lambda: next(clock))
    trained(tmp_path, minutes=1, keep=2)
    kept = tags(tmp_path)
    print(kept)
    assert 2 <= len(kept) <= 3 and latest_tag(tmp_path) in kept
    assert int(latest_tag(tmp_path).removeprefix("global_step")) > STEPS - 4


def test_a_wrong_number_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep is 0 and minutes is 60.0; keep at least 1"):
        trained(tmp_path, keep=0)
