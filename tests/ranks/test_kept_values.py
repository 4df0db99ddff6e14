import copy

import pytest

from patrickstar import _C
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.ranks.runs import Task, train_tasks
from tests.training import num_committed, round_trips

COMMIT = {"speculation": "commit"}
SMALL = {"default_chunk_size": 16384, "device_memory": "1MB"}
LION = {"type": "Lion", "params": {"lr": 1e-4, "weight_decay": 0.1}}
SCHEMES = {
    "split masters": COMMIT,
    "split masters, 8 bits": COMMIT | {"states": "8bit"},
    "no masters, bf16": COMMIT | {"states": "bf16", "master": "stochastic"},
    "no masters, 8 bits": COMMIT | {"states": "8bit", "master": "stochastic"},
    "Lion without masters": COMMIT | LION | {"master": "stochastic"},
    "no masters, gradients that wait": {"states": "8bit", "master": "stochastic"},
}


def run(size, tasks):
    by_rank = run_ranks(size, train_tasks, tasks, timeout_seconds=300)
    return [[results[index] for results in by_rank] for index in range(len(tasks))]


def assert_same(one, other):
    assert one["losses"] == other["losses"]
    assert_same_bits(one["state"], other["state"])


def test_split_masters_are_exact():
    waits, commits = {"speculation": "never"}, COMMIT
    tasks = [Task("gpt2", "bf16", optimizer=scheme, on_host=True, options=SMALL) for scheme in (waits, commits)]
    results = run(2, tasks)
    for rank in range(2):
        assert_same(results[1][rank], results[0][rank])
    report = results[1][0]["report"]
    assert num_committed(report) == tasks[1].steps * report["num_chunks"]


@pytest.mark.parametrize("name", SCHEMES)
def test_placements(name):
    delays = {"max_random_us": 300, "seed": 1}
    tight = {"default_chunk_size": 4096, "device_memory": "850KB", "delays": delays}
    clipping = {} if "speculation" in SCHEMES[name] else {"gradient_clipping": 0.05}
    tasks = [
        Task("gpt2", "bf16", optimizer=copy.deepcopy(SCHEMES[name]), on_host=on_host, options=options | clipping)
        for on_host, options in ((False, {}), (True, SMALL), (False, tight))
    ]
    everywhere, on_host, mixed = run(2, tasks)
    for rank in range(2):
        assert_same(on_host[rank], everywhere[rank])
        assert_same(mixed[rank], everywhere[rank])
        assert_same_bits(everywhere[rank]["state"], everywhere[0]["state"])
    assert everywhere[0]["report"]["num_device_state_chunks"] == everywhere[0]["report"]["num_chunks"]
    assert on_host[0]["report"]["num_device_state_chunks"] == 0
    assert 0 < mixed[0]["report"]["num_device_state_chunks"] < mixed[0]["report"]["num_chunks"]


def bytes_per_parameter(optimizer):
    task = Task("gpt2", "bf16", optimizer=optimizer)
    engine, _ = initialize_engine(task.case.build, 0, task.config())
    with engine:
        chunks = [engine._session.layout.chunk(i) for i in range(engine._session.layout.num_chunks)]
    assert all(chunk["states"].master != _C.StateType.FLOAT32 for chunk in chunks)
    return 2 * sum(chunk["resting_tier_bytes"] for chunk in chunks) / sum(chunk["numel"] for chunk in chunks)


@pytest.mark.parametrize(("name", "expects"), [("split masters", 12), ("no masters, bf16", 6)])
def test_bytes_per_parameter(name, expects):
    assert run_ranks(2, bytes_per_parameter, SCHEMES[name]) == [expects] * 2


@pytest.mark.parametrize("name", ["split masters, 8 bits", "no masters, bf16"])
def test_updates_that_the_device_makes_for_the_host(name):
    delays = {"max_random_us": 300, "seed": 2}
    tasks = [
        Task(
            "gpt2", "bf16", optimizer=copy.deepcopy(SCHEMES[name]), on_host=True, round_trips=round_trips,
            options=SMALL | {"delays": delays},
        )
        for round_trips in (False, True)
    ]  # fmt: skip
    at_rest, visiting = run(2, tasks)
    for rank in range(2):
        assert_same(visiting[rank], at_rest[rank])
    assert round_trips(at_rest[0]["report"]) == 0 < round_trips(visiting[0]["report"])
