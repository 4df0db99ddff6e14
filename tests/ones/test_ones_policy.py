import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.ones import Cluster, make_trace, simulate
from patrickstar.ones.policies.knapsack import best_sizes, with_equal_shares
from patrickstar.ones.policies.lengths import LengthModel
from patrickstar.ones.policies.ones import Ones
from tests.ones.jobs import linear_job


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


def test_equal_values_get_equal_shares_where_that_costs_little():
    kinked = np.array([0.0, 1.0, 1.43, 1.87, 2.2, 2.4])  # 3 + 1 GPUs are worth 2.87, 2 + 2 are worth 2.86
    other = np.array([0.0, 2.0, 2.1, 2.15, 2.2, 2.2])
    values = np.stack([kinked, other, kinked])
    sizes = best_sizes(values, 5)
    assert sorted(sizes[[0, 2]]) == [1, 3]
    assert with_equal_shares(sizes, values).tolist() == [2, 1, 2]
    assert with_equal_shares(np.array([4, 1, 1]), values).tolist() == [3, 1, 2]
    kinked[2] = 1.0  # 3 + 1 GPUs are worth much more
    assert with_equal_shares(sizes, np.stack([kinked, other, kinked])).tolist() == sizes.tolist()
    kinked[2] = -np.inf
    assert with_equal_shares(sizes, np.stack([kinked, other, kinked])).tolist() == sizes.tolist()


@pytest.mark.parametrize(("num_gpus", "expected"), [(4, [2, 2]), (7, [4, 3]), (8, [4, 4])])
def test_two_equal_jobs_that_start_together_get_equal_shares(num_gpus, expected):
    trace = [linear_job(name, 0.0, 1, 500.0, max_gpus=4) for name in ("a", "b")]
    result = simulate(trace, Ones(), Cluster(num_gpus))
    assert [len(part.gpus) for part in result.segments if part.start_s == 0] == expected


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
