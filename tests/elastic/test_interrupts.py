import signal

import pytest
import torch

from patrickstar.elastic import ResizePhase
from patrickstar.runtime import initialize_engine
from tests.distributed import run_ranks
from tests.elastic.runs import Preempted, build, interrupt_the_second_rank, preempt_twice, raise_preempted, state_of
from tests.elastic.test_resize import assert_same
from tests.training import make_config

BEFORE = (ResizePhase.GATHER, ResizePhase.PUBLISH, ResizePhase.CHECK)
"""Phases in which a signal's exception is raised at once."""


@pytest.fixture
def handlers():
    """A shell's background jobs ignore SIGINT."""
    own = {signal.SIGINT: signal.default_int_handler, signal.SIGUSR1: raise_preempted}
    before = {signum: signal.signal(signum, handler) for signum, handler in own.items()}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def press_ctrl_c_twice():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("interrupt", "kind"), [(press_ctrl_c_twice, KeyboardInterrupt), (preempt_twice, Preempted)])
def test_an_interrupted_engine_is_whole_and_trains_on(interrupt, kind, tmp_path):
    engine, optimizer = initialize_engine(build, 0, make_config(default_chunk_size=16384))
    with engine:
        for wanted in ResizePhase:
            engine.backward(engine(torch.ones(2, 16)).square().mean())
            optimizer.step()
            before, seen = state_of(engine, optimizer), []

            def note(phase, wanted=wanted, seen=seen):
                seen.append(phase)
                if phase is wanted:
                    interrupt()

            with pytest.raises(kind):
                engine.resize(1, folder=str(tmp_path), note_phase=note)
            assert (seen[-1] is wanted) == (wanted in (*BEFORE, ResizePhase.CONFIRM))
            assert_same(before, state_of(engine, optimizer))
            assert not list(tmp_path.iterdir())


def test_a_rank_that_is_interrupted_leaves_the_others_as_they_were(tmp_path):
    first, second = run_ranks(2, interrupt_the_second_rank, str(tmp_path))
    for phase in ResizePhase:
        raised, is_same = first[str(phase)]
        assert second[str(phase)] == ("Preempted: ", True)
        assert is_same
        assert ("rank 1: Preempted" in raised) == (phase in BEFORE), raised
    raised, is_same = first["save"]
    assert raised.startswith("CheckpointError:") and "rank 1: Preempted" in raised and is_same
    assert second["save"] == ("Preempted: ", True)
    assert not list(tmp_path.glob("patrickstar-*"))
