"""A run of ten steps for tests: ``trained(folder)`` in one process or in several ranks."""

import os
import signal

import pytest
import torch
from torch import nn

import patrickstar
from tests.training import make_config

STEPS, MICRO_BATCHES = 10, 3


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


def trained(folder, stop_after=None, stopped_rank=0, at_forward=False, clock=None, signum=signal.SIGUSR1, **options):
    """The values at the end, and the step from which the run went on.

    ``stop_after``: a step with the signal ``signum``, within the second forward or after all backwards. ``clock``:
    advances by 10 s in each forward.
    """
    torch.manual_seed(0)
    engine, optimizer = patrickstar.initialize_engine(Net, 0, make_config("fp32"))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    forwards = []

    def stop():
        forwards.append(step)
        if clock is not None:
            clock.seconds += 10
        if step == stop_after and rank == stopped_rank and at_forward and forwards.count(step) == 2:
            signal.raise_signal(signum)

    engine.module.at_forward = stop
    with engine, patrickstar.SavedRun(engine, folder, lr_scheduler=scheduler, **options) as run:
        begin = run.client_state.get("step", 0)
        for step in range(begin, STEPS):
            for micro_batch in range(MICRO_BATCHES):
                generator = torch.Generator().manual_seed((step * MICRO_BATCHES + micro_batch) * size + rank)
                engine.backward(engine(torch.randn(4, 32, generator=generator)))
            if step == stop_after and rank == stopped_rank and not at_forward:
                signal.raise_signal(signum)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            run.after_step({"step": step + 1})
        engine.wait_for_save()
        return begin, engine.state_dict()


class Clock:
    """Replaces the clock of a run."""

    def __init__(self, monkeypatch):
        self.seconds = 0.0
        monkeypatch.setattr("patrickstar.engine.preemption.time.monotonic", lambda: self.seconds)


def trained_by_clock(folder, stop_after, stopped_rank, at_forward, grace_seconds):
    """:func:`trained` with a clock, in a process of its own."""
    with pytest.MonkeyPatch.context() as patched:
        return trained(folder, stop_after, stopped_rank, at_forward, Clock(patched), grace_seconds=grace_seconds)
