import os
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from patrickstar import MemoryBudgetError, RankFailure
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import run_ranks

ROWS = [4, 4, 48, 4, 160]
"""Of each step's batch on the first rank; the second has half of them in odd steps."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x.square().mean()


def train(budget, done):
    rank = int(os.environ.get("RANK", 0))
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(Net, 0, {"device_memory": budget, "default_chunk_size": 4160})
    with engine:
        for step, rows in enumerate(ROWS):
            generator = torch.Generator().manual_seed(10 * step + rank)
            optimizer.zero_grad()
            engine.backward(engine(torch.randn(rows // (1 + rank * (step % 2)), 64, generator=generator)))
            optimizer.step()
            done.append(step)
        return engine.state_dict()


def climb():
    """Obeys each error; (budget, steps done) of each attempt."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
    seen, budget = [], 1
    while True:
        done = []
        try:
            state = train(budget, done)
            break
        except (MemoryBudgetError, RankFailure) as error:  # the second: another rank was the first to say it
            named = int(re.search(r"at least (\d+) bytes", str(error)).group(1))
        finally:
            seen.append((budget, len(done)))
        budget = named
    roomy = train(10**9, [])
    if dist.is_initialized():
        dist.destroy_process_group()
    assert_same_bits(state, roomy)
    return seen


def check(seen):
    print(seen)
    budgets, steps = zip(*seen, strict=True)
    assert list(budgets) == sorted(set(budgets)), "each error names more than what there was"
    # The first error, of an engine that cannot be opened, leaves the activations out and says so.
    assert list(steps[1:]) == sorted(set(steps[1:])), "each step that failed is passed with the budget that was named"
    assert steps[-1] == len(ROWS)


def test_one_process():
    check(climb())


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks(num_ranks):
    results = run_ranks(num_ranks, climb)
    check(results[0])
    assert results.count(results[0]) == num_ranks
