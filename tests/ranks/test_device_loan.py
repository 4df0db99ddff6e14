import dataclasses

import pytest
import torch

from patrickstar import MemoryBudgetError
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.models import MODELS
from tests.ranks.runs import Task, rows, train_tasks
from tests.training import make_config


def test_no_number_changes():
    options = {"default_chunk_size": 4096, "device_memory": "850KB", "gradient_clipping": 0.05}
    task = Task("gpt2", "bf16", steps=4, options=options)
    for plain, lent in run_ranks(2, train_tasks, [task, dataclasses.replace(task, lends=True)]):
        assert lent["losses"] == plain["losses"]
        assert_same_bits(lent["state"], plain["state"])
        assert lent["report"]["num_device_state_chunks"] == plain["report"]["num_device_state_chunks"]


def refused_loans():
    case = MODELS["gpt2"]
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(case.build, 0, make_config(default_chunk_size=4096, host_memory=250_000))
    batch, losses = rows(case.batch(torch.Generator().manual_seed(0))), []
    with engine:
        for step in range(4):
            if step == 2:
                with pytest.raises(MemoryBudgetError, match="rank 0: lend: .* must stay on the device"), engine.lend():
                    pass
            loss = engine(**batch)["loss"]
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, engine.report()["num_device_state_chunks"]


def test_ranks_refuse_together():
    for losses, num_state_chunks in run_ranks(2, refused_loans):
        assert losses[-1] < losses[0]
        assert num_state_chunks > 0
