"""Rules of the deployed scheduler without Ray: nodes that come and go, classes of jobs, placement, lost ranks."""

import dataclasses
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.elastic import RunReport
from patrickstar.ones import Cluster, make_policy
from patrickstar.ones.cluster import ray_ranks
from patrickstar.ones.cluster.fleet import JobPhase
from patrickstar.ones.cluster.ledger import Ledger
from patrickstar.ones.cluster.metrics import values_of
from patrickstar.ones.cluster.placement import choose_nodes
from patrickstar.ones.cluster.ray_ranks import JobProcesses
from patrickstar.ones.cluster.rows import in_a_line
from patrickstar.ones.cluster.scheduler import Scheduler
from tests.ones.test_scheduler import Clock, NotedFleet, scheduler, states, submission


def ticks(made, count=6):
    for _ in range(count):
        made.tick()


def test_jobs_grow_on_nodes_that_come_and_wait_when_nodes_go(tmp_path):
    fleet = NotedFleet()
    made = scheduler(tmp_path, fleet, num_gpus=2)
    made.submit(submission("a"))
    ticks(made)
    assert fleet.ranks == {"a": 2}
    made.see_cluster({"": Cluster(4, 4)})
    ticks(made)
    assert fleet.ranks == {"a": 4}
    made.see_cluster({"": Cluster(3, 3)})
    ticks(made, 2)
    assert fleet.ranks == {"a": 4}  # a job that holds GPUs which are gone is left alone until it says what became of it
    fleet.ranks["a"] = 2
    ticks(made)
    assert fleet.ranks == {"a": 3}
    fleet.phases["a"] = JobPhase.STOPPED
    made.see_cluster({"": Cluster(1, 1)})
    made.submit(submission("b", min_gpus=1, requested_gpus=1))
    ticks(made)
    assert sum(fleet.ranks.values()) == 1


def test_a_job_that_goes_on_with_too_few_ranks_is_stopped_for_another_one_alone(tmp_path):
    fleet = NotedFleet()
    made = scheduler(tmp_path, fleet, num_gpus=3)
    made.submit(submission("a", min_gpus=3, max_gpus=3, requested_gpus=3))
    ticks(made)
    fleet.ranks["a"] = 2
    made.see_cluster({"": Cluster(2, 2)})
    ticks(made)
    assert fleet.ranks == {"a": 2}
    made.submit(submission("b"))
    ticks(made)
    assert fleet.ranks == {"b": 2}


def test_a_job_waits_for_gpus_of_its_type(tmp_path):
    fleet = NotedFleet()
    made = scheduler(tmp_path, fleet, num_gpus=8)
    made.see_cluster({"H100": Cluster(2, 2), "A100": Cluster(6, 4)})
    with pytest.raises(ValueError, match="job big needs at least 3 GPUs of type H100 and the cluster has 2"):
        made.submit(submission("big", min_gpus=3, requested_gpus=3, gpu_type="H100"))
    made.submit(submission("typed", gpu_type="H100"))
    made.submit(submission("any"))
    ticks(made)
    assert fleet.ranks["typed"] == 2
    assert fleet.ranks["any"] == 4


def test_inner_groups_come_whole_and_stay(tmp_path):
    fleet = NotedFleet()
    made = scheduler(tmp_path, fleet, num_gpus=6)
    inner = submission("mesh", inner_group=2, min_gpus=1, max_gpus=6, requested_gpus=2)
    assert inner.sizes == (2, 4, 6)
    with pytest.raises(ValueError, match="from 3 to 3 that is a multiple of 2 divides"):
        submission("odd", inner_group=2, min_gpus=3, max_gpus=3, requested_gpus=3)
    made.submit(inner)
    ticks(made)
    assert [entry for entry in fleet.log if entry[0] != "start"] == []
    assert fleet.ranks["mesh"] in (2, 4, 6)


def test_inner_groups_divide_the_batch(tmp_path):
    fleet = types.SimpleNamespace(log=[])
    fleet.start = lambda submission, num_ranks, global_batch: fleet.log.append((num_ranks, global_batch))
    fleet.status = lambda name: None
    made = scheduler(tmp_path, fleet, num_gpus=8)
    made.submit(submission("mesh", inner_group=8, min_gpus=8, max_gpus=8, requested_gpus=8, global_batch=3))
    made.tick()
    assert fleet.log == [(8, 3)]


def test_a_higher_priority_comes_first(tmp_path):
    fleet = NotedFleet()
    made = scheduler(tmp_path, fleet)
    made.submit(submission("low"))
    ticks(made)
    assert fleet.ranks == {"low": 4}
    made.submit(submission("high", priority=1, min_gpus=3, requested_gpus=3))
    ticks(made, 12)
    assert fleet.ranks["high"] >= 3
    assert sum(fleet.ranks.values()) <= 4
    fleet.phases["high"] = JobPhase.ENDED
    ticks(made, 12)
    assert fleet.ranks == {"low": 4}


def test_users_stay_within_their_quotas(tmp_path):
    fleet = NotedFleet()
    quotas = {"ada": 2}
    made = Scheduler(Ledger(tmp_path / "ledger"), fleet, make_policy("ones"), {"": Cluster(8)}, Clock(), quotas)
    for name in ("one", "two", "three"):
        made.submit(submission(name, user="ada", requested_gpus=1))
    made.submit(submission("other", user="bob"))
    for _ in range(12):
        made.tick()
        assert sum(count for name, count in fleet.ranks.items() if name != "other") <= 2
    assert fleet.ranks["other"] == 4
    assert sum(fleet.ranks.values()) == 6


def test_a_note_has_the_error_at_the_end_of_an_output():
    output = "a rank ended with 1:\nTraceback (most recent call last):\n  File ...\nRuntimeError: out of memory\n"
    assert in_a_line(output) == "a rank ended with 1: RuntimeError: out of memory"
    assert in_a_line("one") == "one"
    assert in_a_line("") == ""


def test_metrics_have_what_a_row_knows(tmp_path):
    fleet = NotedFleet()
    made = scheduler(tmp_path, fleet)
    made.submit(submission("a"))
    (waiting,) = made.rows()
    assert values_of(waiting) == {"job_gpus": 0, "job_steps": 0, "job_resizes": 0, "job_failures": 0}
    ticks(made)
    (row,) = made.rows()
    assert values_of(row)["job_loss"] == row.loss
    assert values_of(row)["job_step_seconds"] == row.seconds_per_step > 0


def test_ranks_are_packed():
    assert choose_nodes({"a": 4, "b": 4}, 4, 1, ()) == ["a"] * 4
    assert choose_nodes({"a": 4, "b": 2}, 2, 1, ()) == ["b"] * 2  # the node with as little more as possible
    assert choose_nodes({"a": 4, "b": 2}, 2, 1, {"a"}) == ["a"] * 2  # where the job is
    assert choose_nodes({"a": 3, "b": 5}, 6, 1, ()) == ["b"] * 5 + ["a"]
    assert choose_nodes({"a": 3, "b": 3}, 2, 2, ()) == ["a", "b"]  # a group is on one node
    assert choose_nodes({}, 2, 1, ()) == []


@given(st.dictionaries(st.text(min_size=1, max_size=2), st.integers(0, 8), min_size=1), st.integers(1, 12))
def test_no_node_gets_more_than_it_has_if_there_are_enough(free, count):
    chosen = choose_nodes(free, count, 1, ())
    if count <= sum(free.values()):
        assert len(chosen) == count
        assert all(chosen.count(node) <= free[node] for node in free)


class Ranks:
    def __init__(self, *actors):
        self.actors = list(actors)

    def drop(self, actor):
        self.actors.remove(actor)


def processes(reports, num_ranks=3):
    made = object.__new__(JobProcesses)
    made._submission = submission("job")
    made._groups, made._joining, made._number, made._num_ranks = [Ranks(*range(num_ranks))], None, 0, num_ranks
    made._stops, made._resize_s, made._refusal, made._failure = False, 0.0, "", ""
    made._lost, made._lost_at = [], 0.0
    made._orders = types.SimpleNamespace(outcome=lambda number: None, report=lambda: reports[0])
    made._note_exit = lambda group, actor: None
    return made


def lose(made, rank, text):
    made._groups[0].drop(rank)
    made._lost.append(text)
    made._lost_at = ray_ranks.time.monotonic()


def test_a_job_goes_on_when_its_run_does_without_a_lost_rank(monkeypatch):
    before = RunReport(5, 3, 0.1, 1.0, 0, False, num_lost=0, redundancy=1)
    reports = [before]
    made = processes(reports)
    assert made.status().phase is JobPhase.RUNNING
    lose(made, 1, "a rank ended with -9:\n")
    assert made.status().phase is JobPhase.CHANGING
    reports[0] = dataclasses.replace(before, num_ranks=2, num_lost=1)
    status = made.status()
    assert (status.phase, status.num_ranks, status.num_lost) == (JobPhase.RUNNING, 2, 1)
    lose(made, 2, "a rank ended with -9:\nagain")
    now = ray_ranks.time.monotonic()
    monkeypatch.setattr(ray_ranks.time, "monotonic", lambda: now + 121)
    assert made.status().phase is JobPhase.FAILED
    assert "again" in made.status().reason


def test_a_job_without_redundancy_fails_with_a_rank_and_names_the_first():
    made = processes([RunReport(5, 3, 0.1, 1.0, 0, False)])
    lose(made, 0, "a rank ended with 1:\npatrickstar.RankFailure: rank 0 stops")
    lose(made, 1, "a rank ended with 1:\nValueError: bad batch")
    status = made.status()
    assert (status.phase, in_a_line(status.reason)) == (JobPhase.FAILED, "a rank ended with 1: ValueError: bad batch")


def test_ranks_that_end_after_one_was_lost_have_finished():
    made = processes([RunReport(9, 2, 0.1, 1.0, 0, True, num_lost=1, redundancy=1)])
    lose(made, 1, "a rank ended with -9:\n")
    made._groups[0].actors.clear()
    assert made.status().phase is JobPhase.ENDED


def test_a_lost_rank_is_shown_and_is_no_failure(tmp_path):
    fleet = NotedFleet()
    made = scheduler(tmp_path, fleet)
    made.submit(submission("a"))
    ticks(made)
    status = fleet.status
    fleet.status = lambda name: dataclasses.replace(status(name), num_lost=1)
    fleet.ranks["a"] = 3
    made.tick()
    (row,) = made.rows()
    assert (states(made), row.num_failures) == ({"a": "running"}, 0)
    assert row.note == "goes on without 1 lost ranks"
