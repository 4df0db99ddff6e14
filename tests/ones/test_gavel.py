"""Gavel's shares of time and rounds, on small clusters of two types."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from patrickstar.ones import Cluster, make_trace, on_types, simulate
from patrickstar.ones.mixes import TYPED_POOLS
from patrickstar.ones.policies.gavel import Gavel, Objective
from patrickstar.ones.policies.protocol import Foresight
from patrickstar.ones.policies.simplex import best_shares
from patrickstar.ones.pools import Candidate
from patrickstar.ones.simulated_job import SimulatedJob
from tests.ones.jobs import linear_job

FAST_AND_SLOW = {"fast": Cluster(1, 1), "slow": Cluster(1, 1)}


class Cell:
    """Two jobs of one GPU on a fast and a slow one."""

    def __init__(self, speeds):
        items = [dataclasses.replace(linear_job(name, 0.0, 1, 1000.0), speeds=speeds[name]) for name in speeds]
        self.jobs = {item.job.name: SimulatedJob(item, FAST_AND_SLOW) for item in items}
        self.speeds = speeds

    def decide(self, policy, now):
        def state_on(name, kind):
            return self.jobs[name].state(now, Foresight.NONE, kind)

        candidates = [
            Candidate(name=name, least_gpus=1, gpus=1, speeds=self.speeds[name], held=job.kind)
            for name, job in self.jobs.items()
        ]
        grants = policy.decide_on_types(now, candidates, state_on, FAST_AND_SLOW)
        for name, job in self.jobs.items():
            if grants.get(name) != job.grant:
                job.change(now, grants.get(name))
        return {name: grant.gpu_type for name, grant in sorted(grants.items())}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16), num_rows=st.integers(1, 12), num_columns=st.integers(1, 12))
def test_linear_programs_are_solved_as_scipy_does(seed, num_rows, num_columns):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(num_rows, num_columns)) * (rng.random((num_rows, num_columns)) < 0.7)
    rows, limits = np.vstack([rows, np.ones(num_columns)]), np.append(rng.random(num_rows), 5.0)
    limits[:-1][rng.random(num_rows) < 0.4] = 0.0
    gains = rng.normal(size=num_columns)
    found = best_shares(gains, rows, limits)
    best = linprog(-gains, A_ub=rows, b_ub=limits, bounds=(0, None))
    assert (found >= 0).all() and (rows @ found <= limits + 1e-6).all()
    np.testing.assert_allclose(gains @ found, -best.fun, atol=1e-6)
    with pytest.raises(ValueError, match="has no bound"):
        best_shares(np.ones(1), -np.ones((1, 1)), np.ones(1))


def test_the_least_gain_is_as_large_as_it_can_be():
    """Each job has the GPU on which it is relatively faster; equal jobs share both, with gains of (4 + 1) / 2."""
    sizes = [{"fast": 1, "slow": 1}] * 2
    shares = Gavel()._shares(sizes, [{"fast": 4.0, "slow": 1.0}, {"fast": 1.0, "slow": 1.0}], FAST_AND_SLOW)
    np.testing.assert_allclose([shares[0]["fast"], shares[1]["slow"]], [1.0, 1.0], atol=1e-6)
    alike = Gavel()._shares(sizes, [{"fast": 4.0, "slow": 1.0}] * 2, FAST_AND_SLOW)
    gains = [share["fast"] * 4 + share["slow"] for share in alike]
    np.testing.assert_allclose(gains, [2.5, 2.5], rtol=1e-5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16), num_jobs=st.integers(1, 12), objective=st.sampled_from(Objective))
def test_shares_have_the_objective_that_scipy_finds(seed, num_jobs, objective):
    rng, kinds = np.random.default_rng(seed), list(TYPED_POOLS)
    z, speeds = rng.choice([1, 2, 4, 8, 16], num_jobs), rng.uniform(0.2, 5.0, (num_jobs, len(kinds)))
    num_gpus = np.array([pool.num_gpus for pool in TYPED_POOLS.values()])
    found = Gavel(objective=objective)._shares(
        [dict.fromkeys(kinds, int(size)) for size in z],
        [dict(zip(kinds, row.tolist(), strict=True)) for row in speeds],
        TYPED_POOLS,
    )
    shares = np.array([[row[kind] for kind in kinds] for row in found])
    weights = z[:, None] * speeds / (speeds @ num_gpus / num_gpus.sum())[:, None]
    gains = np.kron(np.eye(num_jobs), np.ones(len(kinds))) * weights.ravel()
    limits = np.vstack([np.kron(np.eye(num_jobs), np.ones(len(kinds))), np.kron(z, np.eye(len(kinds)))])
    rows = np.block([[-gains, np.ones((num_jobs, 1))], [limits, np.zeros((len(limits), 1))]])
    worth = np.append(weights.ravel(), 0.0) if objective is Objective.TOTAL else np.append(0 * weights.ravel(), 1.0)
    bounds = np.concatenate([np.zeros(num_jobs), np.ones(num_jobs), num_gpus])
    best = -linprog(-worth, A_ub=rows, b_ub=bounds, bounds=(0, None)).fun
    assert (limits @ shares.ravel() <= bounds[num_jobs:] + 1e-5).all()
    had = gains @ shares.ravel()
    np.testing.assert_allclose(had.sum() if objective is Objective.TOTAL else had.min(), best, rtol=5e-3)


def test_rounds_give_jobs_their_shares_of_time():
    """Two equal jobs take turns on the fast GPU, and move only when a round begins."""
    cell, policy = Cell({"a": {"fast": 4.0, "slow": 1.0}, "b": {"fast": 4.0, "slow": 1.0}}), Gavel(10.0)
    made = [cell.decide(policy, 5.0 * step)["a"] for step in range(41)]
    assert made[0:40:2] == made[1:40:2]
    assert abs(made.count("fast") - made.count("slow")) <= 4
    unlike, policy = Cell({"a": {"fast": 4.0, "slow": 1.0}, "b": {"fast": 1.0, "slow": 1.0}}), Gavel(10.0)
    assert {tuple(unlike.decide(policy, 10.0 * step).values()) for step in range(20)} == {("fast", "slow")}


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("pools", [{"": Cluster(16)}, TYPED_POOLS], ids=["equal", "types"])
def test_all_jobs_end(pools, objective):
    trace = make_trace("artifact", seed=3, num_jobs=12, mean_gap_s=5.0)
    result = simulate(on_types(trace, list(pools)) if len(pools) > 1 else trace, Gavel(objective=objective), pools)
    requested = {item.job.name: item.job.requested_gpus for item in trace}
    assert len(result.jobs) == 12 and len({part.gpu_type for part in result.segments}) == len(pools)
    assert all(len(part.gpus) == requested[part.job] for part in result.segments)
