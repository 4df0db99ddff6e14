"""Ranks whose models take the same other path, or different ones, in a step."""

import random

import pytest
import torch

from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.path_models import Towers, batch, drawn_path, train_plain
from tests.ranks.runs import rank_and_size
from tests.training import make_config

TIGHT = {"device_memory": "800KB", "default_chunk_size": 8192}
AMPLE = {"device_memory": "64MiB", "default_chunk_size": 8192}
COUNTED = ("num_accesses", "num_replayed_accesses", "num_on_demand_fetches", "num_plans")


def train(runs):
    """Each run: arguments of ``train_once``."""
    return [train_once(*run) for run in runs]


def train_once(options, paths, hidden=64):
    """``paths``: by step, that of each rank."""
    rank, size = rank_and_size()
    torch.manual_seed(0)
    config = make_config("fp32", gradient_clipping=0.1, **options)
    engine, optimizer = initialize_engine(lambda: Towers(hidden), rank, config)
    generator = torch.Generator().manual_seed(1)
    losses, counters, before = [], [], None
    with engine:
        for step in paths:
            optimizer.zero_grad()
            of_ranks = [batch(generator, hidden) for _ in range(size)]
            loss = engine(of_ranks[rank].to(engine.device), step[rank])
            engine.backward(loss)
            losses.append(loss.item())
            optimizer.step()
            now = engine.report()
            counters.append({name: now[name] - (before or {}).get(name, 0) for name in COUNTED})
            before = now
        return {"losses": losses, "state": engine.state_dict(), "counters": counters}


def check(num_ranks, all_paths):
    runs = [(options, paths) for paths in all_paths for options in (TIGHT, AMPLE)]
    by_rank = run_ranks(num_ranks, train, runs, timeout_seconds=300)
    for index, paths in enumerate(all_paths):
        wanted = train_plain(paths)
        for rank, results in enumerate(by_rank):
            tight, ample = results[2 * index : 2 * index + 2]
            assert tight["losses"] == ample["losses"]
            assert_same_bits(tight["state"], ample["state"])
            assert tight["losses"] == pytest.approx([step[rank] for step in wanted], rel=2e-6)
    return [[results[2 * index]["counters"] for results in by_rank] for index in range(len(all_paths))]


def test_ranks_switch_together_and_mixed_batches_follow_the_longer_path():
    together = [["" if step % 2 else "ab"] * 2 for step in range(8)]
    mixed = [[["", ""], ["a", ""], ["", "a"], ["a", "a"]][step % 4] for step in range(12)]
    of_together, of_mixed = check(2, [together, mixed])
    for counters in of_together:
        assert all(step["num_replayed_accesses"] == step["num_accesses"] for step in counters[2:])
        assert max(step["num_on_demand_fetches"] for step in counters[2:]) < counters[0]["num_on_demand_fetches"] / 4
        assert all(step["num_plans"] == 0 for step in counters[4:])
    for counters in of_mixed:
        assert all(step["num_replayed_accesses"] == step["num_accesses"] for step in counters[4:])


def test_ranks_with_different_towers_share_one_plan():
    """No rank makes all accesses of the plan that they follow from the third step on."""
    (by_rank,) = check(3, [[["a", "b", "c"]] * 6])
    for counters in by_rank:
        assert all(step["num_replayed_accesses"] == step["num_accesses"] for step in counters[2:])
        assert max(step["num_on_demand_fetches"] for step in counters[2:]) < counters[0]["num_on_demand_fetches"] / 4


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_random_paths_of_ranks_train_as_plain_pytorch(num_ranks):
    generator = random.Random(num_ranks)
    check(num_ranks, [[[drawn_path(generator) for _ in range(num_ranks)] for _ in range(10)] for _ in range(2)])
