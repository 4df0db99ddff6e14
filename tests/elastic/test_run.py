import csv
import threading
import time

import pytest
import torch
from torch import nn

from patrickstar.elastic import ElasticRun, Next, Orders, OutcomeKind, serve_rendezvous
from patrickstar.runtime import initialize_engine
from tests.distributed import run_ranks
from tests.elastic.runs import GLOBAL_BATCH, build, follow_orders, follow_with_initialize
from tests.elastic.test_resize import ALONE

NEVER = 10**9


def environment(number):
    return {**ALONE, "PATRICKSTAR_ELASTIC_JOINS": "1" if number > 0 else "0"}


class Started:
    def __init__(self, num_processes, folder, num_steps):
        store = serve_rendezvous("127.0.0.1", 0)
        self.orders = Orders(store)
        self._results = []
        arguments = (follow_orders, f"127.0.0.1:{store.port}", str(folder), num_steps)
        self._thread = threading.Thread(
            target=lambda: self._results.append(run_ranks(num_processes, *arguments, environment=environment))
        )
        self._thread.start()

    def until(self, ask):
        deadline = time.monotonic() + 60
        while (answer := ask()) is None or answer is False:
            assert self._thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return answer

    def outcome(self, number):
        return self.until(lambda: self.orders.outcome(number))

    def let_train(self, num_steps):
        first = self.until(self.orders.report).num_steps
        self.until(lambda: self.orders.report().num_steps >= first + num_steps)

    def results(self):
        self._thread.join()
        (results,) = self._results
        return results


@pytest.fixture(scope="module")
def ordered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ordered")
    run = Started(3, folder, NEVER)
    outcomes, reports = [], []
    for num_ranks in (2, 3, 5, 1):
        run.let_train(2)
        outcomes.append(run.outcome(run.orders.resize(num_ranks)))
        run.let_train(1)
        reports.append(run.orders.report())
    outcomes.append(run.outcome(run.orders.stop()))
    results = run.results()
    reports.append(run.orders.report())
    return results, outcomes, reports, folder


@pytest.fixture(scope="module")
def straight(ordered, tmp_path_factory):
    num_steps = ordered[0][0]["num_steps"] + 3
    folder = tmp_path_factory.mktemp("straight")
    (result,) = run_ranks(1, follow_orders, None, str(folder), num_steps, environment=environment)
    return result


def check_losses(losses, straight, steps):
    for step in steps:
        means = [torch.tensor(some).mean() for some in (losses(step), straight["losses"][step])]
        torch.testing.assert_close(*means, rtol=1e-4, atol=1e-4)


def test_orders_are_carried_out_after_the_same_step_by_all_ranks(ordered, straight):
    results, outcomes, reports, _ = ordered
    kinds = [outcome.kind for outcome in outcomes]
    done = OutcomeKind.DONE
    assert kinds == [done, done, OutcomeKind.REFUSED, done, done]
    assert "12" in outcomes[2].reason
    assert "5" in outcomes[2].reason
    assert [report.num_ranks for report in reports] == [2, 3, 3, 1, 1]
    assert {report.num_parameters for report in reports} == {sum(param.numel() for param in build().parameters())}
    assert [result["end"] for result in results].count(Next.STOP) == 1
    assert [result["end"] for result in results].count(Next.LEAVE) == 2
    num_steps = results[0]["num_steps"]
    for step in range(num_steps):
        seen = [sample for result in results for sample in result["seen"].get(step, [])]
        assert len(seen) == GLOBAL_BATCH
        assert sorted(seen) == sorted(straight["seen"][step])
    check_losses(lambda step: sum((r["losses"].get(step, []) for r in results), []), straight, range(num_steps))


def test_reports_say_how_the_run_does(ordered):
    results, outcomes, reports, _ = ordered
    last = reports[-1]
    assert last.has_ended
    assert last.num_steps == last.checkpoint_steps == results[0]["num_steps"]
    assert last.loss == results[0]["losses"][last.num_steps - 1][-1]
    assert all(0.02 <= report.seconds_per_step < 10 for report in reports[:-1])
    assert all(0 < outcome.seconds < 60 for outcome in outcomes)


def test_a_run_that_was_stopped_goes_on_from_its_checkpoint(ordered, straight):
    results, _, _, folder = ordered
    first = results[0]["num_steps"]
    (result,) = run_ranks(1, follow_orders, None, str(folder), first + 3, environment=environment)
    assert sorted(result["losses"]) == list(range(first, first + 3))
    assert all(sorted(result["seen"][step]) == sorted(straight["seen"][step]) for step in result["seen"])
    check_losses(result["losses"].get, straight, result["losses"])


def test_bad_arguments(monkeypatch):
    engine, _ = initialize_engine(lambda: nn.Linear(2, 2), config={"default_chunk_size": 1024})
    with engine:
        with pytest.raises(ValueError, match="look_seconds is 0"):
            ElasticRun(engine, {}, look_seconds=0)
        with pytest.raises(ValueError, match=r"run's own state; give it another name"):
            ElasticRun(engine, {"patrickstar.elastic.ElasticRun": object()})
        monkeypatch.setenv("PATRICKSTAR_ELASTIC_JOINS", "1")
        with pytest.raises(ValueError, match="PATRICKSTAR_ELASTIC to host:port"):
            ElasticRun(engine, {})
    with pytest.raises(ValueError, match="num_ranks is 0"):
        Orders(serve_rendezvous("127.0.0.1", 0)).resize(0)


PLAN = {2: 2, 4: 3, 7: 1}
RANKS = [1, 1, 2, 2, 3, 3, 3, 1, 1, 1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    store, folder = serve_rendezvous("127.0.0.1", 0), tmp_path_factory.mktemp("elastic")
    straight = follow_with_initialize(None, {}, str(tmp_path_factory.mktemp("straight")))
    address = f"127.0.0.1:{store.port}"
    return straight, run_ranks(3, follow_with_initialize, address, PLAN, str(folder), environment=environment), folder


def test_losses_and_rates_are_those_of_one_rank(runs):
    straight, elastic, _ = runs
    for step, num_ranks in enumerate(RANKS):
        there = [result for result in elastic if step in result["losses"]]
        assert len(there) == num_ranks
        mean = torch.tensor([loss for result in there for loss in result["losses"][step]]).mean()
        torch.testing.assert_close(mean, torch.tensor(straight["losses"][step]).mean(), rtol=1e-4, atol=1e-4)
        assert all(result["lr"][step] == straight["lr"][step] for result in there)
    for name, value in straight["state"].items():
        torch.testing.assert_close(elastic[0]["state"][name], value, rtol=1e-3, atol=1e-3)


def test_counts_go_along_and_accumulation_follows(runs):
    straight, elastic, _ = runs
    micro_steps = 0
    for step, num_ranks in enumerate(RANKS):
        accumulation = GLOBAL_BATCH // 2 // num_ranks
        micro_steps += accumulation
        there = [result["counts"][step] for result in elastic if step in result["counts"]]
        expected = (step + 1, (step + 1) * GLOBAL_BATCH, micro_steps, accumulation, GLOBAL_BATCH)
        assert [counts[:5] for counts in there] == [expected] * num_ranks
        assert sum(counts[5] for counts in there) == straight["counts"][0][5]  # ds_tensor is a rank's share
    assert "within a step" in elastic[0]["refused"]


def test_metrics_are_those_of_the_run(runs):
    rows = list(csv.DictReader((runs[2] / "run" / "metrics.csv").open()))
    assert [int(row["step"]) for row in rows] == list(range(1, len(RANKS) + 1))
    assert [int(row["samples"]) for row in rows] == [GLOBAL_BATCH * (step + 1) for step in range(len(RANKS))]
