import pytest
import torch
import torch.distributed as dist

from patrickstar import _C
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import RanksFailedError, run_ranks
from tests.models import Case, gpt2, token_batch
from tests.ranks.runs import Task, train

OPTIONS = {"default_chunk_size": 8192, "gradient_clipping": 0.5}


def deep_gpt2():
    return gpt2(hidden=32, layers=12)


def train_with_and_without(folder):
    dist.init_process_group("gloo")
    case = Case(deep_gpt2, token_batch)
    engine, _ = initialize_engine(case.build, 0, Task(case, "bf16", options=OPTIONS).config())
    with engine:
        layout = engine._session.layout
        _, everything, _ = _C.initial_placement(layout, _C.UNLIMITED, 0)
        _, least, _ = _C.initial_placement(layout, 0, 0, _C.Backwards.ONE, _C.UNLIMITED)
    options = {"host_memory": least + (everything - least) // 4, "disk_memory": {"path": folder, "size": "1GiB"}}
    tasks = [Task(case, "bf16", options={**OPTIONS, **more}, on_host=True) for more in ({}, options)]
    results = [train(task) for task in tasks]
    dist.barrier()
    dist.destroy_process_group()
    return results


def test_two_ranks(tmp_path):
    for without, with_disk in run_ranks(2, train_with_and_without, str(tmp_path)):
        assert with_disk["losses"] == without["losses"]
        assert with_disk["norms"] == without["norms"]
        assert_same_bits(with_disk["state"], without["state"])
        assert 0 < with_disk["report"]["num_disk_chunks"] <= with_disk["report"]["num_chunks"]
        assert with_disk["report"]["disk_read_bytes"] > 0
        assert without["report"]["num_disk_chunks"] == 0


def fail_on_one_rank(folder):
    dist.init_process_group("gloo")
    case = Case(deep_gpt2, token_batch)
    options = {**OPTIONS, "host_memory": 1, "disk_memory": {"path": folder, "size": "1GiB"}, "rank_timeout_seconds": 60}
    engine, _ = initialize_engine(case.build, 0, Task(case, "bf16", options=OPTIONS).config())
    with engine:
        _, least, _ = _C.initial_placement(engine._session.layout, 0, 0, _C.Backwards.ONE, _C.UNLIMITED)
    options["host_memory"] = least
    engine, optimizer = initialize_engine(case.build, 0, Task(case, "bf16", options=options, on_host=True).config())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with engine:
        for step in range(4):
            if step == 2 and dist.get_rank() == 1:
                engine._session.runtime.disk_faults.reads_before_error = 0
            engine.backward(case.loss(engine(**case.batch(generator))))
            optimizer.step()


def test_one_disk_that_fails_ends_all_ranks(tmp_path):
    with pytest.raises(RanksFailedError, match="disk_memory: reading .* failed: Input/output error"):
        run_ranks(2, fail_on_one_rank, str(tmp_path))
