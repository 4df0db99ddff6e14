import math

import pytest
import torch
from torch.utils.data import TensorDataset

from patrickstar.elastic.batches import LearningRateRule, divide_batch, learning_rate_factor
from patrickstar.elastic.sampler import ElasticLoader, ElasticSampler


def test_the_global_batch_is_kept():
    for num_ranks in (1, 2, 3, 4, 6, 12):
        for most in (1, 2, 5, 100):
            division = divide_batch(12, num_ranks, most)
            assert division.global_batch == 12
            assert division.micro_batch <= most
            larger = range(division.micro_batch + 1, min(most, 12 // num_ranks) + 1)
            assert all((12 // num_ranks) % size for size in larger)
    with pytest.raises(ValueError, match="equal parts for 5 ranks"):
        divide_batch(12, 5, 4)
    with pytest.raises(ValueError, match="max_micro_batch is 0"):
        divide_batch(12, 2, 0)


def test_learning_rate_rules():
    assert learning_rate_factor(LearningRateRule.NONE, 8, 32) == 1.0
    assert learning_rate_factor(LearningRateRule.SQUARE_ROOT, 8, 32) == 2.0
    ramp = [learning_rate_factor(LearningRateRule.LINEAR, 8, 32, step, 3) for step in range(5)]
    assert ramp == pytest.approx([1.0, 2.0, 3.0, 4.0, 4.0])
    assert learning_rate_factor(LearningRateRule.LINEAR, 32, 8) == 0.25
    back = learning_rate_factor(LearningRateRule.SQUARE_ROOT, 32, 8)
    assert math.isclose(back * learning_rate_factor(LearningRateRule.SQUARE_ROOT, 8, 32), 1.0)
    with pytest.raises(ValueError, match="at least 1"):
        learning_rate_factor(LearningRateRule.NONE, 0, 8)


def epoch_with(sizes, num_workers=0):
    data = TensorDataset(torch.arange(50))
    samplers = {}
    steps, state = [], None
    for num_ranks in sizes:
        step = []
        for rank in range(num_ranks):
            sampler = samplers.setdefault(rank, ElasticSampler(50, 12, 2, seed=7))
            if state is not None:
                sampler.load_state_dict(state)
            sampler.set_ranks(rank, num_ranks)
            micro_batches = next(iter(ElasticLoader(data, sampler, num_workers=num_workers)))
            assert len(micro_batches) == 12 // num_ranks // sampler.division.micro_batch
            step += [sample for (batch,) in micro_batches for sample in batch.tolist()]
        state = samplers[0].state_dict()
        steps.append(step)
    return steps


def test_each_sample_is_seen_once_at_any_number_of_ranks():
    one = epoch_with([1, 1, 1, 1])
    changing = epoch_with([1, 2, 4, 3])
    assert changing == one
    seen = [sample for step in changing for sample in step]
    assert len(seen) == len(set(seen)) == 48


def test_the_loader_goes_on_with_the_ranks_that_change_within_an_epoch():
    sampler = ElasticSampler(48, 12, 3, seed=1)
    loader = ElasticLoader(TensorDataset(torch.arange(48)), sampler)
    seen = []
    for step, micro_batches in enumerate(loader):
        seen.append(sorted(sample for (batch,) in micro_batches for sample in batch.tolist()))
        sampler.set_ranks(0, 2 if step < 2 else 1)
    whole = ElasticSampler(48, 12, 12, seed=1)
    expected = list(whole)
    assert seen[0] == sorted(expected[0])
    assert seen[1] == sorted(expected[1][:6])
    assert seen[2] == sorted(expected[2][:6])
    assert seen[3] == sorted(expected[3])
    assert (sampler.epoch, sampler.cursor) == (1, 0)
    assert list(ElasticSampler(48, 12, 12, seed=1)) != list(sampler)


def test_a_state_of_another_run_is_refused():
    sampler = ElasticSampler(48, 12, 3)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match="global_batch 6 instead of 12"):
        sampler.load_state_dict(ElasticSampler(48, 6, 3).state_dict())
    with pytest.raises(ValueError, match="cursor is 5"):
        sampler.load_state_dict({**before, "cursor": 5})
    assert sampler.state_dict() == before
