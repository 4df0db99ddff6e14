import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.ones import Cluster, make_trace, simulate
from patrickstar.ones.policies.knapsack import best_sizes
from patrickstar.ones.policies.lengths import LengthModel
from patrickstar.ones.policies.ones import Ones


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16), num_gpus=st.integers(2, 6))
def test_sizes_are_the_best_of_all(seed, num_gpus):
    rng = np.random.default_rng(seed)
    values = np.where(rng.random((4, num_gpus + 1)) < 0.4, -np.inf, rng.normal(size=(4, num_gpus + 1)))
    values[rng.random(4) < 0.8, 0] = 0.0
    rows = np.arange(4)
    every = [
        values[rows, sizes].sum()
        for sizes in itertools.product(range(num_gpus + 1), repeat=4)
        if sum(sizes) <= num_gpus
    ]
    if not np.isfinite(max(every)):
        with pytest.raises(ValueError, match="the smallest sizes of 4 jobs exceed"):
            best_sizes(values, num_gpus)
        return
    found = best_sizes(values, num_gpus)
    assert found.sum() <= num_gpus
    np.testing.assert_allclose(values[rows, found].sum(), max(every))


AGES_S = np.geomspace(3, 3e4, 9)


def test_without_data_a_job_is_expected_to_last_about_as_long_as_it_has():
    left = LengthModel().remaining_s(AGES_S)
    np.testing.assert_allclose(left / AGES_S, (left / AGES_S)[0], rtol=0.25)
    assert (np.diff(left) > 0).all()


def test_lengths_are_learnt_from_ended_jobs():
    rng = np.random.default_rng(0)
    memoryless = LengthModel(rng.exponential(500.0, 4000), most=4000).remaining_s(np.array([10.0, 100.0, 800.0]))
    np.testing.assert_allclose(memoryless, 500.0, rtol=0.25)
    equal = LengthModel([500.0] * 300).remaining_s(np.array([10.0, 200.0, 400.0]))
    assert (np.diff(equal) < 0).all() and equal[2] < 250
    heavy = LengthModel(100 * rng.pareto(1.1, 2000) + 100, most=2000).remaining_s(np.array([200.0, 2000.0, 20000.0]))
    assert (np.diff(heavy) > 0).all()


def test_jobs_that_go_on_count_as_longer_than_their_age():
    """Without them a model learns from the short jobs alone, which end first."""
    alone, among = LengthModel(), LengthModel()
    for _ in range(20):
        alone.ended(100.0, np.zeros(0))
        among.ended(100.0, np.full(60, 300.0))
    assert among.remaining_s(np.array([10.0]))[0] > 1.5 * alone.remaining_s(np.array([10.0]))[0]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 99),
    num_gpus=st.sampled_from([8, 12]),
    sizes=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=8, max_size=14),
    resize_s=st.sampled_from([0.0, 5.0, 30.0]),
)
def test_no_job_waits_longer_than_the_bound(seed, num_gpus, sizes, resize_s):
    cluster = Cluster(num_gpus)
    trace = []
    for item, least in zip(make_trace("artifact", seed, len(sizes), 5.0, resize_s), sizes, strict=True):
        job = dataclasses.replace(item.job, min_gpus=least, requested_gpus=least, max_gpus=max(least, 4))
        trace.append(dataclasses.replace(item, job=job))
    policy = Ones(max_wait_s=60.0)
    result = simulate(trace, policy, cluster)
    longest_s = max(job.longest_wait_s for job in result.jobs)
    assert longest_s <= policy.longest_wait_s([item.job for item in trace], cluster)
