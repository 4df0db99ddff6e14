import dataclasses

from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.ranks.runs import Task, train_tasks


def test_no_number_changes():
    small = {"default_chunk_size": 4096, "device_memory": "850KB"}
    tasks = [
        Task(model, "bf16", steps=3, options=options)
        for model, options in (("gpt2", small | {"gradient_clipping": 0.05}), ("mixture_of_experts", {}))
    ]
    lent = [dataclasses.replace(task, lends=True) for task in tasks]
    for results in run_ranks(2, train_tasks, [*tasks, *lent], timeout_seconds=300):
        for plain, other in zip(results[: len(tasks)], results[len(tasks) :], strict=True):
            assert other["losses"] == plain["losses"]
            assert_same_bits(other["state"], plain["state"])
            assert other["report"]["num_device_state_chunks"] == plain["report"]["num_device_state_chunks"]
