"""The deployed scheduler, driven by simulated jobs and time, decides the same as the simulator on the same events."""

import dataclasses
import math

import numpy as np
import pytest

from patrickstar.elastic import BatchRange, LearningRateRule, RunReport
from patrickstar.ones import Cluster, Grant, Job, Throughput, TraceJob, simulate
from patrickstar.ones.cluster import ledger, scheduler
from patrickstar.ones.cluster.fleet import JobPhase, Status
from patrickstar.ones.cluster.scheduler import Scheduler
from patrickstar.ones.cluster.submission import Submission
from patrickstar.ones.policies.fifo import Fifo
from patrickstar.ones.policies.ones import Ones
from patrickstar.ones.policies.pollux import PolluxLike
from patrickstar.ones.policies.protocol import Foresight
from patrickstar.ones.policies.tiresias import TiresiasLas
from patrickstar.ones.simulated_job import SimulatedJob

CLUSTER = Cluster(8, gpus_per_node=8)
TYPES = {"A100": Cluster(4, 4), "T4": Cluster(6, 6), "V100": Cluster(3, 3)}
RESIZE_S = 0.01  # short, since the fleet carries out orders at once
RANGE = BatchRange(min=12, base=24, max=160, rule=LearningRateRule.LINEAR)


def submission(name, requested, batches=None, gpu_type=""):
    return Submission(
        name, __file__, (), "/", (), min_gpus=1, max_gpus=8, requested_gpus=requested, global_batch=24,
        epoch_samples=1000, batch_range=batches, gpu_type=gpu_type,
    )  # fmt: skip


def trace(seed, count, batches, resize_s=RESIZE_S, gap_s=40.0):
    rng = np.random.default_rng(seed)
    found, now = [], 0.0
    for index in range(count):
        made = submission(f"job{index:02d}", int(rng.choice([1, 2, 4])), batches)
        job = Job(
            name=made.name, arrival_s=now, min_gpus=1, max_gpus=8, requested_gpus=made.requested_gpus,
            gpu_batch=24 // made.requested_gpus, base_batch=24, max_batch=made.batches.max, epoch_samples=1000.0,
            throughput=Throughput(sample_s=0.02, sync_s=float(rng.uniform(0.01, 0.2)), gamma=1.0),
            noise_scale=0.0 if batches is None else float(rng.lognormal(4, 1)), resize_s=resize_s,
            feasible_gpus=made.sizes, feasible_batches=made.feasible_batches,
            num_parameters=int(rng.integers(10**6, 10**9)),
        )  # fmt: skip
        found.append(TraceJob(job, samples=float(rng.lognormal(9, 1.5)), noise_seed=index))
        now += float(rng.exponential(gap_s))
    return found


def typed_trace(seed, count):
    """Speeds on types differ by job; every fourth job is bound to one type."""
    rng = np.random.default_rng(seed)
    speeds = [dict(zip(TYPES, rng.permutation([4.0, 0.4, 1.0]).tolist(), strict=True)) for _ in range(count)]
    for index in range(0, count, 4):
        kind = list(TYPES)[index // 4 % 3]
        speeds[index] = {kind: speeds[index][kind]}
    return [dataclasses.replace(item, speeds=at) for item, at in zip(trace(seed, count, None), speeds, strict=True)]


class SimulatedFleet:
    """Carries out every order at once."""

    def __init__(self, items, pools):
        self.items, self.pools, self.now = items, pools, 0.0
        self.jobs = {item.job.name: SimulatedJob(item, pools) for item in items}
        self.phases, self.types = {}, {}
        self.num_orders = 0
        self.segments = []

    def start(self, submission, num_ranks, global_batch):
        name = submission.name
        self.phases[name], self.types[name] = JobPhase.RUNNING, submission.gpu_type
        self.resize(name, num_ranks, global_batch)

    def resize(self, name, num_ranks, global_batch):
        self.num_orders += 1
        job = self.jobs[name]
        kept = job.grant is not None and len(job.grant.gpus) == num_ranks
        gpus = job.grant.gpus if kept else tuple(range(num_ranks))
        self.change(name, Grant(gpus, global_batch, self.types[name]))

    def stop(self, name):
        self.num_orders += 1
        self.change(name, None)
        self.phases[name] = JobPhase.STOPPED

    def change(self, name, grant):
        segment = self.jobs[name].change(self.now, grant)
        if segment is not None and segment.end_s > segment.start_s:
            self.segments.append(segment)

    def remove(self, name):
        if self.phases.pop(name, None) is JobPhase.RUNNING:
            self.change(name, None)

    def status(self, name):
        if name not in self.phases:
            return None
        state = self.jobs[name].state(self.now, Foresight.NONE, self.types[name])
        phase = JobPhase.ENDED if self.jobs[name].end_s <= self.now else self.phases[name]
        count, batch = len(state.gpus), state.batch_size
        observed = self.jobs[name].measured_on(self.types[name])
        seconds = {(step.num_gpus, step.batch_size): step.seconds for step in observed}.get((count, batch), 0.0)
        report = RunReport(
            state.seen_samples / 24, count, seconds, 1.0, 1, phase is JobPhase.ENDED, state.seen_samples, batch,
            state.job.noise_scale or None, num_parameters=state.job.num_parameters,
        )  # fmt: skip
        return Status(phase, count, report, state.job.resize_s, gpu_type=self.types[name])

    def next_s(self):
        """Time of the next event of a job."""
        return min((self.jobs[name].end_s for name in self.phases), default=math.inf)


class SlowFleet(SimulatedFleet):
    """Carries out a resize when the job trains again. A restarted job has no report before."""

    def __init__(self, items, pools):
        super().__init__(items, pools)
        self.changes = {}
        """By job: the end of its change, and its ranks before it."""

    def resize(self, name, num_ranks, global_batch):
        job = self.jobs[name]
        before, num_resizes = len(job.grant.gpus) if job.grant else 0, job.num_resizes
        super().resize(name, num_ranks, global_batch)
        if job.num_resizes > num_resizes:
            state = job.state(self.now, Foresight.NONE, "")
            self.changes[name] = self.now + state.job.resize_s, before

    def is_changing(self, name):
        return name in self.changes and self.changes[name][0] > self.now

    def status(self, name):
        found = super().status(name)
        if found is None or not self.is_changing(name):
            return found
        before = self.changes[name][1]
        if before:
            return dataclasses.replace(found, phase=JobPhase.CHANGING, num_ranks=before)
        return dataclasses.replace(found, report=None)

    def next_s(self):
        ends = (end_s for name, (end_s, _) in self.changes.items() if self.is_changing(name))
        return min(super().next_s(), *ends, math.inf)


class Compared:
    """Decides on the scheduler's states, and demands the same decision on the states that the simulator shows."""

    def __init__(self, make, fleet):
        self.policy, self.other, self.fleet = make(), make(), fleet
        self.foresight, self.interval_s, self.sizes = self.policy.foresight, self.policy.interval_s, self.policy.sizes
        self.num_decisions, self.longest_wait_s = 0, 0.0

    def decide(self, now, jobs, cluster):
        allocation = self.policy.decide(now, jobs, cluster)
        expected = self.other.decide(now, [self.simulated(state.job.name) for state in jobs], cluster)
        assert decided(allocation, jobs) == decided(expected, jobs), now
        self.num_decisions += 1
        self.longest_wait_s = max(self.longest_wait_s, *(state.waited_s for state in jobs))
        return allocation

    def finished(self, now, state):
        self.policy.finished(now, state)
        self.other.finished(now, self.simulated(state.job.name))

    def simulated(self, name):
        """A job that is changing is left alone."""
        state = self.fleet.jobs[name].state(self.fleet.now, Foresight.NONE, "")
        if self.fleet.is_changing(name):
            held = len(state.gpus)
            job = dataclasses.replace(state.job, feasible_gpus=(held,), feasible_batches=())
            state = dataclasses.replace(state, job=job)
        return state


def decided(allocation, jobs):
    """Jobs that never ran and ask for the same are equal: policies choose any of them."""
    asks = {state.job.name: f"new, {state.job.requested_gpus}" for state in jobs if not state.has_started}
    return sorted((asks.get(name, name), *grant) for name, grant in granted(allocation).items())


def granted(allocation):
    return {name: (len(grant.gpus), grant.batch_size) for name, grant in allocation.items()}


class Recorded:
    def __init__(self, policy):
        self.policy, self.foresight, self.interval_s = policy, policy.foresight, policy.interval_s
        self.sizes = policy.sizes
        self.made = {}

    def decide(self, now, jobs, cluster):
        allocation = self.policy.decide(now, jobs, cluster)
        self.made[round(now, 6)] = granted(allocation)
        return allocation

    def finished(self, now, state):
        self.policy.finished(now, state)


def deploy(fleet, batches, policy, path, monkeypatch):
    """Drives a scheduler of this fleet at the times of events."""
    monkeypatch.setattr(ledger.time, "time", lambda: fleet.now)
    monkeypatch.setattr(scheduler, "_UNKNOWN_RESIZE_S", fleet.items[0].job.resize_s)
    made = Scheduler(ledger.Ledger(path), fleet, policy, fleet.pools, lambda: fleet.now)
    coming = list(fleet.items)
    while coming or fleet.phases:
        arrival_s = coming[0].job.arrival_s if coming else math.inf
        fleet.now = min(arrival_s, fleet.next_s(), fleet.now + policy.interval_s if fleet.phases else math.inf)
        while coming and coming[0].job.arrival_s <= fleet.now:
            item = coming.pop(0)
            gpu_type = next(iter(item.speeds)) if len(item.speeds) == 1 else ""
            made.submit(submission(item.job.name, item.job.requested_gpus, batches, gpu_type))
        before, ticks = -1, 0
        while before != fleet.num_orders:  # GPUs that a job leaves are granted in the next tick, here at the same time
            before, ticks = fleet.num_orders, ticks + 1
            assert ticks < 100, "orders without end"
            made.tick()
    return fleet


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "make",
    [Fifo, lambda: TiresiasLas((300.0,)), lambda: Ones(cooldown_s=1e-6, cooldown_resizes=0.0)],
    ids=["fifo", "tiresias", "ones"],
)
@pytest.mark.parametrize("batches", [None, RANGE], ids=["one batch", "batches"])
def test_the_deployed_scheduler_decides_as_the_simulated_one(make, batches, seed, tmp_path, monkeypatch):
    items = trace(seed, 12, batches)
    simulated = Recorded(make())
    simulate(items, simulated, CLUSTER)
    policy = Recorded(make())
    deploy(SimulatedFleet(items, {"": CLUSTER}), batches, policy, tmp_path / "ledger", monkeypatch)
    made = {now: sizes for now, sizes in policy.made.items() if sizes}
    assert made == {now: sizes for now, sizes in simulated.made.items() if sizes}
    assert len(made) > 20
    tried = {batch for grants in made.values() for _, batch in grants.values()}
    assert tried <= set(items[0].job.feasible_batches)
    assert (len(tried) > 4) == (batches is RANGE and isinstance(make(), Ones))


@pytest.mark.parametrize("resize_s", [5.0, 30.0])
@pytest.mark.parametrize(
    ("make", "batches"),
    [(Ones, None), (Ones, RANGE), (PolluxLike, RANGE)],
    ids=["ones, one batch", "ones, batches", "pollux-like, batches"],
)
def test_a_decision_is_that_of_the_simulator_while_resizes_take_long(make, batches, resize_s, tmp_path, monkeypatch):
    """With the default cool-down and aging. GPUs change hands when a resize ends, in the simulator when it begins; so
    decisions on the same jobs are compared, not schedules.
    """
    fleet = SlowFleet(trace(12, 25, batches, resize_s, gap_s=5.0), {"": CLUSTER})
    policy = Compared(make, fleet)
    deploy(fleet, batches, policy, tmp_path / "ledger", monkeypatch)
    assert policy.num_decisions > 90 and sum(job.num_resizes for job in fleet.jobs.values()) > 4
    assert batches is RANGE or policy.longest_wait_s >= 300  # after which a job comes first


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", [Fifo, lambda: Ones(cooldown_s=1e-6, cooldown_resizes=0.0)], ids=["fifo", "ones"])
def test_the_deployed_scheduler_decides_as_the_simulated_one_on_types_of_gpus(make, seed, tmp_path, monkeypatch):
    items = typed_trace(seed, 20)
    result = simulate(items, make(), TYPES)
    fleet = deploy(SimulatedFleet(items, TYPES), None, make(), tmp_path / "ledger", monkeypatch)
    assert held(fleet.segments) == held(result.segments)
    assert {part.gpu_type for part in result.segments} == set(TYPES)
    types = {item.job.name: {part.gpu_type for part in result.segments if part.job == item.job.name} for item in items}
    assert all(types[item.job.name] <= set(item.speeds) for item in items)
    assert make is Fifo or any(len(found) > 1 for found in types.values())


@pytest.mark.parametrize("seed", [3, 5])
def test_no_job_is_stopped_for_one_that_goes_elsewhere_meanwhile(seed, tmp_path, monkeypatch):
    """A policy that preempts: a job that waits for the GPUs of a stopping one keeps its pool until they are free."""
    items = typed_trace(seed, 20)
    fleet = deploy(SimulatedFleet(items, TYPES), None, TiresiasLas((300.0,)), tmp_path / "ledger", monkeypatch)
    assert {part.job for part in fleet.segments} == {item.job.name for item in items}


def held(segments):
    """When each job held how many GPUs of a type, with which batch."""
    return sorted(
        (part.job, round(part.start_s, 6), round(part.end_s, 6), part.gpu_type, len(part.gpus), part.batch_size)
        for part in segments
    )
