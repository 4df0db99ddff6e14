import os
import signal
import subprocess
import sys
import time

import pytest

from patrickstar.checkpoint import latest_tag, tags
from patrickstar.checkpoint.disk import Disk
from patrickstar.engine import saved_run
from tests.bits import assert_same_bits
from tests.distributed import ROOT, rank_outcomes, run_ranks
from tests.engine.saved_run import STEPS, Clock, be_stopped, trained, trained_by_clock, trained_twice

PREEMPTED = 75


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_run_that_a_signal_ends_goes_on_with_the_same_bits(signum, tmp_path):
    former = signal.getsignal(signum)
    with pytest.raises(SystemExit) as ended:
        trained(tmp_path / "stopped", stop_after=3, stop=lambda: signal.raise_signal(signum))
    assert ended.value.code == PREEMPTED
    assert signal.getsignal(signum) is former
    begin, found = trained(tmp_path / "stopped")
    assert begin == 4
    assert_same_bits(found, trained(tmp_path / "whole")[1])
    assert tags(tmp_path / "whole") == []


def test_one_ranks_signal_ends_all_in_the_same_step(tmp_path):
    ended = rank_outcomes(2, trained, str(tmp_path), 2, 1)
    assert [rank.error for rank in ended] == [f"SystemExit: {PREEMPTED}"] * 2
    assert latest_tag(tmp_path) == "global_step3"
    assert [begin for begin, _ in run_ranks(2, trained, str(tmp_path))] == [3, 3]


@pytest.mark.parametrize(("grace", "steps"), [(9, 3), (11, 4)])
def test_a_step_that_does_not_fit_is_undone(grace, steps, tmp_path, monkeypatch, caplog):
    """A signal in the second of three forwards, 10 s each: the rest of the step takes 10 s."""
    with pytest.raises(SystemExit) as ended:
        trained(tmp_path / "run", 3, 0, True, Clock(monkeypatch), grace_seconds=grace)
    assert ended.value.code == PREEMPTED
    assert latest_tag(tmp_path / "run") == f"global_step{steps}"
    assert ("step 3 does not fit, and is undone" in caplog.text) == (steps == 3)
    begin, found = trained(tmp_path / "run")
    assert begin == steps
    assert_same_bits(found, trained(tmp_path / "whole")[1])


def test_ranks_undo_a_step_together(tmp_path):
    ended = rank_outcomes(2, trained_by_clock, str(tmp_path / "run"), 3, 1, True, 9)
    assert [rank.error for rank in ended] == [f"SystemExit: {PREEMPTED}"] * 2
    assert latest_tag(tmp_path / "run") == "global_step3"
    for (begin, found), (_, whole) in run_ranks(2, trained_twice, str(tmp_path / "run"), str(tmp_path / "whole")):
        assert begin == 3
        assert_same_bits(found, whole)


def test_a_save_beyond_the_grace_says_what_is_missing(tmp_path, monkeypatch, caplog):
    write = Disk.write

    def slow(disk, fd, data):
        deadline = time.monotonic() + 20
        while "not saved yet" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        return write(disk, fd, data)

    monkeypatch.setattr(Disk, "write", slow)
    with pytest.raises(SystemExit) as ended:
        trained(tmp_path, 2, minutes=0, grace_seconds=0.05)
    assert ended.value.code == PREEMPTED
    assert "grace_seconds (0.05) are over and the run is not saved yet, 0 bytes are written; killed" in caplog.text
    assert "after grace_seconds and ends with status 75" in caplog.text
    assert latest_tag(tmp_path) in ("global_step2", "global_step3")


def test_a_step_beyond_the_grace_is_reported(tmp_path, caplog):
    def stop():
        be_stopped()
        deadline = time.monotonic() + 20
        while "not saved yet" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        said.append(caplog.text)

    said = []
    with pytest.raises(SystemExit):
        trained(tmp_path, 2, stop=stop, minutes=0, grace_seconds=0.05)
    assert "0 bytes are written; killed now, it goes on from its begin" in said[0]


def test_torchrun_that_is_told_twice_ends_a_saved_run(tmp_path):
    """torchrun signals all processes of a rank, DataLoader workers too, and does so again after a second signal."""
    folder = tmp_path / "run"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    with subprocess.Popen(
        [*torchrun, "-m", "tests.engine.saved_run", str(folder)],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as launcher:  # fmt: skip
        read_until(launcher.stdout, "ready")
        launcher.send_signal(signal.SIGTERM)
        for _rank in range(2):
            read_until(launcher.stdout, "closing signal SIGTERM")
        time.sleep(0.5)
        launcher.send_signal(signal.SIGTERM)
        (folder / "go").touch()
        output = launcher.communicate(timeout=60)[0]
    assert launcher.returncode == 1, output
    assert "ends with status 75" in output and "forcefully" not in output
    for (begin, found), (_, whole) in run_ranks(2, trained_twice, str(folder), str(tmp_path / "whole")):
        assert begin == 4
        assert_same_bits(found, whole)


def read_until(lines, wanted):
    read = []
    for line in lines:
        read.append(line)
        if wanted in line:
            return
    pytest.fail(f"{wanted!r} is not in the output:\n{''.join(read)}")


def test_a_signal_that_ends_a_dataloaders_worker_is_reported(tmp_path, caplog):
    """The kernel's SIGTERM to a worker comes with the rank's own."""

    def stop():
        be_stopped()
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated.")

    with pytest.raises(RuntimeError, match="is killed by signal"):
        trained(tmp_path, 3, stop=stop)
    assert "RuntimeError ended the run before it was saved; the next start goes on from its begin; give" in caplog.text
    assert "worker_init_fn=patrickstar.SavedRun.detach_worker" in caplog.text


@pytest.mark.parametrize(("wait", "warns"), [(None, True), ("60", True), ("120", False)])
def test_a_grace_longer_than_torchruns_wait_is_reported(wait, warns, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    if wait is not None:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", wait)
    trained(tmp_path, grace_seconds=120)
    said = f"grace_seconds is 120, but torchrun kills its ranks {wait or 30} s after a signal"
    assert (said in caplog.text) == warns == ("torchrun" in caplog.text)


def test_saves_of_the_clock_go_on_beside_training(tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr(saved_run.time, "monotonic", lambda: next(clock))
    trained(tmp_path, minutes=1, keep=2)
    kept = tags(tmp_path)
    print(kept)
    assert 2 <= len(kept) <= 3 and latest_tag(tmp_path) in kept
    assert int(latest_tag(tmp_path).removeprefix("global_step")) > STEPS - 4


def test_a_wrong_number_is_refused(tmp_path):
    with pytest.raises(ValueError, match="grace_seconds is 0; give more than 0"):
        trained(tmp_path, grace_seconds=0)
    with pytest.raises(ValueError, match="keep is 0 and minutes is 60.0; keep at least 1"):
        trained(tmp_path, keep=0)
