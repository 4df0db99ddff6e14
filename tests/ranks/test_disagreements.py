"""Ranks that train alike in all calls but with other settings, or have dropped their gradients alone, are told so."""

import torch
from torch import nn

from patrickstar.runtime import initialize_engine
from tests.distributed import rank_outcomes
from tests.ranks.runs import rank_and_size
from tests.training import make_config


def train(change_rates: bool) -> None:
    """A schedule that follows each rank's own loss, or a rank that drops the gradients of a bad batch."""
    rank, _ = rank_and_size()
    engine, optimizer = initialize_engine(lambda: nn.Linear(8, 8), 0, make_config("fp32", rank_timeout_seconds=30))
    with engine:
        for step in range(4):
            engine.backward(engine(torch.ones(2, 8)).square().mean())
            if step == 2 and change_rates:
                optimizer.param_groups[0]["lr"] /= 1 + rank
            elif step == 2:
                if rank == 0:
                    optimizer.zero_grad()
                engine.backward(engine(torch.ones(2, 8)).square().mean())
            optimizer.step()


def test_other_learning_rates():
    for outcome in rank_outcomes(2, train, True, timeout_seconds=60):
        assert outcome.error
        assert "the options of the parameter groups" in outcome.error


def test_gradients_that_one_rank_has_dropped():
    for outcome in rank_outcomes(2, train, False, timeout_seconds=60):
        assert "after 0 forwards and backwards" in outcome.error
        assert "after 2 forwards and backwards" in outcome.error
        assert "did not take part" not in outcome.error
