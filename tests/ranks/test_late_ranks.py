import threading
import time
from pathlib import Path

import torch
from torch import nn

from patrickstar.runtime import initialize_engine
from tests.distributed import run_ranks
from tests.ranks.runs import rank_and_size
from tests.training import make_config

PATIENCE_SECONDS = 30.0  # with a thread that does not run
INSIDE_SECONDS = 0.1  # until the waiting rank is in the call, as a rule


class Late:
    def __init__(self, folder: str):
        self._folder = Path(folder)

    def call(self, name: str, function):
        place = self._folder / name
        if rank_and_size()[0] == 1:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not place.exists():
                assert time.monotonic() < deadline, f"no other thread of rank 0 runs while it is in {name}"
                time.sleep(0.01)
            return function()
        begins = threading.Event()

        def run() -> None:
            begins.wait()
            time.sleep(INSIDE_SECONDS)
            place.touch()

        thread = threading.Thread(target=run)
        thread.start()
        begins.set()
        result = function()
        thread.join()
        return result


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
        return self.layers(x).square().mean()


def wait_in_each_call(folder: str) -> None:
    late = Late(folder)
    torch.manual_seed(0)
    config = make_config(
        "fp32", default_chunk_size=8192, device_memory="400KB", rank_timeout_seconds=2 * PATIENCE_SECONDS
    )
    x = torch.ones(2, 32)
    engine, optimizer = late.call("opening", lambda: initialize_engine(Layers, 0, config))
    with engine:
        for step in range(3):  # the first negotiates, others replay a plan
            loss = late.call(f"forward {step}", lambda: engine(x))
            late.call(f"backward {step}", lambda loss=loss: engine.backward(loss))
            if step == 1:
                late.call("grad_norm", engine.grad_norm)
            late.call(f"step {step}", optimizer.step)
        plan = engine.plan()
        with torch.no_grad():
            late.call("evaluation", lambda: engine(x))
        late.call("state_dict", engine.state_dict)
        late.call("value", lambda: engine.full_value(engine.module.layers[0].weight))
        late.call("save", lambda: engine.save_checkpoint(f"{folder}/checkpoints"))
        late.call("load", lambda: engine.load_checkpoint(f"{folder}/checkpoints"))
        late.call("closing", engine.close)
    engine, _ = initialize_engine(Layers, 0, config)
    with engine:
        core, ranks = engine._session.runtime, engine._session.ranks
        times = plan.times.as_core() if plan.times is not None else None
        late.call("adopt_timeline", lambda: core.adopt_timeline(plan.timeline, times))
        late.call("exchange", lambda: ranks.control.exchange(b"1", "a test"))
        late.call("distribute", lambda: ranks.control.distribute([b"1", b"2"], "a test"))
        whole = torch.zeros(8)
        late.call("all_gather", lambda: ranks.gather.all_gather(whole.data_ptr(), 16))


def test_other_threads_run_while_a_rank_waits(tmp_path):
    run_ranks(2, wait_in_each_call, str(tmp_path))
