"""A rank is lost in the middle of training: the others end with an error that names it, not in an abort."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from patrickstar.runtime import initialize_engine
from tests.distributed import rank_outcomes, run_ranks
from tests.models import MODELS
from tests.ranks.runs import lose_gradients, rank_and_size, rows
from tests.training import make_config


def train_until_rank_1_is_lost(before: str) -> None:
    rank, _ = rank_and_size()

    def die(moment: str, step: int) -> None:
        if (rank, step, moment) == (1, 3, before):
            os.kill(os.getpid(), signal.SIGKILL)

    case = MODELS["gpt2"]
    # Every value is gathered in forward and again in backward.
    config = make_config("fp32", device_memory="1MB", default_chunk_size=16384, rank_timeout_seconds=20)
    engine, optimizer = initialize_engine(case.build, 0, config)
    with engine:
        engine.train()
        generator = torch.Generator().manual_seed(1)
        for step in range(6):
            optimizer.zero_grad()
            die("forward", step)
            loss = case.loss(engine(**rows(case.batch(generator))))
            die("backward", step)
            engine.backward(loss)
            die("step", step)
            optimizer.step()


@pytest.mark.parametrize("moment", ["forward", "backward", "step"])
def test_a_rank_that_is_killed_in_training(moment):
    survivor, lost = rank_outcomes(2, train_until_rank_1_is_lost, moment, timeout_seconds=100)
    print(survivor.error)
    assert lost.returncode == -signal.SIGKILL
    assert survivor.returncode == 1
    assert survivor.error.startswith("RankFailure: ")
    assert "rank 1" in survivor.error


def train_until_rank_1_raises() -> None:
    engine, optimizer = initialize_engine(MODELS["gpt2"].build, 0, make_config("fp32", rank_timeout_seconds=60))
    with engine:
        generator = torch.Generator().manual_seed(1)
        for step in range(4):
            if step == 2 and rank_and_size()[0] == 1:
                raise ValueError("the batch is bad")
            optimizer.zero_grad()
            engine.backward(engine(**rows(MODELS["gpt2"].batch(generator))).loss)
            optimizer.step()


def test_an_error_between_two_calls_of_the_engine_ends_all_ranks():
    """Well before the timeout, and the others' error quotes it."""
    other, at_fault = rank_outcomes(2, train_until_rank_1_raises, timeout_seconds=50)
    print(other.error)
    assert at_fault.error == "ValueError: the batch is bad"
    assert other.error.startswith("RankFailure: rank 0 stops in")
    assert "ValueError: the batch is bad" in other.error


@pytest.mark.parametrize(("lost", "counts"), [("bias", (32, 31)), ("weight and bias", (32, 30))])
def test_ranks_that_add_up_other_gradients_are_told_how_many(lost, counts):
    """In the fourth step, which replays a plan; at once, and not by timeout. The one that finds it later may be told
    by the other."""
    for message, seconds in run_ranks(2, lose_gradients, lost, 1):
        assert "RankMismatch: in this backward ranks that share chunks added up" in message
        assert "rank 0: {}, rank 1: {} times".format(*counts) in message
        assert seconds < 15  # of a timeout of 20
