"""Batches that the deployed scheduler orders, with noted orders and made-up reports."""

import dataclasses

import pytest

from patrickstar.elastic import BatchRange, LearningRateRule, RunReport
from patrickstar.ones import Job, Throughput
from patrickstar.ones.cluster.fleet import JobPhase, Status
from patrickstar.ones.cluster.ledger import End, Ledger, Measured
from patrickstar.ones.cluster.submission import Submission
from tests.ones.test_scheduler import NotedFleet, scheduler, submission

RANGE = BatchRange(min=8, base=12, max=96, rule=LearningRateRule.LINEAR, warmup_steps=3)


class BatchFleet(NotedFleet):
    """Steps take a second, and 0.01 s for each sample of a rank."""

    def __init__(self):
        super().__init__()
        self.batches, self.samples, self.noise, self.refusal = {}, {}, None, ""

    def start(self, submission, num_ranks, global_batch):
        super().start(submission, num_ranks, global_batch)
        self.batches[submission.name] = global_batch

    def resize(self, name, num_ranks, global_batch):
        super().resize(name, num_ranks, global_batch)
        assert global_batch % num_ranks == 0
        if not self.refusal:
            self.batches[name] = global_batch

    def status(self, name):
        found = super().status(name)
        if found is None or found.report is None:
            return found
        batch = self.batches[name]
        self.samples[name] = self.samples.get(name, 0) + 5 * batch
        report = RunReport(
            found.report.num_steps, found.num_ranks, 1.0 + 0.01 * batch / found.num_ranks, 1.0, 0,
            found.phase is JobPhase.ENDED, self.samples[name], batch, self.noise, num_parameters=1000,
        )  # fmt: skip
        return Status(found.phase, found.num_ranks, report, 0.5, self.refusal)


def row(made):
    (found,) = made.rows()
    return found


def test_the_batch_stays_until_the_noise_scale_is_known(tmp_path):
    fleet = BatchFleet()
    made = scheduler(tmp_path, fleet)
    made.submit(submission("a", batch_range=RANGE))
    for _ in range(6):
        made.tick()
    assert (row(made).global_batch, row(made).noise_scale) == (12, 0.0)
    assert fleet.ranks == {"a": 4}
    fleet.noise = 500.0
    for _ in range(6):
        made.tick()
    assert row(made).noise_scale == 500.0
    assert 48 < row(made).global_batch == fleet.batches["a"] <= 96
    num_orders = len(fleet.log)
    fleet.noise = 480.0  # a small change of the noise scale changes no batch
    for _ in range(4):
        made.tick()
    assert len(fleet.log) == num_orders
    fleet.noise = 0.5
    for _ in range(4):
        made.tick()
    assert fleet.batches["a"] == 8
    track = made._tracks["a"]
    assert track.progress.samples == fleet.samples["a"]
    assert track.num_resizes == 0  # batches alone are no resizes


def test_a_job_on_one_gpu_tries_a_larger_batch(tmp_path):
    fleet = BatchFleet()
    made = scheduler(tmp_path, fleet)
    rising = dataclasses.replace(RANGE, min=12)
    made.submit(submission("a", batch_range=rising, min_gpus=1, max_gpus=1, requested_gpus=1))
    fleet.noise = 60.0
    had = []
    for _ in range(10):
        made.tick()
        had.append(fleet.batches["a"])
    first, tried, *_, last = dict.fromkeys(had)
    assert (first, last >= 64) == (12, True)  # a step takes a second beside its samples
    assert 18 <= tried < 30
    assert had[-4:] == [last] * 4


def test_progress_counts_what_samples_are_worth(tmp_path):
    fleet = BatchFleet()
    made = scheduler(tmp_path, fleet)
    made.submit(submission("a", batch_range=RANGE, min_gpus=2, max_gpus=2))
    fleet.noise = 1000.0
    for _ in range(8):
        made.tick()
    batch, progress = row(made).global_batch, made._tracks["a"].progress
    assert batch > 12
    before, samples = progress.done_samples, progress.samples
    made.tick()
    worth = (1000 + 12) / (1000 + batch)
    assert progress.done_samples - before == pytest.approx((progress.samples - samples) * worth)


def test_a_job_with_one_batch_is_never_ordered_another(tmp_path):
    fleet = BatchFleet()
    made = scheduler(tmp_path, fleet)
    made.submit(submission("a"))
    fleet.noise = 1000.0
    for _ in range(8):
        made.tick()
    assert set(fleet.batches.values()) == {12}


def test_a_refused_batch_is_shown(tmp_path):
    fleet = BatchFleet()
    made = scheduler(tmp_path, fleet)
    made.submit(submission("a", batch_range=RANGE))
    fleet.noise, fleet.refusal = 1000.0, "the script's batch is fixed"
    for _ in range(8):
        made.tick()
    assert (row(made).global_batch, row(made).note) == (12, "the script's batch is fixed")


def test_a_lost_rank_takes_the_batch_along(tmp_path):
    fleet = BatchFleet()
    made = scheduler(tmp_path, fleet)
    made.submit(submission("a", batch_range=dataclasses.replace(RANGE, base=16), global_batch=16))
    for _ in range(4):
        made.tick()
    assert (row(made).num_gpus, row(made).global_batch) == (4, 16)
    status = fleet.status
    fleet.status = lambda name: dataclasses.replace(status(name), num_lost=1)
    fleet.ranks["a"], fleet.batches["a"] = 3, 15  # which is none of the batches before the noise scale is known
    made.tick()
    assert (row(made).num_gpus, row(made).global_batch) == (3, 15)
    for _ in range(4):
        made.tick()
    assert (fleet.ranks["a"], fleet.batches["a"]) == (4, 16)


def test_a_request_may_be_for_gpus_that_do_not_divide_the_batch(tmp_path):
    fleet = BatchFleet()
    made = scheduler(tmp_path, fleet)
    made.submit(submission("a", global_batch=16, requested_gpus=3))
    for _ in range(4):
        made.tick()
    assert fleet.ranks["a"] in (1, 2, 4)


def test_a_new_scheduler_takes_the_batch_from_the_job(tmp_path):
    fleet = BatchFleet()
    made = scheduler(tmp_path, fleet)
    made.submit(submission("a", batch_range=RANGE))
    fleet.noise = 500.0
    for _ in range(8):
        made.tick()
    batch = row(made).global_batch
    assert batch > 12
    again = scheduler(tmp_path, fleet)
    fleet.batches["a"] = 48  # an order of the first scheduler is carried out late
    again.tick()
    fleet.batches["a"] = batch
    again.tick()
    num_orders = len(fleet.log)
    for _ in range(2):
        again.tick()
    assert row(again).global_batch == batch
    assert len(fleet.log) == num_orders
    fleet.phases["a"] = JobPhase.ENDED
    again.tick()
    third = scheduler(tmp_path, fleet)
    kept, ended = third._tracks["a"].progress, again._tracks["a"].progress
    assert (kept.done_samples, kept.noise_scale) == (pytest.approx(ended.done_samples), 500.0)
    assert third._tracks["a"].observed == again._tracks["a"].observed
    assert third._tracks["a"].num_parameters == again._tracks["a"].num_parameters == 1000


def test_a_ledger_of_one_batch_is_read(tmp_path):
    plain = {"num_steps": 3, "loss": 0.5, "observed": [[2, 0.1]]}
    assert Measured.of(plain, 12) == Measured(3, 0.5, {(2, 12): 0.1}, 36.0)
    ledger = Ledger(tmp_path / "ledger")
    ledger.submitted(submission("a", batch_range=RANGE))
    measured = Measured(7, 0.5, {(2, 24): 0.1}, 99.0, 31.0, 1000)
    ledger.ended("a", End.FINISHED, "", measured)
    ledger.close()
    entry = Ledger(tmp_path / "ledger").entries["a"]
    assert (entry.submission, entry.measured) == (submission("a", batch_range=RANGE), measured)


def test_submissions_with_batches():
    found = submission("a", batch_range=RANGE, max_gpus=5)
    assert Submission.of(found.as_plain()) == found
    assert found.sizes == (1, 2, 3, 4, 5)  # 5 divides 10
    assert found.first_sizes == (1, 2, 3, 4)
    assert found.feasible_batches[0] == 8 and found.feasible_batches[-1] == 96 and 12 in found.feasible_batches
    assert all(any(batch % size == 0 for batch in found.feasible_batches) for size in found.sizes)
    with pytest.raises(ValueError, match="global_batch is 16 and the base of its batch_range 12"):
        submission("a", batch_range=RANGE, global_batch=16)
    with pytest.raises(ValueError, match="inner_group is 2, and ranks that share samples do not measure"):
        submission("a", batch_range=RANGE, inner_group=2)


def test_a_job_takes_listed_batches_alone():
    throughput = Throughput(sample_s=0.01, sync_s=0.1)
    job = Job("a", 0.0, 1, 4, 2, 8, 16, 64, 1000.0, throughput, 400.0, feasible_batches=(8, 16, 30, 64))
    assert job.sizes == (1, 2, 3, 4)
    assert job.batches_on(3) == (30,)
    unknown = dataclasses.replace(job, noise_scale=0.0)
    assert unknown.sizes == (1, 2, 4)
    assert (unknown.largest_size(3), unknown.batches_on(4)) == (2, (16,))
    with pytest.raises(ValueError, match="base_batch 16 must be one of feasible_batches"):
        dataclasses.replace(job, feasible_batches=(8, 64))
