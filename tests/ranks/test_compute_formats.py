from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.engine.test_compute_formats import SGD, STEPS, install, plainly
from tests.models import MODELS
from tests.ranks.runs import Task, train_tasks
from tests.ranks.test_training import SMALL, assert_same, relative_error


def train_in_format(tasks):
    install(setattr)
    return train_tasks(tasks)


def test_two_ranks():
    tasks = [
        Task("gpt2", steps=STEPS, optimizer={"type": "SGD", "params": dict(SGD)}, on_host=on_host, options=options)
        for options, on_host in (({}, False), (SMALL, False), ({"default_chunk_size": 8192}, True))
    ]
    by_rank = run_ranks(2, train_in_format, tasks, timeout_seconds=300)
    assert_same_bits(by_rank[0][0]["state"], by_rank[1][0]["state"])
    for results in by_rank:
        assert_same(results[1], results[0])
        assert_same(results[2], results[0])
    assert by_rank[0][1]["report"]["num_evictions"] > 0
    assert relative_error(by_rank[0][0]["state"], plainly(MODELS["gpt2"], num_ranks=2).state) < 2e-6
