"""Policies know only measurements: states hold no truth, and decisions do not depend on lengths before jobs end."""

import dataclasses
import math

import numpy as np
import pytest

from patrickstar.ones import (
    POLICIES,
    Cluster,
    Grant,
    StepTime,
    Throughput,
    TraceJob,
    make_history,
    make_policy,
    make_trace,
    simulate,
)
from patrickstar.ones.measurements import (
    Scaling,
    Synchronisation,
    fitted_throughput,
    scaling_of,
    throughput_on_links,
)
from patrickstar.ones.mixes import TYPED_POOLS, on_types
from patrickstar.ones.policies.experience import Experience
from patrickstar.ones.policies.past import PastJob
from patrickstar.ones.policies.protocol import Foresight, Profiling, Sizes
from patrickstar.ones.simulated_job import SimulatedJob

HISTORY = make_history("artifact", seed=0, num_jobs=2)
BLIND = [name for name in POLICIES if make_policy(name).foresight is Foresight.NONE]


class Recorded:
    def __init__(self, policy):
        self.sizes = policy.sizes
        self.policy, self.foresight, self.interval_s = policy, policy.foresight, min(policy.interval_s, 5.0)
        self.made = []

    def decide(self, now, jobs, cluster):
        allocation = dict(self.policy.decide(now, jobs, cluster))
        self.made.append((now, tuple(jobs), allocation))
        return allocation

    def finished(self, now, state):
        self.made.append((now, (state,), {}))
        self.policy.finished(now, state)


def parts(value):
    yield value
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from parts(getattr(value, field.name))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from parts(item)
    else:
        assert value is None or isinstance(value, (str, int, float))


def test_states_hold_measurements_and_no_truth():
    trace = make_trace("artifact", seed=2, num_jobs=8)
    policy = Recorded(make_policy("ones", history=HISTORY))
    simulate(trace, policy, Cluster(16))
    true = {id(item.job) for item in trace} | {id(item.job.throughput) for item in trace}
    numbers = {item.samples for item in trace} | {item.job.noise_scale for item in trace}
    numbers |= {item.job.throughput.sync_s for item in trace}
    states = [state for _, jobs, _ in policy.made for state in jobs]
    assert any(state.job.noise_scale > 0 for state in states)
    for state in states:
        assert state.remaining_samples is None
        for part in parts(state):
            assert not isinstance(part, TraceJob) and id(part) not in true
            assert not isinstance(part, float) or part not in numbers


@pytest.mark.parametrize("name", BLIND)
def test_decisions_do_not_depend_on_lengths_before_a_job_ends(name):
    """With every length changed, all is the same until the first job ends, also losses and measurements."""
    trace = make_trace("artifact", seed=3, num_jobs=4, mean_gap_s=5.0)
    longer = tuple(
        dataclasses.replace(item, samples=item.samples * (2 + index % 3), fit_error=1.0)
        for index, item in enumerate(trace)
    )
    made = []
    for jobs in (trace, longer):
        policy = Recorded(make_policy(name, 1, HISTORY))
        result = simulate(jobs, policy, Cluster(16))
        made.append((min(job.end_s for job in result.jobs), policy.made))
    first_end = min(end for end, _ in made)
    before = [[entry for entry in entries if entry[0] < first_end] for _, entries in made]
    assert len(before[0]) > 4
    assert before[0] == before[1]


def steps(model, *points):
    return tuple(StepTime(n, nodes, batch, float(model.step_s(n, batch, nodes))) for n, nodes, batch in points)


TRUE = Throughput(0.01, pass_s=0.02, sync_s=0.1, node_sync_s=0.3, gamma=1.0, max_micro_batch=128)
POINTS = ((1, 1, 32), (1, 1, 128), (2, 1, 64), (8, 2, 512))


def test_a_fit_is_the_model_where_it_was_measured():
    fitted = fitted_throughput(steps(TRUE, *POINTS), 32, 128)
    for n, nodes, batch in (*POINTS, (4, 1, 512), (16, 4, 1024)):
        assert math.isclose(fitted.step_s(n, batch, nodes), TRUE.step_s(n, batch, nodes))
    found = scaling_of(steps(TRUE, *POINTS), 32, 128)
    np.testing.assert_allclose(found, [0.1 / 0.32, 0.3 / 0.32, 0.32])
    near = scaling_of(steps(TRUE, *POINTS[:3]), 32, 128)
    assert math.isclose(near[0], 0.1 / 0.32) and near[1] is None
    assert scaling_of(steps(TRUE, (2, 1, 512), (8, 2, 512)), 32, 128) == scaling_of((), 32, 128) == (None, None, 0.0)


def test_a_prior_counts_where_nothing_was_measured():
    prior = Scaling(0.5, 1.0)
    for measured in ((), steps(TRUE, POINTS[0]), steps(TRUE, (8, 2, 512))):
        perfect, known = fitted_throughput(measured, 32), fitted_throughput(measured, 32, prior=prior)
        assert perfect.sync_s == perfect.node_sync_s == 0
        base_s = known.sample_s * 32
        assert math.isclose(known.sync_s, 0.5 * base_s) and math.isclose(known.node_sync_s, base_s)
        for step in measured:
            assert math.isclose(known.step_s(step.num_gpus, step.batch_size, step.num_nodes), step.seconds)
    within = fitted_throughput(steps(TRUE, *POINTS[:3]), 32, 128, prior)
    assert math.isclose(within.sync_s, 0.1) and within.node_sync_s > within.sync_s


def test_links_tell_computing_from_synchronising_in_one_step():
    """If the true synchronisation is expected, one step on any size tells the speed on all."""
    expected = Synchronisation(0.1, 0.3)
    model = dataclasses.replace(TRUE, pass_s=0.0)
    for point in ((1, 1, 32), (2, 1, 64), (8, 2, 512)):
        fitted = throughput_on_links(steps(model, point), expected, 128)
        for n, nodes, batch in (*POINTS, (4, 1, 512), (16, 4, 1024)):
            assert math.isclose(fitted.step_s(n, batch, nodes), model.step_s(n, batch, nodes))


def test_a_measured_synchronisation_counts_by_its_error():
    """Twice the expected one: believed where it is most of a step, not where computing hides it."""
    expected = Synchronisation(0.05, 0.15)
    for sample_s, least, most in ((1e-4, 0.29, 0.3), (0.1, 0.15, 0.2)):
        true = dataclasses.replace(TRUE, sample_s=sample_s, pass_s=0.0)
        fitted = throughput_on_links(steps(true, (1, 1, 128), (8, 2, 512)), expected, 128)
        assert least < fitted.node_sync_s < most
        assert math.isclose(fitted.sync_s, expected.within_s)


def test_a_job_is_known_by_its_parameters_once_it_has_run():
    """Jobs that ended told the seconds per parameter; others learn their synchronisation without a second size."""
    ended = PastJob("ended", 100.0, within=0.5, between=1.25, parameter_s=4e-9)
    job = dataclasses.replace(make_trace("artifact", seed=0, num_jobs=1)[0].job, num_parameters=10**8)
    model = dataclasses.replace(TRUE, sample_s=0.01, pass_s=0.0, sync_s=0.2, node_sync_s=0.5)
    job = dataclasses.replace(job, base_batch=32, max_batch=512, gpu_batch=32, throughput=model)
    seen = SimulatedJob(TraceJob(job, 1e6), {"": Cluster(8)}).state(0.0, Foresight.NONE, "")
    assert seen.job.num_parameters == 0
    new = Experience((ended,), 4).completed(seen).throughput
    assert math.isclose(new.node_sync_s, 2 * 1.25 * new.sample_s * 32)  # a job that never ran: twice the median
    state = dataclasses.replace(seen, job=job, observed=steps(model, (8, 2, 256)))
    found = Experience((ended,), 4).completed(state).throughput
    np.testing.assert_allclose([found.sample_s, found.sync_s, found.node_sync_s], [0.01, 0.2, 0.5])
    unknown = dataclasses.replace(state, job=dataclasses.replace(job, num_parameters=0))
    found = Experience((ended,), 4).completed(unknown).throughput
    assert math.isclose(found.node_sync_s, 1.25 * found.sample_s * 32)


def test_speed_on_a_type_is_scaled_by_data_sheets_until_it_is_measured():
    item = on_types(make_trace("artifact", seed=0, num_jobs=1), list(TYPED_POOLS))[0]
    job, batch = SimulatedJob(item, TYPED_POOLS), item.job.base_batch
    assert all(job.state(0.0, Foresight.NONE, kind).observed == () for kind in TYPED_POOLS)
    assert job.candidate(0.0, Sizes.ANY).speeds == {"T4": 65, "V100": 125, "A100": 312}
    job.change(0.0, Grant((0,), batch, "V100"))
    seconds = {kind: job.state(20.0, Foresight.NONE, kind).observed[0].seconds for kind in TYPED_POOLS}
    assert math.isclose(seconds["V100"], float(item.job.throughput.step_s(1, batch)), rel_tol=0.1)
    assert math.isclose(seconds["V100"] / seconds["A100"], 312 / 125)
    job.change(100.0, Grant((0,), batch, "A100"))
    speeds = job.candidate(200.0, Sizes.ANY).speeds
    assert math.isclose(speeds["A100"] / speeds["V100"], item.speeds["A100"], rel_tol=0.2)


def test_a_profile_tells_relative_speeds_at_the_arrival():
    item = on_types(make_trace("artifact", seed=0, num_jobs=1), list(TYPED_POOLS))[0]
    speeds = SimulatedJob(item, TYPED_POOLS, Profiling.EACH_TYPE).candidate(0.0, Sizes.ANY).speeds
    for kind in TYPED_POOLS:
        assert math.isclose(speeds[kind] / speeds["V100"], item.speeds[kind], rel_tol=0.2)
