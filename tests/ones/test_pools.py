"""Jobs on GPUs of several types: where they wait, run and move, with noted orders and made-up speeds."""

import pytest

from patrickstar.ones import Cluster, make_policy
from patrickstar.ones.cluster.fleet import JobPhase
from patrickstar.ones.cluster.ledger import Ledger
from patrickstar.ones.cluster.scheduler import Scheduler
from patrickstar.ones.pools import Candidate, choose_pools, relative_speeds, seconds_on, sheet_tflops
from tests.ones.test_scheduler import Clock, NotedFleet, submission

POOLS = {"H100": Cluster(2, 2), "T4": Cluster(4, 4)}


def scheduler(tmp_path, fleet, pools=None):
    return Scheduler(Ledger(tmp_path / "ledger"), fleet, make_policy("ones"), pools or POOLS, Clock())


def ticks(made, count=6):
    for _ in range(count):
        made.tick()


def one(name, **options):
    return Candidate(**{"name": name, "least_gpus": 1, "gpus": 2, "speeds": {"H100": 4.0, "T4": 1.0}, **options})


def test_speeds_are_of_data_sheets_until_they_are_measured():
    assert (sheet_tflops("H100"), sheet_tflops("A100-40G"), sheet_tflops("A100-80G")) == (989, 312, 312)
    assert (sheet_tflops("A10G"), sheet_tflops("TPU-V4")) == (70, None)
    assert relative_speeds({}, ["H100", "T4"]) == {"H100": 989, "T4": 65}
    assert relative_speeds({}, ["H100", "TPU-V4"]) == {"H100": 1, "TPU-V4": 1}
    measured = {"H100": {(1, 12): 1.0, (2, 12): 0.5}, "T4": {(1, 12): 3.0}}
    assert relative_speeds(measured, ["H100", "T4", "L4"]) == {"H100": 1, "T4": 1 / 3, "L4": 121 / 989}
    assert seconds_on(measured, "T4", ["H100", "T4"]) == {(1, 12): 3.0, (2, 12): 1.5}
    apart = {"H100": {(2, 12): 0.5}, "T4": {(1, 12): 3.0}}
    assert seconds_on(apart, "T4", ["H100", "T4"]) == {(1, 12): 3.0}
    assert seconds_on({"": {(1, 12): 3.0}}, "", [""]) == {(1, 12): 3.0}
    found = seconds_on(measured, "L4", ["H100", "T4", "L4"])
    assert found == pytest.approx({(1, 12): 989 / 121, (2, 12): 0.5 * 989 / 121})


def test_jobs_wait_where_the_product_of_speeds_is_highest():
    chosen = choose_pools([one(name) for name in "abcdef"], POOLS)
    assert [chosen[name] for name in "abcdef"] == ["H100", "T4", "T4", "H100", "H100", "H100"]
    slow = {"H100": 1.1, "T4": 1.0}
    assert [*choose_pools([one(name, speeds=slow) for name in "abc"], POOLS).values()] == ["H100", "T4", "T4"]
    assert choose_pools([one("a", least_gpus=3), one("b", least_gpus=5)], POOLS) == {"a": "T4"}
    assert choose_pools([one("a", speeds={"T4": 1.0})], POOLS) == {"a": "T4"}


def test_jobs_share_a_pool_and_leave_what_they_do_not_take():
    """Beside a job that takes 1 GPU of 4 another one gets 3, which are worth as much as 2 at 1.5 times the speed."""
    there = one("small", gpus=1, held="T4")
    for speed, kind in ((1.4, "T4"), (1.6, "H100")):
        large = one("large", gpus=4, speeds={"H100": speed, "T4": 1.0})
        assert choose_pools([there, large], POOLS) == {"small": "T4", "large": kind}


def test_a_waiting_job_changes_its_pool_as_a_running_one():
    for speed, kind in ((1.4, "T4"), (1.6, "H100")):
        speeds = {"H100": speed, "T4": 1.0}
        assert choose_pools([one("a", speeds=speeds, waits="T4")], POOLS) == {"a": kind}
    assert choose_pools([one("a", least_gpus=3, waits="H100")], POOLS) == {"a": "T4"}


def test_a_job_moves_to_a_pool_that_is_worth_a_restart():
    held = [one("a", held="T4", may_leave=True), one("b", held="T4", may_leave=True)]
    assert choose_pools(held, POOLS) == {"a": "H100", "b": "T4"}  # one at a time
    full = [one(name, held="H100") for name in "cde"]
    assert choose_pools([*held, *full], POOLS)["a"] == "T4"
    stays = one("a", held="T4", speeds={"H100": 1.4, "T4": 1.0}, may_leave=True)
    assert choose_pools([stays], POOLS) == {"a": "T4"}
    assert choose_pools([one("a", held="T4")], POOLS) == {"a": "T4"}
    assert choose_pools([one("a", held="gone", may_leave=True)], {"T4": Cluster(4)}) == {}


def test_a_job_of_a_type_gets_it_while_others_run(tmp_path):
    fleet = NotedFleet()
    made = scheduler(tmp_path, fleet)
    made.submit(submission("any"))
    ticks(made)
    assert (fleet.types["any"], fleet.ranks["any"]) == ("H100", 2)
    made.submit(submission("bound", gpu_type="H100", min_gpus=1, requested_gpus=1))
    made.submit(submission("slow", gpu_type="T4"))
    ticks(made, 40)  # the policy shares the pool, at a time or in turns
    assert fleet.types["bound"] == "H100" and fleet.ranks["bound"] in (1, 2)
    assert [entry for entry in fleet.log if entry[:2] == ("start", "any")][1:]
    assert (fleet.types["slow"], fleet.ranks["slow"]) == ("T4", 4)
    assert all(row.gpu_type == fleet.types[row.name] for row in made.rows() if row.num_gpus)


def test_a_job_goes_on_where_it_is_faster(tmp_path):
    """Measured speeds decide: data sheets call the other type the faster one."""
    fleet = NotedFleet(speeds={"H100": 1.0, "T4": 3.0})
    made = scheduler(tmp_path, fleet)
    made.submit(submission("a"))
    ticks(made)
    assert fleet.types["a"] == "H100"
    made._tracks["a"].seconds["T4"] = {(2, 12): 10.0 / 2 / 3}  # from an earlier start
    ticks(made, 40)
    assert (fleet.types["a"], fleet.ranks["a"]) == ("T4", 4)
    assert [event[:2] for event in fleet.log].count(("stop", "a")) == 1
    again = scheduler(tmp_path, fleet)
    ticks(again)
    assert [row.gpu_type for row in again.rows()] == ["T4"]
    assert [event[:2] for event in fleet.log].count(("stop", "a")) == 1


def test_a_job_whose_type_is_gone_goes_on_elsewhere(tmp_path):
    fleet = NotedFleet()
    made = scheduler(tmp_path, fleet)
    made.submit(submission("a"))
    ticks(made)
    made.see_cluster({"T4": Cluster(4, 4)})
    ticks(made)
    assert fleet.ranks["a"] == 2  # its processes have not said yet what became of them
    fleet.phases["a"] = JobPhase.FAILED
    ticks(made, 1)
    fleet.phases["a"] = JobPhase.RUNNING
    ticks(made)
    assert (fleet.types["a"], fleet.ranks["a"]) == ("T4", 4)
