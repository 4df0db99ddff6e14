import dataclasses

import pytest

from patrickstar.ones import Cluster, simulate
from patrickstar.ones.policies.ones_published import OnesPublished, Prediction, Rules, StartSize
from patrickstar.ones.policies.progress import ProgressModel
from patrickstar.ones.policies.protocol import Foresight
from tests.ones.jobs import linear_job


def run(trace, rules, num_gpus):
    """With epochs of 16 s on one GPU."""
    trace = [dataclasses.replace(item, job=dataclasses.replace(item.job, epoch_samples=16.0)) for item in trace]
    return simulate(trace, OnesPublished(ProgressModel(), rules=rules), Cluster(num_gpus))


def sizes(result):
    """(start, GPUs) of each segment of job a."""
    return [(part.start_s, len(part.gpus)) for part in result.segments if part.job == "a"]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (Rules(), [(0, 1), (16, 2), (24, 4), (28, 8), (30, 16)]),
        (Rules(start=StartSize.REQUESTED), [(0, 4), (4, 8), (6, 16)]),
        (Rules(growth=4), [(0, 1), (16, 4), (20, 16)]),
        (Rules(growth=64), [(0, 1), (16, 16)]),
        (Rules(growth_epochs=2), [(0, 1), (32, 2), (48, 4), (56, 8), (60, 16)]),
        (Rules(cooldown_epochs=2), [(0, 1), (32, 2), (48, 4), (56, 8), (60, 16)]),
        (Rules(growth_epochs=0, cooldown_epochs=0), [(0, 1), (1, 2), (2, 4), (3, 8), (4, 16)]),
    ],
)
def test_a_job_alone_grows_by_the_rules(rules, expected):
    assert sizes(run([linear_job("a", 0, 4, 100, max_gpus=16)], rules, 16)) == expected


@pytest.mark.parametrize(("rules", "least"), [(Rules(), 2), (Rules(scale_down_from=2.0, stop_divisor=1), 7)])
def test_a_long_job_is_scaled_down(rules, least):
    result = run([linear_job("a", 0, 8, 150), linear_job("b", 100, 1, 60)], rules, 8)
    assert min(size for start, size in sizes(result) if start >= 100) == least


def test_the_truth_lets_the_short_job_end_first():
    trace = [linear_job("a", 0, 1, 200), linear_job("b", 50, 1, 60)]
    rules = Rules(prediction=Prediction.EXACT)
    assert OnesPublished(ProgressModel(), rules=rules).foresight is Foresight.EXACT
    assert {job.job: job.end_s for job in run(trace, rules, 1).jobs} == {"a": 260, "b": 110}
