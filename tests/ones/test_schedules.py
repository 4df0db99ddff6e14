import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special, stats

from patrickstar.command.ones import main
from patrickstar.ones import (
    POLICIES,
    Cluster,
    Grant,
    Job,
    SimulationError,
    Throughput,
    check_fits,
    figures,
    make_history,
    make_policy,
    make_trace,
    simulate,
)
from patrickstar.ones.policies.knapsack import Configuration, best_configurations
from patrickstar.ones.policies.ones_published import count_jobs, reorder
from patrickstar.ones.policies.progress import digamma
from patrickstar.ones.policies.protocol import Foresight, Memoryless
from patrickstar.ones.report import mean_and_interval
from patrickstar.ones.traces import with_resize_s
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
    """b has nine times the work of a: with 8 GPUs the marginal gains W/n - W/(n+1) give a 2 and b 6. The first round,
    before any measurement, gives each one.
    """
    trace = (linear_job("a", 0, 1, 600, max_gpus=8), linear_job("b", 0, 1, 5400, max_gpus=8))
    result = simulate(trace, make_policy("optimus"), Cluster(8))
    first = {part.job: len(part.gpus) for part in result.segments if part.start_s == 60}
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
    told = {name: make_policy(name).foresight for name in POLICIES}
    assert told.pop("optimus") is Foresight.FITTED
    assert told.pop("srtf") is told.pop("ones-true-lengths") is Foresight.EXACT
    assert set(told.values()) == {Foresight.NONE}
    with pytest.raises(ValueError, match="there is no policy 'drl'; choose among fifo"):
        make_policy("drl")


HISTORY = make_history("artifact", seed=0, num_jobs=3)


class Watched:
    def __init__(self, policy):
        self.policy = policy
        self.sizes = policy.sizes
        self.foresight, self.interval_s = policy.foresight, max(policy.interval_s, 10.0)
        self.made = []

    def decide(self, now, jobs, cluster):
        self.made.append((jobs, self.policy.decide(now, jobs, cluster)))
        return self.made[-1][1]

    def finished(self, now, state):
        self.policy.finished(now, state)


@st.composite
def traces(draw):
    items = make_trace(
        "artifact", draw(st.integers(0, 99)), draw(st.integers(1, 6)), draw(st.sampled_from([1.0, 30.0]))
    )
    found = []
    for item in with_resize_s(items, draw(st.sampled_from([0.0, 5.0]))):
        request = min(item.job.requested_gpus, 8)
        item = dataclasses.replace(item, samples=item.samples / 4)
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
            if name == "ones-published":
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
    trace = make_trace("artifact", seed=1, num_jobs=4)
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


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_configurations_are_those_of_an_integer_linear_program(data):
    """HiGHS' optimum of the program in Sia's paper: one configuration of each job, and a limit for each type."""
    num_gpus = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    offers = [
        [Configuration(-1.1, 0)]
        + [Configuration(-float(rng.random()), int(rng.integers(1, 5)), int(rng.integers(len(num_gpus))))
           for _ in range(4)]
        for _ in range(5)
    ]  # fmt: skip
    offers = [[one for one in row if one.num_gpus <= num_gpus[one.kind]] for row in offers]
    found = best_configurations(offers, num_gpus)
    assert all(one in row for one, row in zip(found, offers, strict=True))
    flat = [(job, one) for job, row in enumerate(offers) for one in row]
    once = [[float(job == at) for job, _ in flat] for at in range(len(offers))]
    held = [[float(one.num_gpus * (one.kind == kind)) for _, one in flat] for kind in range(len(num_gpus))]
    assert all(np.dot(row, [one in found and found[job] is one for job, one in flat]) <= limit
               for row, limit in zip(held, num_gpus, strict=True))  # fmt: skip
    best = optimize.milp(
        [-one.value for _, one in flat], integrality=np.ones(len(flat)), bounds=optimize.Bounds(0, 1),
        constraints=[optimize.LinearConstraint(once, 1, 1), optimize.LinearConstraint(held, 0, num_gpus)],
    )  # fmt: skip
    assert math.isclose(sum(one.value for one in found), -best.fun, abs_tol=1e-6)


def test_too_many_types_for_dynamic_programming_are_refused():
    with pytest.raises(ValueError, match="400 x 400 x 400 GPUs of 3 types are 64481201 states.*smaller cluster"):
        best_configurations([], [400] * 3)


def test_jobs_get_the_type_that_suits_them_best():
    """Both are faster on a, and x more so."""
    pools = {"a": Cluster(1), "b": Cluster(1)}
    trace = [
        dataclasses.replace(linear_job(name, 0, 1, seconds, resize_s=1.0), speeds={"a": fast, "b": 1.0})
        for name, seconds, fast in (("y", 3000, 1.2), ("x", 3000, 4.0))
    ]
    result = simulate(trace, make_policy("sia-like-profiled"), pools)
    assert {(part.job, part.gpu_type) for part in result.segments if part.start_s == 0} == {("x", "a"), ("y", "b")}
    with pytest.raises(ValueError, match="job x runs on a, b and the cluster has c; correct its speeds"):
        simulate(trace[1:], make_policy("fifo"), {"c": Cluster(1)})


def test_digamma_is_scipys():
    x = np.geomspace(0.01, 1e4, 200)
    np.testing.assert_allclose(digamma(x), special.digamma(x), rtol=1e-8, atol=1e-8)


def test_figures_are_those_of_the_schedule():
    """One node of 4 GPUs: a holds all from 0 to 100, b (arrives at 10) two of them from 100 to 130."""
    trace = (linear_job("a", 0, 4, 100), linear_job("b", 10, 2, 30))
    found = figures(simulate(trace, make_policy("fifo"), Cluster(4)))
    assert math.isclose(found.mean_jct_s, (100 + 120) / 2) and math.isclose(found.makespan_s, 130)
    assert math.isclose(found.p99_jct_s, 119.8) and math.isclose(found.utilisation, (400 + 60) / (4 * 130))


def test_intervals_are_students():
    values = np.random.default_rng(0).normal(size=12)
    low, high = stats.t.interval(0.95, 11, loc=values.mean(), scale=stats.sem(values))
    mean, half = mean_and_interval(list(values))
    np.testing.assert_allclose([mean - half, mean + half], [low, high], rtol=1e-3)
    assert math.isnan(mean_and_interval([1.0])[1])


def test_the_command_compares_and_draws(tmp_path, capsys):
    assert main(["trace", str(tmp_path / "t.jsonl"), "--jobs", "3", "--seed", "1"]) == 0
    arguments = ["simulate", "--trace", str(tmp_path / "t.jsonl"), "--policies", "fifo,srtf", "--resize-s", "5"]
    assert main([*arguments, "--compare-to", "fifo", "--pictures", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "64 GPUs, 5 s per resize" in printed and "x fifo" in printed
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == ["gantt-fifo-5s.png", "gantt-srtf-5s.png", "jct-5s.png"]
    assert (tmp_path / "gantt-fifo-5s.png").read_bytes().startswith(b"\x89PNG")
    assert main([*arguments, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["policy"], row["resize_s"]) for row in rows] == [("fifo", 5.0), ("srtf", 5.0)]
    arguments = ["simulate", "--jobs", "3", "--policies", "ones,sia-like", "--pictures", str(tmp_path)]
    assert main([*arguments, "--gpu-types", "T4:16x4,A100:16x8"]) == 0
    assert "32 GPUs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "fifo,drl"], "there is no policy 'drl'; choose among fifo"),
        (["--resize-s", "5,-1"], "--resize-s: it is '-1'; give a number of at least 0"),
        (["--policies", "fifo", "--compare-to", "srtf"], "--compare-to srtf is none of --policies fifo"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--gpu-types", "T4:24"], "--gpu-types: it is 'T4:24'; give each type once, as T4:24x4,V100:24x8"),
        (["--gpu-types", "H100:64x8"], "on a GPU of type H100 is unknown; known are T4, V100, A100"),
    ],
)
def test_wrong_arguments_are_said_in_a_line(arguments, message, capsys):
    try:
        status = main(["simulate", *arguments])
    except SystemExit as stop:
        status = stop.code
    said = capsys.readouterr().err
    assert status == 2 and message in said and said.count("\n") == 1


def test_neither_pytorch_nor_the_extension_nor_matplotlib_is_imported():
    code = "import sys, patrickstar.command.ones; print([m for m in sys.modules if m in "
    code += "('torch', 'patrickstar._C', 'matplotlib')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
