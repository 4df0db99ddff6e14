"""A run of ten steps for tests: ``trained(folder)`` in one process or in several ranks.

``torchrun -m tests.engine.saved_run FOLDER`` prints "ready" in the fourth step, and goes on once ``FOLDER/go`` exists.
"""

import functools
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import patrickstar
from tests.training import make_config

STEPS, MICRO_BATCHES = 10, 3


class Batches(torch.utils.data.Dataset):
    """Batches of this rank by number."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def __getitem__(self, number):
        return torch.randn(4, 32, generator=torch.Generator().manual_seed(number * self.size + self.rank))

    def iterate(self, begin, end, num_workers):
        """Batches from ``begin`` to ``end``, by ``num_workers`` processes."""
        loader = torch.utils.data.DataLoader(
            self,
            batch_size=None,
            sampler=range(begin, end),
            num_workers=num_workers,
            worker_init_fn=patrickstar.SavedRun.detach_worker,
            generator=torch.Generator(),  # otherwise a resumed run has other random numbers
        )
        return iter(loader)


class Net(nn.Module):
    """Random numbers and a buffer, which an interrupted step changes."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 32)
        self.register_buffer("calls", torch.zeros(1))
        self.at_forward = lambda: None

    def forward(self, inputs):
        self.calls += 1
        hidden = nn.functional.dropout(self.first(inputs), 0.5)
        self.at_forward()
        return self.last(hidden).square().mean() * (1 + self.calls / 100)


def be_stopped():
    signal.raise_signal(signal.SIGUSR1)


def trained(
    folder, stop_after=None, stopped_rank=0, at_forward=False, clock=None, stop=be_stopped, num_workers=0, **options
):
    """The values at the end, and the step from which the run went on.

    ``stop_after``: a step that calls ``stop``, within the second forward or after all backwards. ``clock``: advances
    by 10 s in each forward.
    """
    torch.manual_seed(0)
    engine, optimizer = patrickstar.initialize_engine(Net, 0, make_config("fp32"))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    forwards = []

    def at_forward_of_step():
        forwards.append(step)
        if clock is not None:
            clock.seconds += 10
        if step == stop_after and rank == stopped_rank and at_forward and forwards.count(step) == 2:
            stop()

    engine.module.at_forward = at_forward_of_step
    with engine, patrickstar.SavedRun(engine, folder, lr_scheduler=scheduler, **options) as run:
        begin = run.client_state.get("step", 0)
        batches = Batches(rank, size).iterate(begin * MICRO_BATCHES, STEPS * MICRO_BATCHES, num_workers)
        for step in range(begin, STEPS):
            for _ in range(MICRO_BATCHES):
                engine.backward(engine(next(batches)))
            if step == stop_after and rank == stopped_rank and not at_forward:
                stop()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            run.after_step({"step": step + 1})
        engine.wait_for_save()
        return begin, engine.state_dict()


def trained_twice(first, second):
    """:func:`trained` in two folders, one after the other."""
    return trained(first), trained(second)


class Clock:
    """Replaces the clock of a run."""

    def __init__(self, monkeypatch):
        self.seconds = 0.0
        monkeypatch.setattr("patrickstar.engine.preemption.time.monotonic", lambda: self.seconds)


def trained_by_clock(folder, stop_after, stopped_rank, at_forward, grace_seconds):
    """:func:`trained` with a clock, in a process of its own."""
    with pytest.MonkeyPatch.context() as patched:
        return trained(folder, stop_after, stopped_rank, at_forward, Clock(patched), grace_seconds=grace_seconds)


def wait_for(path):
    """Prints "ready", and returns once ``path`` exists."""
    print("ready", flush=True)
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


if __name__ == "__main__":
    trained(sys.argv[1], 3, at_forward=True, num_workers=1, stop=functools.partial(wait_for, Path(sys.argv[1], "go")))
