import pytest
import torch

from tests.distributed import run_ranks
from tests.models import Case
from tests.module.compiled.forms import BACKEND, TOWER
from tests.ranks.runs import Task, train_plain, train_tasks

pytestmark = pytest.mark.slow

SMALL = {"device_memory": 500_000}


def whole():
    return torch.compile(TOWER.build(), backend=BACKEND)


def one_graph():
    return torch.compile(TOWER.build(), backend=BACKEND, fullgraph=True)


def test_two_ranks():
    options = {"gradient_clipping": 1.0, "default_chunk_size": 16384}
    builds = (whole, one_graph)
    tasks = [
        Task(Case(build, TOWER.batch), steps=4, options={**options, **budget})
        for build in builds
        for budget in ({}, SMALL if build is whole else {"device_memory": 1_750_000})
    ]
    by_rank = run_ranks(2, train_tasks, tasks, timeout_seconds=300)
    for results in by_rank:
        for index, build in enumerate(builds):
            unlimited, small = results[2 * index : 2 * index + 2]
            assert small["losses"] == unlimited["losses"]
            assert all(torch.equal(value, small["state"][name]) for name, value in unlimited["state"].items())
            print(f"{build.__name__}: {small['report']['num_evictions']} evictions")
            assert small["report"]["num_evictions"] > 0
            expected = train_plain(tasks[2 * index], 2)
            for name, value in unlimited["state"].items():
                torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
