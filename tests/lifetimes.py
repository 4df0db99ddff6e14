"""Objects that a process holds while engines are opened and closed."""

import gc
import os
import random
import time
from pathlib import Path

import torch
from torch import nn

from patrickstar.runtime import initialize_engine
from tests.training import make_config

WIDTH = 64


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return self.layers(x).square().mean()


def footprint():
    """{"threads", "descriptors", "regions": mapped files and memory, "device_bytes": of the GPU, if there is one}."""
    held = {
        "threads": settled_num_threads(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "regions": len(Path("/proc/self/maps").read_text().splitlines()),
    }
    if torch.cuda.is_available():
        held["device_bytes"] = settled_device_bytes()
    return held


def settled_num_threads():
    """The least of several readings: Linux lists a joined thread for a while."""
    counts = []
    for _ in range(10):
        counts.append(len(list(Path("/proc/self/task").iterdir())))
        time.sleep(0.02)
    return min(counts)


def settled_device_bytes():
    """The least of several readings: NCCL's buffers go when the last rank that maps them has closed."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    taken = []
    for _ in range(8):
        free, total = torch.cuda.mem_get_info()
        taken.append(total - free)
        time.sleep(0.25)
    return min(taken)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def train_and_close(seed, collect=lambda: None, **config):
    torch.manual_seed(seed)
    collect()
    options = make_config("bf16", default_chunk_size=8192, rank_timeout_seconds=60, **config)
    engine, optimizer = initialize_engine(Tower, 0, options)
    for _ in range(2):
        loss = engine(torch.randn(4, WIDTH))
        collect()
        engine.backward(loss)
        collect()
        optimizer.step()
    value = loss.item()
    collect()
    engine.close()
    return value


def come_and_go(num_engines, config, collecting_rank=None):
    """Footprints after the second and the last engine, and the growth of resident memory. The garbage collector is off,
    but on `collecting_rank` it runs at random points.
    """
    rank = int(os.environ.get("RANK") or 0)
    choose = random.Random(7)

    def collect():
        if rank == collecting_rank and choose.random() < 0.3:
            gc.collect()

    gc.disable()
    gc.freeze()  # a collection would visit the objects of libraries
    try:
        losses = [train_and_close(0, collect, **config) for _ in range(2)]
        before, resident = footprint(), resident_bytes()
        losses += [train_and_close(0, collect, **config) for _ in range(num_engines - 2)]
        after, more = footprint(), resident_bytes() - resident
    finally:
        gc.enable()
    assert len(set(losses)) == 1
    return before, after, more
