import math

import pytest

from patrickstar.ones import Cluster, Grant, Job, SimulationError, Throughput, check_fits, make_policy, simulate
from patrickstar.ones.policies.protocol import Foresight, Memoryless
from tests.ones.jobs import linear_job

FOUR = Cluster(4)


def times(trace, name, cluster=FOUR):
    result = simulate(trace, make_policy(name), cluster)
    return {job.job: (round(job.first_start_s, 3), round(job.end_s, 3)) for job in result.jobs}


# a needs the whole cluster for 100 s; b half of it for 30 s, c for 10 s, d all for 5 s.
TRACE = (
    linear_job("a", 0, 4, 100, resize_s=2.0),
    linear_job("b", 10, 2, 30, resize_s=2.0),
    linear_job("c", 20, 2, 10, resize_s=2.0),
    linear_job("d", 25, 4, 5, resize_s=2.0),
)


def test_fifo_runs_by_arrival_and_nobody_overtakes():
    assert times(TRACE, "fifo") == {"a": (0, 100), "b": (100, 130), "c": (100, 110), "d": (130, 135)}


def test_srtf_preempts_for_what_ends_sooner():
    """At 10 b (30 s) stops a (90 s left); at 20 c starts beside b. At 25 c and d have 5 s left each and c came first,
    so d waits until 30; it then stops b, which has 10 s left, until 35. b pays 2 s to restart: 47; a then too.
    """
    expected = {"a": (0, 139), "b": (10, 47), "c": (20, 30), "d": (30, 35)}
    assert times(TRACE, "srtf") == expected


def test_tiresias_serves_the_least_served_queue_first():
    """a leaves the first queue after 3250 GPU-seconds, 812.5 s on 4 GPUs; the next check is 10 s later at most."""
    trace = (linear_job("a", 0, 4, 2000), linear_job("b", 100, 4, 50))
    assert times(trace, "tiresias") == {"a": (0, 2050), "b": (820, 870)}


def test_optimus_gives_the_gpu_where_it_saves_the_most():
    """b has nine times the work of a: with 8 GPUs the marginal gains W/n - W/(n+1) give a 2 and b 6."""
    trace = (linear_job("a", 0, 1, 600, max_gpus=8), linear_job("b", 0, 1, 5400, max_gpus=8))
    result = simulate(trace, make_policy("optimus"), Cluster(8))
    first = {part.job: len(part.gpus) for part in result.segments if part.start_s == 0}
    assert first == {"a": 2, "b": 6}


class Scripted(Memoryless):
    def __init__(self, script):
        self.script = script
        self.interval_s = 1.0

    def decide(self, now, jobs, cluster):
        there = {state.job.name for state in jobs}
        latest = self.script[max(time for time in self.script if time <= now)]
        return {name: Grant(gpus, len(gpus)) for name, gpus in latest.items() if name in there}


def test_a_resize_costs_its_seconds_and_no_work():
    """100 s on 1 GPU: 10 s on one, 5 s stalled, then 2 GPUs; stopped from 30 to 40, 5 s stalled, 2 GPUs to the end."""
    script = {0: {"a": (0,)}, 10: {"a": (0, 1)}, 30: {}, 40: {"a": (2, 3)}}
    (result,) = [simulate([linear_job("a", 0, 1, 100, max_gpus=4, resize_s=5.0)], Scripted(script), FOUR)]
    assert [(p.start_s, p.stalled_s, len(p.gpus)) for p in result.segments] == [(0, 0, 1), (10, 5, 2), (40, 5, 2)]
    assert math.isclose(result.segments[-1].end_s, 75, rel_tol=1e-6)  # 10 + 2 * 15 done; 60 left on 2 GPUs, from 45
    assert math.isclose(sum(part.done_samples for part in result.segments), 100, rel_tol=1e-6)
    assert result.jobs[0].num_resizes == 2


@pytest.mark.parametrize(
    ("gpus", "message"),
    [((0, 1, 2, 3), "runs on"), ((7,), "not there or taken"), ((), "grants 0 GPUs"), ((1, 1), "not there or taken")],
)
def test_wrong_grants_are_named(gpus, message):
    with pytest.raises(SimulationError, match=message):
        simulate([linear_job("a", 0, 1, 100, max_gpus=2)], Scripted({0: {"a": gpus}}), FOUR)


def test_jobs_that_wait_forever_are_named():
    with pytest.raises(SimulationError, match="leaves a without GPUs forever"):
        simulate([linear_job("a", 0, 1, 100)], _Never(), FOUR)


class _Never(Memoryless):
    def decide(self, now, jobs, cluster):
        return {}


def test_jobs_that_never_fit_are_named_before_anything_runs():
    item = linear_job("large", 0, 8, 10, min_gpus=8)
    with pytest.raises(ValueError, match="large needs at least 8 GPUs and the cluster has 4; lower its min_gpus"):
        check_fits(item.job, FOUR)
    with pytest.raises(ValueError, match="large needs at least 8"):
        simulate([item], make_policy("fifo"), FOUR)


def test_step_times_follow_their_formula():
    speed = Throughput(sample_s=0.01, pass_s=0.1, sync_s=0.3, sync_growth_s=0.1, gamma=1.0, max_micro_batch=8)
    assert math.isclose(speed.step_s(1, 8), 0.18)
    assert math.isclose(speed.step_s(4, 64), 0.18 + 0.18 + 0.5)  # two passes of 8 per GPU, then synchronised


def test_efficiency_is_that_of_the_noise_scale():
    """AdaptDL's [(var + sqr) / (var / s + sqr)] / s with s = B / B0 and var / sqr = noise scale / B0."""
    job = linear_job("a", 0, 1, 10).job
    job = Job(**{**job.__dict__, "base_batch": 64, "max_batch": 1024, "noise_scale": 640.0})
    var, sqr, s = 10.0, 1.0, 4.0
    assert math.isclose(job.efficiency(256), (var + sqr) / (var / s + sqr) / s)


@pytest.mark.parametrize("change", [{"max_gpus": 1}, {"base_batch": 65}, {"resize_s": -1.0}, {"feasible_gpus": (9,)}])
def test_contradicting_jobs_are_refused(change):
    fields = linear_job("a", 0, 2, 10).job.__dict__
    with pytest.raises(ValueError, match="job a: .*correct"):
        Job(**{**fields, **change})


def test_policies_are_told_no_more_than_their_papers_have():
    told = {name: make_policy(name).foresight for name in ("fifo", "tiresias", "pollux-like", "ones", "ones-published")}
    assert set(told.values()) == {Foresight.NONE}
    assert make_policy("optimus").foresight is Foresight.FITTED
    assert make_policy("srtf").foresight is Foresight.EXACT
    with pytest.raises(ValueError, match="there is no policy 'drl'; choose among fifo"):
        make_policy("drl")
