import csv

import pytest
import torch

from patrickstar.elastic import serve_rendezvous
from tests.distributed import run_ranks
from tests.elastic.runs import GLOBAL_BATCH, follow_with_initialize
from tests.elastic.test_run import environment

PLAN = {2: 2, 4: 3, 7: 1}
RANKS = [1, 1, 2, 2, 3, 3, 3, 1, 1, 1]
"""By step."""


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
