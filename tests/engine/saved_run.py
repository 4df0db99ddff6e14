"""A run of ten steps for tests: ``trained(folder)`` in one process or in several ranks."""

import os
import signal

import torch

import patrickstar
from tests.models import gpt2, token_batch
from tests.training import make_config

STEPS = 10


def trained(folder, stop_after=None, stopped_rank=0, **options):
    """The values at the end, and the step from which the run went on. ``stop_after``: a step with a signal."""
    torch.manual_seed(0)
    engine, optimizer = patrickstar.initialize_engine(lambda: gpt2(layers=2), 0, make_config("fp32"))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    with engine, patrickstar.SavedRun(engine, folder, lr_scheduler=scheduler, **options) as run:
        begin = run.resume().get("step", 0)
        for step in range(begin, STEPS):
            engine.backward(engine(**token_batch(torch.Generator().manual_seed(step * size + rank))).loss)
            if step == stop_after and rank == stopped_rank:
                signal.raise_signal(signal.SIGUSR1)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            run.after_step({"step": step + 1})
        engine.wait_for_save()
        return begin, engine.state_dict()
