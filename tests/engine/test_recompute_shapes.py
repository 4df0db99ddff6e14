"""The choice of recomputation while batches change their shapes."""

import contextlib
import functools
import itertools
import random

import pytest
import torch

from patrickstar import MemoryBudgetError
from patrickstar.activations.activation_rules import Saved
from tests.engine.test_recompute_choice import LAYERS, batch, opened, saved_of, step
from tests.models import gpt2
from tests.recomputing import choose_by_fixed_times


@pytest.fixture
def choosing(monkeypatch):
    choose_by_fixed_times(monkeypatch.setattr)


def test_larger_batches_recompute_more_and_never_less_again(choosing, caplog):
    engine, optimizer = opened()
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        step(engine, optimizer, batch(generator, rows=2))
    counts = []
    with caplog.at_level("INFO", "patrickstar"):
        for rows in (3, 4, 8, 2):
            step(engine, optimizer, batch(generator, rows=rows))
            counts.append(sum(list(Saved).index(kept) for kept in saved_of(engine)))
    assert 2 * LAYERS > counts[0] > counts[1] > counts[2] == counts[3]
    assert "any before: more is recomputed" in caplog.text
    engine.discard()


def test_the_plan_follows_larger_batches_within_two_steps(choosing):
    """Later changes of the size cost no fetch on demand, and at most a plan for each growth."""
    engine, optimizer = opened(device_memory="4MB")
    generator, saved = torch.Generator().manual_seed(0), []
    sizes, keys = (2, 2, 2, 4, 4, 4, 2, 4, 2, 4), ("accesses", "replayed_accesses", "on_demand_fetches", "plans")
    counts = [[engine.report()[f"num_{key}"] for key in keys]]
    for rows in sizes:
        step(engine, optimizer, batch(generator, rows=rows))
        saved.append(saved_of(engine))
        counts.append([engine.report()[f"num_{key}"] for key in keys])
    engine.discard()
    steps = [[after - before for before, after in zip(*pair, strict=True)] for pair in itertools.pairwise(counts)]
    print(steps)
    first = sizes.index(4)
    assert saved[first - 1] != saved[first] == saved[-1]
    assert steps[first][0] > steps[first][1]
    for number in range(first + 1, len(sizes)):
        accesses, replayed, on_demand, plans = steps[number]
        assert replayed == accesses
        assert on_demand <= (1 if number == first + 1 else 0)
        assert plans <= (1 if number == first + 1 or sizes[number] > sizes[number - 1] else 0)


def outcomes_of(recompute, device_memory, shapes):
    """Losses, up to the first step that runs out of memory, and whether calls saved anything."""
    small = functools.partial(gpt2, layers=2, dropout=0.1, length=64)
    engine, optimizer = opened(small, device_memory=device_memory, activations={"recompute": recompute})
    generator, losses, has_saved = torch.Generator().manual_seed(0), [], False
    with contextlib.suppress(torch.OutOfMemoryError, MemoryBudgetError):
        for shape in shapes:
            losses.append(step(engine, optimizer, batch(generator, *shape)))
            has_saved |= any(kept is not Saved.NOTHING for kept in saved_of(engine))
    engine.discard()
    return losses, has_saved


SHAPE_BUDGETS = (500_000, 1_500_000, 1_750_000, 2_000_000, 2_500_000)


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 28))])
def test_random_shapes_fail_no_more_than_with_all_recomputed(choosing, seed):
    """105 sequences of shapes. Full recomputation fails in each within the least budget."""
    shapes = random.Random(seed)
    sizes = [(shapes.randint(1, 4), 8 * shapes.randint(1, 8)) for _ in range(10)]
    num_steps, have_saved = [], []
    for device_memory in SHAPE_BUDGETS:
        always, _ = outcomes_of("always", device_memory, sizes)
        auto, has_saved = outcomes_of("auto", device_memory, sizes)
        assert auto[: len(always)] == always
        num_steps.append(len(always))
        have_saved.append(has_saved)
    print(num_steps, have_saved)
    assert num_steps[0] < num_steps[-1] == len(sizes)
