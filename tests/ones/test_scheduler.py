import dataclasses
import functools
import subprocess
import sys
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.elastic import RunReport
from patrickstar.elastic.orders import OutcomeKind
from patrickstar.ones import Cluster, make_policy
from patrickstar.ones.cluster.feasibility import planned as planned_sizes
from patrickstar.ones.cluster.fleet import JobPhase, Status
from patrickstar.ones.cluster.ledger import End, Ledger, LedgerError
from patrickstar.ones.cluster.ray_ranks import JobProcesses
from patrickstar.ones.cluster.scheduler import MOST_FAILURES, Scheduler
from patrickstar.ones.cluster.submission import Submission


def submission(name, **changes):
    own = {"min_gpus": 1, "max_gpus": 4, "requested_gpus": 2, "global_batch": 12, "epoch_samples": 120}
    return Submission(name, __file__, ("--lr", "1"), "/tmp", (("A", "B"),), **{**own, **changes})


class NotedFleet:
    def __init__(self, is_slow=False, speeds=types.MappingProxyType({})):
        self.ranks, self.ordered, self.steps, self.phases, self.types = {}, {}, {}, {}, {}
        self.is_slow, self.speeds = is_slow, speeds
        self.log = []

    def start(self, submission, num_ranks, global_batch):
        assert submission.name not in self.ranks
        assert global_batch % num_ranks == 0
        self.log.append(("start", submission.name, num_ranks))
        self.types[submission.name] = submission.gpu_type
        self.ranks[submission.name], self.phases[submission.name] = num_ranks, JobPhase.RUNNING

    def resize(self, name, num_ranks, global_batch):
        self.log.append(("resize", name, num_ranks))
        self.ordered[name] = num_ranks
        if not self.is_slow:
            self.carry_out()

    def stop(self, name):
        self.log.append(("stop", name))
        self.phases[name] = JobPhase.STOPPED

    def carry_out(self):
        self.ranks.update(self.ordered)
        self.ordered.clear()

    def status(self, name):
        if name not in self.ranks:
            return None
        phase = JobPhase.CHANGING if name in self.ordered else self.phases[name]
        steps = self.steps[name] = self.steps.get(name, 0) + 5
        seconds = 10.0 / self.ranks[name] / self.speeds.get(self.types[name], 1.0)
        report = RunReport(steps, self.ranks[name], seconds, 2.0 / max(steps, 1), steps - 1, phase is JobPhase.ENDED)
        held = max(self.ranks[name], self.ordered.get(name, 0))
        reason = "it broke" if phase is JobPhase.FAILED else ""
        return Status(phase, held, report, 0.5, reason=reason, gpu_type=self.types[name])

    def remove(self, name):
        self.ranks.pop(name, None)
        self.ordered.pop(name, None)

    def num_gpus(self):
        return sum(max(count, self.ordered.get(name, 0)) for name, count in self.ranks.items())


class Clock:
    now = 1e9

    def __call__(self):
        self.now += 10
        return self.now


def scheduler(tmp_path, fleet, policy="ones", num_gpus=4):
    return Scheduler(Ledger(tmp_path / "ledger"), fleet, make_policy(policy), {"": Cluster(num_gpus)}, Clock())


def states(made):
    return {row.name: row.state for row in made.rows()}


def test_jobs_start_grow_and_finish(tmp_path):
    fleet = NotedFleet()
    made = scheduler(tmp_path, fleet)
    for name in ("a", "b"):
        made.submit(submission(name))
    assert states(made) == {"a": "waiting", "b": "waiting"}
    for _ in range(6):
        made.tick()
    assert states(made) == {"a": "running", "b": "running"}
    assert fleet.num_gpus() == 4
    fleet.phases["a"] = JobPhase.ENDED
    for _ in range(6):
        made.tick()
    assert fleet.ranks == {"b": 4}
    finished, running = made.rows()
    assert (finished.state, finished.num_gpus, finished.num_steps > 0) == ("finished", 0, True)
    assert (running.num_gpus, running.num_resizes > 0, running.resize_s) == (4, True, 0.5)


def test_what_cannot_run_is_refused_before_it_waits(tmp_path):
    made = scheduler(tmp_path, NotedFleet())
    with pytest.raises(ValueError, match="job big needs at least 6 GPUs and the cluster has 4"):
        made.submit(submission("big", min_gpus=5, max_gpus=8, requested_gpus=6))
    with pytest.raises(ValueError, match="there is no script /nowhere"):
        made.submit(dataclasses.replace(submission("a"), script="/nowhere"))
    made.submit(submission("a"))
    with pytest.raises(ValueError, match="there is a job a already"):
        made.submit(submission("a"))
    with pytest.raises(ValueError, match="no job b that waits or runs"):
        made.cancel("b")
    with pytest.raises(ValueError, match="how much work each job has left"):
        scheduler(tmp_path, NotedFleet(), "srtf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_gpus": 3}, "must be at least 1 and ascend"),
        ({"global_batch": 0}, "global_batch 0"),
        ({"global_batch": 1, "min_gpus": 2}, "no number of GPUs from 2 to 4 divides its global batch of 1"),
    ],
)
def test_submissions_that_contradict_themselves(changes, message):
    with pytest.raises(ValueError, match=message):
        submission("a", **changes)
    with pytest.raises(ValueError, match=r"name is 'a/b'"):
        submission("a/b")


def test_only_numbers_of_gpus_that_a_job_fits_on_are_granted(tmp_path):
    planned = submission("a", planned=((2, 9.0), (4, 5.0)))
    assert planned.sizes == (2, 4)
    assert Submission.of(planned.as_plain()) == planned
    fleet = NotedFleet()
    made = scheduler(tmp_path, fleet, num_gpus=3)
    made.submit(planned)
    for _ in range(4):
        made.tick()
    assert fleet.ranks == {"a": 2}
    with pytest.raises(ValueError, match="job b needs at least 4 GPUs and the cluster has 3"):
        made.submit(submission("b", planned=((4, 1.0),)))


@pytest.mark.slow
def test_the_planner_says_on_which_numbers_of_gpus_a_job_fits():
    options = ["--model", "gpt:512x4", "--seq-len", "128", "--gpu", "a10", "--host-memory", "400MiB"]
    batches = submission("a", global_batch=8).batches
    found = planned_sizes((1, 4), [*options, "--device-memory", "600MiB"], batches, 2, 4)
    assert list(found.step_seconds) == [4]
    assert 0 < found.step_seconds[4] < 10
    assert "host_memory: needs 1.01 GiB" in found.refusals[1]
    with pytest.raises(ValueError, match="`patrickstar plan` refuses --model nothing"):
        planned_sizes((1,), ["--model", "nothing"], batches, 2, 4)


def test_a_job_that_fails_starts_again_and_is_given_up_in_the_end(tmp_path):
    fleet = NotedFleet()
    made = scheduler(tmp_path, fleet)
    made.submit(submission("a"))
    made.tick()
    fleet.steps["a"] = -5  # it never gets anywhere
    for _ in range(MOST_FAILURES):
        assert fleet.ranks
        fleet.phases["a"] = JobPhase.FAILED
        fleet.steps["a"] = -5
        made.tick()
    (row,) = made.rows()
    assert (row.state, row.num_failures, row.note) == ("failed", MOST_FAILURES - 1, "it broke")
    assert [entry[0] for entry in fleet.log].count("start") == MOST_FAILURES


def test_a_job_whose_node_is_gone_starts_again(tmp_path):
    fleet = NotedFleet()
    made = scheduler(tmp_path, fleet)
    made.submit(submission("a"))
    made.tick()
    made.tick()
    fleet.ranks.clear()
    made.tick()
    made.tick()
    (row,) = made.rows()
    assert (row.state, row.num_failures) == ("running", 1)
    assert "gone" in row.note


def test_gpus_that_a_job_leaves_are_granted_when_it_has_left_them(tmp_path):
    fleet = NotedFleet(is_slow=True)
    made = scheduler(tmp_path, fleet)
    made.submit(submission("a"))
    for _ in range(4):
        made.tick()
        fleet.carry_out()
    assert fleet.ranks == {"a": 4}
    made.submit(submission("b"))
    for _ in range(8):
        made.tick()
        assert fleet.num_gpus() <= 4
    fleet.carry_out()
    for _ in range(4):
        made.tick()
        assert fleet.num_gpus() <= 4
        fleet.carry_out()
    assert ("start", "b") in [entry[:2] for entry in fleet.log]


def test_a_new_scheduler_goes_on_where_the_last_one_was(tmp_path):
    fleet = NotedFleet()
    made = scheduler(tmp_path, fleet)
    for name in ("a", "b", "c"):
        made.submit(submission(name))
    for _ in range(4):
        made.tick()
    made.cancel("c")
    fleet.phases["b"] = JobPhase.ENDED
    made.tick()
    running, started = dict(fleet.ranks), [entry for entry in fleet.log if entry[0] == "start"]
    again = scheduler(tmp_path, fleet)
    again.tick()
    assert states(again) == {"a": "running", "b": "finished", "c": "cancelled"}
    before, now = (rows.rows()[1] for rows in (made, again))
    assert now.num_steps == before.num_steps > 0
    assert now.loss == before.loss
    assert again._policy._experience._past == made._policy._experience._past != []
    assert fleet.ranks.keys() == running.keys()
    assert [entry for entry in fleet.log if entry[0] == "start"] == started


class DiesInRemove(NotedFleet):
    def remove(self, name):
        if name in self.ranks:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("phase", "state", "num_failures"), [(JobPhase.FAILED, "running", 1), (JobPhase.ENDED, "finished", 0)]
)
def test_a_scheduler_that_dies_before_the_processes_of_a_job_have_ended(phase, state, num_failures, tmp_path):
    fleet = DiesInRemove()
    made = scheduler(tmp_path, fleet)
    made.submit(submission("a"))
    for _ in range(4):
        made.tick()
    fleet.phases["a"] = phase
    with pytest.raises(KeyboardInterrupt):
        made.tick()
    fleet.remove = functools.partial(NotedFleet.remove, fleet)
    again = scheduler(tmp_path, fleet)
    for _ in range(3):
        again.tick()
    (row,) = again.rows()
    assert (row.state, row.num_failures) == (state, num_failures)
    assert fleet.ranks.keys() == ({"a"} if state == "running" else set())


def test_a_job_that_finds_no_gpus_to_start_on_waits(tmp_path):
    fleet = NotedFleet()
    made = scheduler(tmp_path, fleet)
    made.submit(submission("a"))
    made.tick()
    fleet.phases["a"] = JobPhase.STOPPED
    made.tick()
    for _ in range(3):
        made.tick()
    (row,) = made.rows()
    assert (row.state, row.num_failures) == ("running", 0)
    assert [entry[0] for entry in fleet.log].count("start") == 2


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_new_scheduler_counts_gpus_of_ranks_that_join(is_refused, tmp_path):
    fleet = NotedFleet()
    made = scheduler(tmp_path, fleet)
    made.submit(submission("a"))
    made.submit(submission("b", min_gpus=2, max_gpus=2))
    for _ in range(4):
        made.tick()
    fleet.is_slow, fleet.phases["b"] = True, JobPhase.ENDED
    for _ in range(6):
        made.tick()
    assert (fleet.ranks, fleet.ordered) == ({"a": 2}, {"a": 4})
    again = scheduler(tmp_path, fleet)
    again.submit(submission("c"))
    again.tick()
    assert again.rows()[0].num_gpus == 4
    assert fleet.ranks == {"a": 2}
    if is_refused:
        fleet.ordered.clear()
    else:
        fleet.carry_out()
    again.tick()
    assert again.rows()[0].num_gpus == fleet.ranks["a"]


def test_a_ledger_without_its_last_bytes(tmp_path):
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    for name in ("a", "b"):
        ledger.submitted(submission(name))
    ledger.ended("a", End.FINISHED)
    ledger.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    again = Ledger(path)
    assert [entry.end for entry in again.entries.values()] == [None, None]
    assert again.entries["a"].submission == submission("a")
    again.ended("a", End.FINISHED)
    again.close()
    assert Ledger(path).entries["a"].end is End.FINISHED
    path.write_bytes(b"{}\n" + whole)
    with pytest.raises(LedgerError, match="line 1 of .* is no line of a ledger"):
        Ledger(path)


@settings(max_examples=40, deadline=None)
@given(
    policy=st.sampled_from(["ones", "ones-published", "pollux-like", "fifo", "tiresias"]),
    events=st.lists(st.tuples(st.sampled_from(["submit", "end", "fail", "carry out", "tick"]), st.integers(0, 5))),
)
def test_never_more_gpus_than_there_are(policy, events, tmp_path_factory):
    fleet = NotedFleet(is_slow=True)
    made = scheduler(tmp_path_factory.mktemp("ones"), fleet, policy)
    for event, number in events:
        name = str(number)
        if event == "submit" and name not in states(made):
            made.submit(submission(name, max_gpus=1 + number % 4, requested_gpus=1))
        elif event in ("end", "fail") and name in fleet.ranks:
            fleet.phases[name] = JobPhase.ENDED if event == "end" else JobPhase.FAILED
        elif event == "carry out":
            fleet.carry_out()
        made.tick()
        assert fleet.num_gpus() <= 4


class Ranks:
    def __init__(self, *actors: str):
        self.actors = list(actors)

    def drop(self, actor: str) -> None:
        self.actors.remove(actor)


def processes_of(trains: Ranks, joins: Ranks, ended: set[str], outcomes: list) -> JobProcesses:
    processes = object.__new__(JobProcesses)
    processes._submission = submission("job")
    processes._groups, processes._joining = [trains], joins
    processes._number, processes._num_ranks, processes._ordered_ranks = 1, 1, 2
    processes._stops, processes._resize_s, processes._refusal, processes._failure = False, 0.0, "", ""
    processes._lost = []
    processes._orders = types.SimpleNamespace(outcome=lambda number: outcomes.pop(0), report=lambda: None)

    def note_exit(group, actor):
        if actor in ended:
            group.drop(actor)

    processes._note_exit = note_exit
    return processes


def test_a_run_that_ends_before_others_have_joined_is_over():
    joins = Ranks("joins")
    processes = processes_of(Ranks("trains"), joins, {"trains"}, [None, None])
    assert processes.status().phase is JobPhase.ENDED
    assert joins.actors == []


@pytest.mark.parametrize("outcomes", [["resized"], [None, "resized"]], ids=["before the end", "with the end"])
def test_those_that_have_joined_go_on_when_the_others_end(outcomes):
    resized = types.SimpleNamespace(kind=OutcomeKind.DONE, seconds=1.0, reason="")
    joins = Ranks("joins")
    found = [resized if one else None for one in outcomes]
    processes = processes_of(Ranks("trains"), joins, {"trains"}, found)
    processes.status()
    assert joins.actors == ["joins"]
    assert processes._groups == [joins]


def test_a_rank_is_started_without_pytorch():
    """Its script imports PyTorch; the actor beside each rank has no use for it."""
    code = "import patrickstar.ones.cluster.rank_process, sys; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
