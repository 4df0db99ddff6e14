import signal

import pytest
import torch

from patrickstar.elastic import ResizePhase, serve_rendezvous
from patrickstar.runtime import initialize_engine
from tests.distributed import rank_outcomes
from tests.elastic.runs import build, joining_steps, kill_and_go_on, state_of
from tests.elastic.test_resize import ALONE, assert_same
from tests.training import make_config

UNDECIDED = (ResizePhase.GATHER, ResizePhase.PUBLISH, ResizePhase.CHECK)
"""Phases in which a joining process may be killed without harm to the old ranks."""
GROW, SHRINK = [1, 2, 3], [1, 2, 1]
LEADER, MEMBER, JOINING = 0, 1, 2
CASES = [
    *((GROW, victim, phase) for victim in (LEADER, MEMBER, JOINING) for phase in ResizePhase),
    *((SHRINK, victim, phase) for victim in (LEADER, MEMBER) for phase in ResizePhase),
]
"""Phases of the second resize; when it shrinks to one rank, MEMBER leaves after its phase CLOSE."""
FEW = [(GROW, JOINING, ResizePhase.CHECK), (SHRINK, MEMBER, ResizePhase.PUBLISH)]


def run(plan, victim, phase, folder, shards):
    store = serve_rendezvous("127.0.0.1", 0)
    return rank_outcomes(
        len(joining_steps(plan)),
        kill_and_go_on,
        f"127.0.0.1:{store.port}",
        plan,
        (victim, phase),
        str(folder),
        str(shards),
        environment=lambda number: ALONE,
        timeout_seconds=100,
    )


def check(plan, victim, phase, folder, own_folders="."):
    outcomes = run(plan, victim, phase, folder, folder / own_folders)
    killed, others = outcomes[victim], [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    leaves_before = (
        plan is SHRINK and victim == MEMBER and phase in (ResizePhase.OPEN, ResizePhase.BUILD, ResizePhase.CONFIRM)
    )
    assert killed.returncode == (0 if leaves_before else -signal.SIGKILL), killed.output
    for outcome in others:
        assert outcome.returncode == 0, outcome.output  # nobody hangs, nobody has an error but those expected
    nobody_is_left = (
        plan is SHRINK and victim == LEADER and phase in (ResizePhase.OPEN, ResizePhase.BUILD, ResizePhase.CONFIRM)
    )
    left = [path for path in folder.rglob("patrickstar-*") if path.parent != folder / str(victim)]
    assert nobody_is_left or not left  # shared memory is not left behind, but for that of a host where nobody is
    ends = [outcome.value["end"] for outcome in others]
    if leaves_before:
        assert ends == ["resized"]
    elif victim == JOINING and phase in UNDECIDED:
        assert ends == ["stayed", "stayed"]
        for outcome in others:  # with all they had, and trained a step on
            assert_same(outcome.value["before"], outcome.value["after"])
            assert outcome.value["num_steps"] == 3
    else:
        assert set(ends) <= {"failed", "left", "not joined"}
        assert "resized" not in ends
    befores = [outcome.value["before"] for outcome in others if "before" in outcome.value]
    engine, optimizer = initialize_engine(build, 0, make_config(default_chunk_size=16384))
    with engine:  # in any case its last checkpoint is one from which the job could go on
        engine.load_checkpoint(folder)
        loaded = state_of(engine, optimizer)
        assert loaded["steps"] == 2
        for before in befores:
            assert_same(before, loaded)
        engine.backward(engine(torch.ones(1, 16)).square().mean())
        optimizer.step()


@pytest.mark.parametrize(("plan", "victim", "phase"), FEW)
def test_one_is_killed(plan, victim, phase, tmp_path):
    check(plan, victim, phase, tmp_path)


@pytest.mark.slow
def test_one_is_killed_that_others_fetch_from(tmp_path):
    for number in range(3):
        (tmp_path / str(number)).mkdir()
    check(GROW, MEMBER, ResizePhase.CHECK, tmp_path, own_folders="{}")


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "victim", "phase"), [case for case in CASES if case not in FEW])
def test_any_is_killed(plan, victim, phase, tmp_path):
    check(plan, victim, phase, tmp_path)


def test_there_are_forty_points():
    assert len(CASES) >= 40
