import os
import signal
import threading
import time

import pytest
import torch

from patrickstar import _C
from patrickstar.ranks.distributed import open_ranks
from patrickstar.ranks.failures import DisagreementError, abort_all
from patrickstar.ranks.run_secret import SECRET_VARIABLE, write_secret
from patrickstar.ranks.wording import describe_disagreement, format_ranks
from tests.distributed import GRACE_SECONDS, rank_outcomes, run_ranks

TIMEOUT_SECONDS = 6
# Enough for imports and exits of processes on two busy cores; a hang takes longer.
PATIENCE_SECONDS = 90


def gather_forever(at_round_ten):
    with open_ranks(timeout_seconds=TIMEOUT_SECONDS) as ranks:
        whole = torch.zeros(ranks.gather.size * 1000)
        for index in range(1000):
            with ranks.guard(f"round {index}"):
                if index == 10 and ranks.context.rank == 2:
                    at_round_ten()
                ranks.gather.all_gather(whole.data_ptr(), 4000)
            time.sleep(0.001)


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error():
    raise ValueError("the batch is bad")


def sleep_long():
    time.sleep(1000)


def survivors(outcomes, *failed):
    return [outcome for rank, outcome in enumerate(outcomes) if rank not in failed]


def test_a_killed_rank():
    outcomes = rank_outcomes(3, gather_forever, kill_self, timeout_seconds=PATIENCE_SECONDS)
    assert outcomes[2].returncode == -signal.SIGKILL
    for outcome in survivors(outcomes, 2):
        print(outcome.error)
        assert outcome.returncode == 1
        assert outcome.error.startswith("RankFailure: ")
        assert "rank 2 of 3 failed rank" in outcome.error and "all_gather" in outcome.error


def test_a_rank_that_raises():
    outcomes = rank_outcomes(3, gather_forever, raise_error, timeout_seconds=PATIENCE_SECONDS)
    assert outcomes[2].error == "ValueError: the batch is bad"
    for outcome in survivors(outcomes, 2):
        print(outcome.error)
        assert outcome.error.startswith("RankFailure: rank ")
        assert "rank 2: ValueError: the batch is bad (round 10)" in outcome.error


@pytest.mark.slow
def test_a_rank_that_hangs():
    # The launcher kills it, as torchrun does.
    outcomes = rank_outcomes(
        3, gather_forever, sleep_long, timeout_seconds=PATIENCE_SECONDS, grace_seconds=GRACE_SECONDS
    )
    assert outcomes[2].returncode is None
    for outcome in survivors(outcomes, 2):
        print(outcome.error)
        assert outcome.error.startswith("RankFailure: ")
        assert "rank 2" in outcome.error
        assert "did not take part within" in outcome.error or "a collective has not ended for" in outcome.error


def raise_and_stay():
    with open_ranks(timeout_seconds=1000) as ranks:
        try:
            with ranks.guard("step 3"):
                if ranks.context.rank == 1:
                    raise_error()
                ranks.control.exchange(b"")
        except (ValueError, _C.RankFailure) as error:
            text = str(error)
        time.sleep(3)
        return text


def test_a_rank_that_raises_and_stays_does_not_keep_the_others_until_the_timeout():
    mine, other = run_ranks(2, raise_and_stay, timeout_seconds=PATIENCE_SECONDS)
    assert other == "the batch is bad"
    print(mine)
    assert "rank 1: ValueError: the batch is bad (step 3)" in mine


def stop_heartbeat():
    with open_ranks(timeout_seconds=TIMEOUT_SECONDS) as ranks:
        if ranks.context.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        with ranks.guard("computing"):
            while True:
                ranks.gather.check()
                time.sleep(0.05)


@pytest.mark.slow
def test_a_stopped_process_is_missed_by_its_heartbeat():
    outcomes = rank_outcomes(3, stop_heartbeat, timeout_seconds=PATIENCE_SECONDS, grace_seconds=GRACE_SECONDS)
    for outcome in survivors(outcomes, 1):
        print(outcome.error)
        assert f"rank 1 has given no sign of life for {TIMEOUT_SECONDS} s (seen by rank 0)" in outcome.error


def wait_for_a_killed_rank():
    with open_ranks(timeout_seconds=1000) as ranks, ranks.guard("computing"):
        if ranks.context.rank == 1:
            time.sleep(1)  # the others are in no call of which it is a part
            kill_self()
        while True:
            ranks.gather.check()
            time.sleep(0.05)


def test_the_runs_store_tells_of_a_killed_rank(tmp_path):
    write_secret(tmp_path / "secret")
    own = {SECRET_VARIABLE: str(tmp_path / "secret")}
    outcomes = rank_outcomes(
        3, wait_for_a_killed_rank, environment=lambda _: own, timeout_seconds=PATIENCE_SECONDS
    )  # fmt: skip
    for outcome in survivors(outcomes, 1):
        print(outcome.error)
        assert "rank 1's process has ended; see its output" in outcome.error


def open_and_close(timeout_seconds):
    with open_ranks(timeout_seconds=timeout_seconds):
        pass


@pytest.mark.slow
def test_a_rank_that_never_comes():
    outcomes = rank_outcomes(4, open_and_close, 8, timeout_seconds=PATIENCE_SECONDS, absent=(1, 3))
    for outcome in survivors(outcomes, 1, 3):
        print(outcome.error)
        assert outcome.error == "RankFailure: ranks 1, 3 of 4 did not come within 8 s; see their output"


@pytest.mark.slow
def test_the_rank_with_the_store_never_comes():
    outcomes = rank_outcomes(2, open_and_close, 3, timeout_seconds=PATIENCE_SECONDS, absent=(0,))
    print(outcomes[1].error)
    assert "RankFailure: rank 1 could not reach torch's store, which rank 0 serves at 127.0.0.1:" in outcomes[1].error


def disagree():
    with open_ranks(timeout_seconds=TIMEOUT_SECONDS) as ranks:
        ranks.check_agreement("model", "the same")
        try:
            with ranks.guard("initialisation"):
                ranks.check_agreement("config", "{...}" if ranks.context.rank == 1 else "{lr: 1}")
        except DisagreementError as error:
            assert isinstance(error, _C.StateError)
            return str(error)


def test_ranks_that_disagree_are_told_at_once():
    (text,) = set(run_ranks(3, disagree, timeout_seconds=PATIENCE_SECONDS))
    print(text)
    assert text == "ranks disagree on config; it must be the same on all. ranks 0, 2: {lr: 1}; rank 1: {...}"


def leave_without_closing():
    ranks = open_ranks(timeout_seconds=TIMEOUT_SECONDS)
    if ranks.context.rank == 1:
        return
    ranks.close()


def test_leaving_without_closing():
    outcomes = rank_outcomes(2, leave_without_closing, timeout_seconds=PATIENCE_SECONDS)
    assert outcomes[1].returncode == 0, outcomes[1].output
    print(outcomes[0].error)
    assert outcomes[0].error.startswith("RankFailure: ") and "rank 1" in outcomes[0].error


def abort_from_a_thread():
    with open_ranks(timeout_seconds=1000) as ranks:
        if ranks.context.rank == 0:
            threading.Timer(0.5, ranks.gather.abort).start()
            with pytest.raises(_C.RankFailure, match="aborted on this rank"):
                ranks.gather.all_gather(torch.zeros(2).data_ptr(), 4)
            with pytest.raises(_C.RankFailure, match="aborted on this rank"):
                ranks.gather.all_gather(torch.zeros(2).data_ptr(), 4)
        ranks.control.exchange(b"")


def test_abort_ends_a_collective_of_another_thread():
    run_ranks(2, abort_from_a_thread, timeout_seconds=PATIENCE_SECONDS)


def test_words():
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
    text = describe_disagreement("config", {0: "a" * 500 + "x" + "b" * 500, 1: "a" * 500 + "y"})
    assert text.endswith(f"rank 0: ...{'a' * 25}x{'b' * 74}...; rank 1: ...{'a' * 25}y")


def test_all_parts_are_aborted_at_once():
    at_once = threading.Barrier(3)
    met = []

    class Part:
        def abort(self):
            at_once.wait(10)
            met.append(self)

    abort_all([Part() for _ in range(3)])
    assert len(met) == 3
