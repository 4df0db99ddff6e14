import pytest
import torch
from torch import nn

import patrickstar
from patrickstar.elastic import ElasticSampler, MicroBatches, serve_rendezvous
from patrickstar.planning.micro_batches import MARGIN_RATIO, most_samples
from patrickstar.runtime import initialize_engine
from tests.distributed import run_ranks
from tests.elastic.runs import tidal_engine, tidal_steps, train_with_the_activation_memory
from tests.elastic.test_resize import ALONE


def measured(samples, device_memory):
    engine, optimizer = tidal_engine(device_memory)
    for _ in range(2):
        engine.backward(engine(torch.ones(samples, 16, 32)).square().mean())
        optimizer.step()
    return engine


def answer(engine, samples, upto=1000, limit_bytes=None):
    session = engine._session
    limit = session.runtime.plan_problem()["limit_bytes"] if limit_bytes is None else limit_bytes
    host_bytes = session.runtime.report()["host_budget_bytes"]
    accesses = session.runtime.timeline()
    return most_samples(session.layout, accesses, samples=samples, upto=upto, limit_bytes=limit, host_bytes=host_bytes)


def test_what_is_said_to_fit_fits_and_little_more_does():
    device_memory = 600_000
    with measured(2, device_memory) as engine:
        most = answer(engine, 2)
        assert 4 < most < 100
        assert answer(engine, 2, upto=most - 1) == most - 1
        assert answer(engine, 2, limit_bytes=device_memory // 2) < most // 2 + 1
        assert answer(engine, 2, limit_bytes=1000) == 2  # which was seen to fit
        assert answer(engine, 2, limit_bytes=patrickstar._C.UNLIMITED) == 2
        with pytest.raises(ValueError, match="samples is 0"):
            answer(engine, 0)
    with measured(most, device_memory) as engine:
        assert abs(answer(engine, most) - most) <= 1  # no less was measured than was foretold
    with pytest.raises(patrickstar.MemoryBudgetError):
        measured(int(most / (1 - MARGIN_RATIO)) + 2, device_memory)


def run(micro_batches, resizes):
    engine, optimizer = tidal_engine(600_000)
    sampler = ElasticSampler(96, 24, 2, seed=1, micro_batches=micro_batches)
    losses, sizes, expected = [], [], [2]
    with engine:
        for step, batches in enumerate(tidal_steps(sampler)):
            found = []
            for inputs, targets in batches:
                loss = nn.functional.mse_loss(engine(inputs), targets)
                engine.backward(loss / len(batches))
                found.append(loss.item())
            optimizer.step()
            losses.append(sum(found) / len(found))
            sizes.append(len(batches[0][0]))
            expected.append(sizes[-1])
            if step in resizes:
                most = answer(engine, sizes[-1], upto=24)
                engine.resize(1, user_state={"sampler": sampler})
                if micro_batches is MicroBatches.BY_ACTIVATIONS:
                    expected[-1] = next(size for size in range(most, 0, -1) if 24 % size == 0)
    return losses, sizes, expected[:-1]


def test_the_micro_batch_follows_from_the_first_resize_on():
    losses, sizes, expected = run(MicroBatches.BY_ACTIVATIONS, (1, 2))
    assert sizes == expected
    assert 2 == sizes[1] < sizes[2] <= sizes[3]
    straight, fixed, _ = run(MicroBatches.AT_MOST, (1, 2))
    assert fixed == [2, 2, 2, 2]
    assert losses == pytest.approx(straight, rel=1e-5)
    unresized, sizes, _ = run(MicroBatches.BY_ACTIVATIONS, ())
    assert sizes == [2, 2, 2, 2]
    assert unresized == straight  # to the bit


def test_ranks_agree_and_a_process_that_joins_takes_it_over(tmp_path):
    store = serve_rendezvous("127.0.0.1", 0)
    address = f"127.0.0.1:{store.port}"
    results = run_ranks(2, train_with_the_activation_memory, address, str(tmp_path), environment=lambda number: ALONE)
    with measured(2, 600_000) as engine:
        most = answer(engine, 2, upto=12)
    largest = next(size for size in range(most, 0, -1) if 12 % size == 0)
    assert results[0] == [2, 2, largest, largest]
    assert results[1] == [largest, largest]


def test_an_engine_that_counts_micro_batches_refuses():
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
    engine, *_ = patrickstar.initialize(model=nn.Linear(2, 2), config=config)
    sampler = ElasticSampler(8, 4, 2, micro_batches=MicroBatches.BY_ACTIVATIONS)
    with engine, pytest.raises(ValueError, match="MicroBatches.AT_MOST"):
        engine.resize(1, user_state={"sampler": sampler})
    plain, _ = initialize_engine(lambda: nn.Linear(2, 2))
    with plain:  # before a step nothing is known
        plain.resize(1, user_state={"sampler": sampler})
        assert sampler.max_micro_batch == 2
