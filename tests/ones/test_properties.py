import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from patrickstar.ones import POLICIES, Cluster, artifact_mix, history, make_policy, simulate
from patrickstar.ones.policies.ones_published import count_jobs, reorder
from patrickstar.ones.policies.progress import digamma
from patrickstar.ones.traces import with_resize_s

HISTORY = history(seed=0, num_jobs=1)[:20]


class Watched:
    def __init__(self, policy):
        self.policy = policy
        self.foresight, self.interval_s = policy.foresight, max(policy.interval_s, 10.0)
        self.made = []

    def decide(self, now, jobs, cluster):
        self.made.append((jobs, self.policy.decide(now, jobs, cluster)))
        return self.made[-1][1]

    def finished(self, now, state):
        self.policy.finished(now, state)


@st.composite
def traces(draw):
    items = artifact_mix(
        draw(st.integers(1, 6)), draw(st.integers(0, 99)), mean_gap_s=draw(st.sampled_from([1.0, 30.0])),
        mean_duration_s=60.0,
    )  # fmt: skip
    found = []
    for item in with_resize_s(items, draw(st.sampled_from([0.0, 5.0]))):
        request = min(item.job.requested_gpus, 8)
        job = dataclasses.replace(
            item.job, requested_gpus=request, min_gpus=draw(st.integers(1, request)), max_gpus=4 * request
        )
        if draw(st.booleans()):
            powers = tuple(n for n in (1, 2, 4, 8, 16, 32) if job.min_gpus <= n <= job.max_gpus)
            job = dataclasses.replace(job, feasible_gpus=powers)
        found.append(dataclasses.replace(item, job=job))
    return tuple(found)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(trace=traces(), num_gpus=st.integers(8, 20))
def test_policies_keep_to_limits_and_all_jobs_end(name, trace, num_gpus):
    cluster = Cluster(num_gpus)
    policy = Watched(make_policy(name, 3, HISTORY))
    result = simulate(trace, policy, cluster)
    for states, allocation in policy.made:
        taken = [gpu for grant in allocation.values() for gpu in grant.gpus]
        assert len(taken) == len(set(taken)) and set(taken) <= set(range(num_gpus))
        for state in states:
            grant = allocation.get(state.job.name)
            if grant is None:
                continue
            assert len(grant.gpus) in state.job.sizes and len(grant.gpus) <= state.job.max_gpus
            if name in ("ones-published", "ones-artifact"):
                assert grant.gpus[-1] - grant.gpus[0] == len(grant.gpus) - 1
    assert {job.job for job in result.jobs} == {item.job.name for item in trace}
    done = dict.fromkeys((item.job.name for item in trace), 0.0)
    for part in result.segments:
        done[part.job] += part.done_samples
        assert 0 <= part.stalled_s <= part.end_s - part.start_s + 1e-9
    for item in trace:  # no work is lost or made up, however often it was resized
        assert math.isclose(done[item.job.name], item.samples, rel_tol=1e-6)
    for gpu in range(num_gpus):
        held = sorted((part.start_s, part.end_s) for part in result.segments if gpu in part.gpus)
        assert all(before[1] <= after[0] for before, after in zip(held, held[1:], strict=False))


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_seed_gives_the_same_schedule(name):
    trace = artifact_mix(4, seed=1, mean_duration_s=60.0)
    runs = [simulate(trace, make_policy(name, 5, HISTORY), Cluster(16)) for _ in range(2)]
    assert runs[0] == runs[1]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_reordering_is_contiguous_and_moves_the_fewest(data):
    num_gpus, num_jobs = 7, 3
    running = np.array(data.draw(st.lists(st.integers(-1, num_jobs - 1), min_size=num_gpus, max_size=num_gpus)))
    counts = data.draw(st.lists(st.integers(0, 3), min_size=num_jobs, max_size=num_jobs))
    if sum(counts) > num_gpus:
        counts[0] = 0
    found = reorder(np.array(counts), running)
    assert {job: end - start for job, (start, end) in found.items()} == {j: n for j, n in enumerate(counts) if n}
    order = sorted(found, key=lambda job: found[job])
    cost = sum(running[gpu] != job for job in found for gpu in range(*found[job]))

    def cheapest(jobs, start):
        if not jobs:
            return 0
        size = counts[jobs[0]]
        return min(
            (
                int((running[at : at + size] != jobs[0]).sum()) + cheapest(jobs[1:], at + size)
                for at in range(start, num_gpus - sum(counts[job] for job in jobs) + 1)
            ),
            default=math.inf,
        )

    assert cost == cheapest(order, 0)
    assert all(found[a][1] <= found[b][0] for a, b in zip(order, order[1:], strict=False))


def test_counts_are_numpys():
    rows = np.random.default_rng(0).integers(-1, 5, (6, 9))
    expected = [[(row == job).sum() for job in range(5)] for row in rows]
    assert count_jobs(rows, 5).tolist() == [[int(n) for n in row] for row in expected]


def test_digamma_is_scipys():
    x = np.geomspace(0.01, 1e4, 200)
    np.testing.assert_allclose(digamma(x), special.digamma(x), rtol=1e-8, atol=1e-8)
