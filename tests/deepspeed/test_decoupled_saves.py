import errno
import signal
import threading

import pytest

from patrickstar import CheckpointError, SavedRun, close_open_engine
from patrickstar.checkpoint import latest_tag
from tests.bits import assert_same_bits
from tests.checkpoint.test_later_saves import Gate
from tests.deepspeed.test_partial_checkpoints import BATCHES, engine_of, train

DECOUPLED = {"checkpoint": {"writer": {"type": "FAST", "decoupled": True}}}


def test_a_decoupled_writer_goes_on_beside_training(tmp_path, monkeypatch):
    engine = engine_of(0, **DECOUPLED)
    train(engine, BATCHES[:2])
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    gate = Gate(monkeypatch)
    assert engine.save_checkpoint(str(tmp_path), client_state={"epoch": 1})
    train(engine, BATCHES[2:4])
    assert latest_tag(tmp_path) is None
    threading.Timer(0.2, gate.opened.set).start()
    path, client_state = engine.load_checkpoint(str(tmp_path))
    assert (path, client_state) == (str(tmp_path / "global_step2"), {"epoch": 1})
    assert_same_bits(dict(engine.state_dict()), before)
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()  # waits
    assert latest_tag(tmp_path) == "global_step2"


def test_its_failure_comes_in_the_next_step(tmp_path, monkeypatch):
    engine = engine_of(0, **DECOUPLED)
    train(engine, BATCHES[:1])
    engine.save_checkpoint(str(tmp_path))
    engine.wait_for_save()
    with monkeypatch.context() as patched:
        Gate(patched, OSError(errno.EIO, "bad disk")).opened.set()
        train(engine, BATCHES[1:2])
        engine.save_checkpoint(str(tmp_path))
        engine._session.saves._thread.join()
        with pytest.raises(CheckpointError, match="'global_step2' was not saved .* bad disk"):
            train(engine, BATCHES[2:3])
    assert latest_tag(tmp_path) == "global_step1"
    engine.destroy()


def run(folder, stop_after=None):
    engine = engine_of(0)
    with SavedRun(engine, folder) as saved:
        for step in range(saved.client_state.get("step", 0), 6):
            if step == stop_after:
                signal.raise_signal(signal.SIGUSR1)
            train(engine, BATCHES[step : step + 1])
            saved.after_step({"step": step + 1})
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    counts = engine.global_steps, engine.get_lr()
    engine.destroy()
    return state, counts


def test_a_saved_run_with_its_schedule_and_counts(tmp_path):
    with pytest.raises(SystemExit):
        run(tmp_path / "stopped", 2)
    assert latest_tag(tmp_path / "stopped") == "global_step3"
    close_open_engine()
    (found, counts), (whole, expected) = run(tmp_path / "stopped"), run(tmp_path / "whole")
    assert_same_bits(found, whole)
    assert counts == expected == (6, counts[1])


def test_other_writers_are_complete_when_the_call_returns(tmp_path, monkeypatch):
    engine = engine_of(0, checkpoint={"writer": {"type": "FAST"}})
    Gate(monkeypatch)  # stays closed: a thread would wait
    engine.save_checkpoint(str(tmp_path))
    assert latest_tag(tmp_path) == "global_step0"
    engine.destroy()
