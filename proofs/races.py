"""prove-races: training under a scheduler that decides by a seed which queue goes on.

The core is built apart (proofs/simulated_build.py) with queues and events of proofs/scheduler. One thread runs at a
time: the one that trains, or a worker of an upload, download, round trip, host update or disk queue. A seed therefore
fixes the order of all tasks, and each run must have the bits of a run in unlimited memory. Every 64th seed runs twice,
and both runs must make the same choices.

Not covered: orders within one task (threads of a loop, requests of one disk transfer), CUDA streams, and several ranks.
ThreadSanitizer (`make sanitize`) and delays (tests/engine/test_delays.py) look at those.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from proofs import training
from proofs.cases import Case, Planted, Points, Proof, Setting
from proofs.planted_races import BUGS, QUEUE_BUGS

STEPS = 3
SEEDS_PER_REPEAT = 64


@functools.cache
def core() -> ctypes.CDLL:
    """The simulated core."""
    from patrickstar import _C

    library = ctypes.CDLL(_C.__file__)
    library.ps_schedule.argtypes = [ctypes.c_uint64]
    library.ps_trace.restype = ctypes.c_uint64
    return library


def config(**more: Any) -> dict[str, Any]:
    """Kernels run in the thread that calls them."""
    return training.config(**{"speculation": "never", "host_threads": {"num_threads": 1}, **more})


def roomy(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same run in unlimited memory, where updates wait for the step."""
    left_out = ("device_memory", "host_memory", "disk_memory", "activations")
    result = {key: value for key, value in options.items() if key not in left_out}
    return {**result, "optimizer": {**options["optimizer"], "speculation": "never"}}


WAYS: dict[str, dict[str, Any]] = {
    "scarce device memory": config(on_device=True, device_memory=training.SCARCE),
    "updates on the host": config(device_memory=training.SCARCE),
    "updates ahead of the norm": config(speculation="always", device_memory=training.SCARCE),
    "updates ahead, with clipping": config(speculation="always", gradient_clipping=0.05, device_memory=training.SCARCE),
    "updates that commit in backward": config(speculation="commit", device_memory=training.SCARCE),
    "round trips": config(speculation="commit", on_device=True, device_memory=training.SCARCE),
    "states on a disk": config(device_memory=200_000, host_memory=280_000),
    "offloaded activations": config(device_memory=training.SCARCE, activations={"offload": "always"}),
}

ONE_BACKWARD = ("updates that commit in backward", "round trips")  # per step


def train(options: Mapping[str, Any], seed: int | None, accumulate: int) -> tuple[Any, int]:
    """Losses and states after some steps, and the hash of the schedule's choices."""
    gc.collect()  # an earlier engine's threads are part of no schedule
    core().ps_schedule(seed if seed is not None else 1)
    run = training.Run(dict(options))
    engine, optimizer = run.engine, run.optimizer
    losses = []
    with engine:
        for step in range(STEPS):
            for micro in range(accumulate):
                number = 10 * step + micro
                batch = torch.randint(0, training.TOKENS, (2, 4), generator=torch.Generator().manual_seed(number))
                loss = engine(batch)
                engine.backward(loss)
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        trace = int(core().ps_trace())
        state = {"model": engine.state_dict(), "optimizer": optimizer.state_dict()["state"], "losses": losses}
    return state, trace


def schedules(way: str) -> Callable[[Setting], Points]:
    """Points: seeds, each with one or two micro-batches."""

    def points(setting: Setting) -> Points:
        from tests.bits import first_difference

        gc.disable()

        options = dict(WAYS[way])
        if way == "states on a disk":
            folder = setting.folder / "disk"
            folder.mkdir()
            options["disk_memory"] = {"path": str(folder), "size": "1GiB", "io": "threads"}
        expected: dict[int, Any] = {}
        seed = setting.seed
        while True:
            accumulate = 1 + seed // 4 % 2 if way not in ONE_BACKWARD else 1
            setting.note(f"seed {seed}")
            if accumulate not in expected:
                with bug(0):
                    expected[accumulate], _ = train(roomy(options), None, accumulate)
            state, trace = train(options, seed, accumulate)
            difference = first_difference(state, expected[accumulate], f"seed {seed}")
            if difference is None and seed % SEEDS_PER_REPEAT == 0:
                again, repeated = train(options, seed, accumulate)
                if repeated != trace:
                    difference = f"seed {seed}: the second run made other choices"
            yield difference
            seed += 1

    return points


_number = 0


@contextlib.contextmanager
def bug(number: int) -> Iterator[None]:
    """Turns one planted bug on; 0: none."""
    global _number
    before, _number = _number, number
    core().ps_plant(number)
    try:
        yield
    finally:
        _number = before
        core().ps_plant(before)


def environment() -> dict[str, str]:
    """Builds the simulated core, and names the folder from which it is imported."""
    from proofs.simulated_build import build

    tree = build()
    return {"PYTHONPATH": str(tree), "PATRICKSTAR_PROOF_TREE": str(tree)}


# The way of training in which a bug shows.
SHOWN_IN: dict[int, str] = {}


def planted() -> Iterator[Planted]:
    """All bugs that some schedule shows."""
    names = {**{each.number: each.name for each in BUGS}, **QUEUE_BUGS}
    for number, way in SHOWN_IN.items():
        yield Planted(names[number], way, functools.partial(bug, number))


PROOF = Proof(
    name="races",
    claim="Losses, parameters and states have the same bits in whatever order queues go on.",
    points="schedules",
    cases=[Case(way, schedules(way)) for way in WAYS],
    planted=list(planted()),
    environment=environment,
    quiet_seconds=60,
)
