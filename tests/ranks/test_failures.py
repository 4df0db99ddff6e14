import os
import signal
import time

import pytest
import torch
from torch import nn

from patrickstar import StateError
from patrickstar.runtime import initialize_engine
from tests.distributed import rank_outcomes, run_ranks
from tests.models import MODELS
from tests.ranks.runs import rank_and_size, rows
from tests.training import make_config


def train_until_rank_1_is_lost(inside: str) -> None:
    rank, _ = rank_and_size()

    def die(moment: str, step: int) -> None:
        if (rank, step, moment) == (1, 3, inside):
            time.sleep(0.2)
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
            first_layer = engine.module.transformer.h[0].register_forward_pre_hook(
                lambda module, args, step=step: die("forward", step)
            )
            loss = case.loss(engine(**rows(case.batch(generator))))
            first_layer.remove()
            loss.register_hook(lambda grad, step=step: die("backward", step))
            engine.backward(loss)
            die("step", step)
            optimizer.step()


@pytest.mark.parametrize(
    ("moment", "call"),
    [
        ("forward", "forward of step 4"),
        ("backward", "backward of step 4"),
        ("step", "the user's code after backward of step 4"),
    ],
)
def test_the_error_says_in_which_call_a_rank_was_killed(moment, call):
    survivor, lost = rank_outcomes(2, train_until_rank_1_is_lost, moment, timeout_seconds=100)
    print(survivor.error)
    assert lost.returncode == -signal.SIGKILL
    assert survivor.returncode == 1
    assert survivor.error.startswith("RankFailure: ")
    assert f"rank 1 in {call}" in survivor.error


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def leave_out_a_backward() -> tuple[str, float]:
    rank, _ = rank_and_size()
    config = make_config("fp32", device_memory="170KB", default_chunk_size=4160, rank_timeout_seconds=60)
    engine, optimizer = initialize_engine(Skips, 0, config)
    begin = 0.0
    try:
        with engine:
            for step in range(5):
                begin = time.monotonic()
                loss = engine(torch.ones(2, 64))
                if (rank, step) != (1, 3):
                    engine.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    except StateError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "trained", 0.0


def test_a_rank_that_leaves_out_a_backward_is_named_at_once():
    for error, seconds in run_ranks(2, leave_out_a_backward):
        assert error.startswith("RankMismatch: ")
        assert "rank 0 is in backward of step 4" in error and "rank 1 is in forward of step 4" in error
        assert seconds < 30  # half of the timeout


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
    other, at_fault = rank_outcomes(2, train_until_rank_1_raises, timeout_seconds=50)
    print(other.error)
    assert at_fault.error == "ValueError: the batch is bad"
    assert other.error.startswith("RankFailure: rank 0 stops in")
    assert "ValueError: the batch is bad" in other.error
