"""Models that take another path from step to step: each path keeps its plan."""

import random

import pytest
import torch

from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.path_models import Towers, batch, drawn_path, train_plain
from tests.training import make_config

TIGHT = {"device_memory": "600KB", "default_chunk_size": 8192}
AMPLE = {"device_memory": "64MiB", "default_chunk_size": 8192}


def train(paths, options, precision="fp32", hidden=64):
    """Trains one step for each list of micro-batches' paths. Returns losses, state, and counters of each step."""
    torch.manual_seed(0)
    config = make_config(precision, gradient_clipping=0.1, **options)
    engine, optimizer = initialize_engine(lambda: Towers(hidden), 0, config)
    generator = torch.Generator().manual_seed(1)
    losses, counters, before = [], [], None
    with engine:
        for step in paths:
            optimizer.zero_grad()
            for path in step:
                loss = engine(batch(generator, hidden).to(engine.device), path)
                engine.backward(loss / len(step))
                losses.append(loss.item())
            optimizer.step()
            now = engine.report()
            counters.append({name: now[name] - (before or {}).get(name, 0) for name in COUNTED})
            before = now
        return losses, engine.state_dict(), counters


COUNTED = ("num_accesses", "num_replayed_accesses", "num_on_demand_fetches", "num_plans", "uploaded_bytes")


def share_replayed(counters):
    return [step["num_replayed_accesses"] / step["num_accesses"] for step in counters]


def test_paths_that_alternate_keep_their_plans():
    paths = [["" if step % 2 else "ab"] for step in range(10)]
    losses, state, counters = train(paths, TIGHT)
    ample_losses, ample_state, _ = train(paths, AMPLE)
    assert losses == ample_losses
    assert_same_bits(state, ample_state)
    assert losses == pytest.approx(sum(train_plain(paths), []), rel=2e-6)
    assert share_replayed(counters[2:]) == [1.0] * 8
    assert [step["num_plans"] for step in counters[4:]] == [0] * 6
    on_demand = [step["num_on_demand_fetches"] for step in counters]
    print(f"fetched on demand: {on_demand}")
    assert max(on_demand[2:]) < on_demand[0] / 5


def test_a_new_path_follows_what_it_shares_with_the_last_plan():
    counters = train([[""]] * 3 + [["b"]], TIGHT)[2]
    trunk = counters[2]["num_replayed_accesses"]
    assert counters[3]["num_replayed_accesses"] >= trunk
    assert counters[3]["num_accesses"] > trunk


@pytest.mark.parametrize("pair", [("ab", "aB"), ("a", "A"), ("abc", "bca")])
def test_paths_that_differ_late_keep_their_plans(pair):
    """The forward is the same and the backward is not, or the same towers come in another order."""
    paths = [[pair[step % 2]] for step in range(6)]
    losses, state, counters = train(paths, TIGHT)
    assert_same_bits(state, train(paths, AMPLE)[1])
    assert losses == pytest.approx(sum(train_plain(paths), []), rel=2e-6)
    assert share_replayed(counters[2:]) == [1.0] * 4


def test_numbers_of_micro_batches_alternate():
    paths = [["", "a"] if step % 2 else [""] for step in range(6)]
    losses, state, counters = train(paths, TIGHT)
    assert_same_bits(state, train(paths, AMPLE)[1])
    assert losses == pytest.approx(sum(train_plain(paths), []), rel=2e-6)
    assert share_replayed(counters[2:]) == [1.0] * 4


@pytest.mark.parametrize("num_paths", [8, 9])
def test_eight_paths_are_kept(num_paths):
    """The path that was taken longest ago goes: of nine in turn each is new again."""
    paths = ["", "a", "b", "ab", "ba", "A", "B", "AB", "Ba"][:num_paths]
    counters = train([[path] for path in ["", *paths, *paths]], TIGHT)[2]
    again = [step["num_plans"] for step in counters[-num_paths:]]
    assert again == [0 if num_paths == 8 else 1] * num_paths


@pytest.mark.parametrize("seed", range(3))
def test_random_paths_train_as_plain_pytorch(seed):
    """Also more paths than are kept."""
    generator = random.Random(seed)
    paths = [[drawn_path(generator) for _ in range(generator.randint(1, 2))] for _ in range(14)]
    losses, state, counters = train(paths, TIGHT)
    ample_losses, ample_state, _ = train(paths, AMPLE)
    assert losses == ample_losses
    assert_same_bits(state, ample_state)
    assert losses == pytest.approx(sum(train_plain(paths), []), rel=2e-6)
    print(f"replayed: {[round(share, 2) for share in share_replayed(counters)]}")
    assert min(share_replayed(counters[1:])) > 0.2
