import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from patrickstar import StateError
from patrickstar.runtime import initialize_engine
from tests.distributed import GRACE_SECONDS, rank_outcomes, run_ranks
from tests.models import MODELS
from tests.ranks.runs import rank_and_size, rows
from tests.training import make_config


def train_until_rank_1_is_lost(inside: str) -> None:
    rank, _ = rank_and_size()

    def die(access: str, step: int) -> None:
        if (rank, step, access) == (1, 3, inside):
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)

    case = MODELS["gpt2"]
    # Every value is all-gathered in forward and again in backward.
    config = make_config("fp32", device_memory="1MB", default_chunk_size=16384, rank_timeout_seconds=20)
    engine, optimizer = initialize_engine(case.build, 0, config)
    with engine:
        engine.train()
        generator = torch.Generator().manual_seed(1)
        for step in range(6):
            optimizer.zero_grad()
            first_layer = engine.module.transformer.h[0].register_forward_pre_hook(
                lambda module, args, step=step: die("forward", step)
            )
            loss = case.loss(engine(**rows(case.batch(generator))))
            first_layer.remove()
            loss.register_hook(lambda grad, step=step: die("backward", step))
            engine.backward(loss)
            die("step", step)
            optimizer.step()


def train_until_rank_0_stops() -> None:
    rank, _ = rank_and_size()
    config = make_config("fp32", rank_timeout_seconds=2)
    engine, optimizer = initialize_engine(lambda: nn.Linear(4, 4), 0, config)
    with engine:
        for step in range(3):
            engine.backward(engine(torch.ones(2, 4)).square().mean())
            if (rank, step) == (0, 1):
                os.kill(os.getpid(), signal.SIGSTOP)
            optimizer.step()


@pytest.mark.slow
def test_a_stopped_rank_that_serves_torchs_store_hangs_nobody():
    _, survivor = rank_outcomes(2, train_until_rank_0_stops, timeout_seconds=60, grace_seconds=GRACE_SECONDS)
    assert survivor.error.startswith("RankFailure: ") and "rank 0" in survivor.error


@pytest.mark.parametrize(
    ("access", "call"),
    [
        ("forward", "forward of step 4"),
        ("backward", "backward of step 4"),
        ("step", "the user's code after backward of step 4"),
    ],
)
def test_the_error_says_in_which_call_a_rank_was_killed(access, call):
    survivor, lost = rank_outcomes(2, train_until_rank_1_is_lost, access, timeout_seconds=100)
    print(survivor.error)
    assert lost.returncode == -signal.SIGKILL
    assert survivor.returncode == 1
    assert survivor.error.startswith("RankFailure: ")
    assert f"rank 1 in {call}" in survivor.error


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def leave_out_a_backward() -> tuple[str, float]:
    rank, _ = rank_and_size()
    config = make_config("fp32", device_memory="170KB", default_chunk_size=4160, rank_timeout_seconds=60)
    engine, optimizer = initialize_engine(Skips, 0, config)
    begin = 0.0
    try:
        with engine:
            for step in range(5):
                begin = time.monotonic()
                loss = engine(torch.ones(2, 64))
                if (rank, step) != (1, 3):
                    engine.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    except StateError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "trained", 0.0


def test_a_rank_that_leaves_out_a_backward_is_named_at_once():
    for error, seconds in run_ranks(2, leave_out_a_backward):
        assert error.startswith("RankMismatch: ")
        assert "rank 0 is in backward of step 4" in error and "rank 1 is in forward of step 4" in error
        assert seconds < 30  # half of the timeout


def train_until_rank_1_raises() -> None:
    engine, optimizer = initialize_engine(MODELS["gpt2"].build, 0, make_config("fp32", rank_timeout_seconds=60))
    with engine:
        generator = torch.Generator().manual_seed(1)
        for step in range(4):
            if step == 2 and rank_and_size()[0] == 1:
                raise ValueError("the batch is bad")
            optimizer.zero_grad()
            engine.backward(engine(**rows(MODELS["gpt2"].batch(generator))).loss)
            optimizer.step()


def test_an_error_between_two_calls_of_the_engine_ends_all_ranks():
    other, at_fault = rank_outcomes(2, train_until_rank_1_raises, timeout_seconds=50)
    print(other.error)
    assert at_fault.error == "ValueError: the batch is bad"
    assert other.error.startswith("RankFailure: rank 0 stops in")
    assert "ValueError: the batch is bad" in other.error


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
