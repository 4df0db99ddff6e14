"""prove-races: training under a scheduler that decides by a seed which queue goes on.

The core is built apart (proofs/simulated_build.py) with queues and events of proofs/scheduler. One thread runs at a
time: the one that trains, or a worker of an upload, download, round trip, host update or disk queue. A seed therefore
chooses the order of all tasks, and each run must have the bits of a run in unlimited memory. Freed memory is watched
(proofs/scheduler/freed_memory.h). A seed repeats its run. A point is a schedule that differs from all before.

Not covered: orders within one task (threads of a loop, requests of one disk transfer), CUDA streams, and several ranks.
ThreadSanitizer (`make sanitize`) and delays (tests/engine/test_delays.py) look at those.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from patrickstar.activations.activation_rules import Saved
from proofs import training
from proofs.cases import Case, Planted, Points, Proof, Setting
from proofs.planted_races import BUGS, QUEUE_BUGS
from tests.bits import first_difference

STEPS = 3


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
    return training.config(**{"speculation": "never", "host_threads": {"num_threads": 1}, "plan_cache": False, **more})


def roomy(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same run in unlimited memory, where updates wait for the step."""
    left_out = ("device_memory", "host_memory", "disk_memory", "activations")
    result = {key: value for key, value in options.items() if key not in left_out}
    return {**result, "optimizer": {**options["optimizer"], "speculation": "never"}}


def without_masters(options: dict[str, Any]) -> dict[str, Any]:
    """Parameters are rounded stochastically; a gradient keeps its host memory between steps."""
    return {**options, "optimizer": {**options["optimizer"], "master": "stochastic"}}


def trips(engine: Any, step: int) -> None:
    """Chooses the chunks whose next update is a round trip."""
    count = engine.report()["num_chunks"]
    chosen = [step > 0 and (step + chunk) % 3 != 0 for chunk in range(count)]
    engine._session.runtime.set_round_trips(chosen, PIECE_NUMEL)


PIECE_NUMEL = 512  # of a chunk's 2048: several pieces


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of training whose transfers are scheduled."""

    options: Mapping[str, Any]
    net: Callable[[], nn.Module] = training.Net
    length: int = 4
    micro_batches: int = 1
    before_step: Callable[[Any, int], None] = lambda engine, step: None
    """Leaves numbers as they are."""
    learning_rates: tuple[float, ...] = (2e-3,) * STEPS
    """Set between backward and step: an update ahead with another rate is rolled back."""


class Paths(training.Net):
    """Each forward leaves out another block, so that what was brought ahead is not used."""

    num_calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        self.num_calls += 1
        hidden = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden) if index != self.num_calls % 4 else hidden
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.roll(-1).flatten())


class Recomputed(training.Net):
    """Blocks are recomputed in backward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.roll(-1).flatten())


def products_on_host(engine: Any, step: int) -> None:
    """Sends the products of all blocks but the last; as on a GPU, copies may run beside the next block."""
    calls = engine._session.checkpoint_calls
    calls._on_host._most_leaving = 1
    calls.choose((Saved.PRODUCTS_ON_HOST, Saved.PRODUCTS_ON_HOST, Saved.PRODUCTS))
    if step > 0 and not engine.report()["offloaded_bytes"]:
        raise AssertionError("no product was sent")


def abandon(engine: Any, step: int) -> None:
    """A forward whose loss is dropped: no backward fetches its activations."""
    engine(torch.full((2, 64), step))


def send_and_fetch(engine: Any, step: int) -> None:
    """Fetches a tensor whose way to the host is not awaited."""
    runtime = engine._session.runtime
    sent, fetched = torch.full((1024,), step + 1.0), torch.zeros(1024)
    ticket = runtime.offload_activation(sent.data_ptr(), sent.nbytes)
    runtime.fetch_activation(ticket, fetched.data_ptr())
    runtime.await_activation(ticket)
    runtime.drop_activation(ticket)
    if not torch.equal(fetched, sent):
        raise AssertionError(f"step {step}: {fetched[0]} came back for {sent[0]}")


SCARCE = {"device_memory": training.SCARCE}
DISK = {"host_memory": 200_000, "disk_memory": {"size": "1GiB", "io": "threads"}}
OFFLOADED = {"activations": {"offload": "always"}, "device_memory": 111_000}  # some activations find no room
RATES = (2e-3, 1e-3, 1e-3)
PRODUCTS = "products of recomputed layers on the host"
IN_PLACE = 237_376  # bytes of host memory: new values find no room beside the old ones
WAYS = {
    "scarce device memory": Way(config(on_device=True, **SCARCE)),
    "scarce device memory, two micro-batches": Way(config(on_device=True, **SCARCE), micro_batches=2),
    "updates on the host": Way(config(**SCARCE)),
    "updates on the host, no masters": Way(without_masters(config(**SCARCE))),
    "updates ahead of the norm": Way(config(speculation="always", **SCARCE)),
    "updates ahead, with clipping": Way(
        config(speculation="always", gradient_clipping=0.05, **SCARCE), micro_batches=2
    ),
    "updates ahead that are rolled back": Way(config(speculation="always", **SCARCE), learning_rates=RATES),
    "values in place": Way(config(speculation="always", host_memory=IN_PLACE, **SCARCE)),
    "values in place that are rolled back": Way(
        config(speculation="always", host_memory=IN_PLACE, **SCARCE), learning_rates=RATES
    ),
    "updates that commit in backward": Way(config(speculation="commit", **SCARCE)),
    "round trips": Way(config(speculation="commit"), before_step=trips),
    "states on a disk": Way(config(device_memory=200_000, **DISK)),
    "states on a disk, updates on the device": Way(config(on_device=True, device_memory=200_000, **DISK)),
    "other paths": Way(config(on_device=True, device_memory=40_000), Paths, micro_batches=2),
    "offloaded activations": Way(config(**OFFLOADED), length=64, before_step=send_and_fetch),
    "offloaded activations, abandoned forwards": Way(config(**OFFLOADED), length=64, before_step=abandon),
    PRODUCTS: Way(config(device_memory=240_000), Recomputed, length=64, micro_batches=2, before_step=products_on_host),
}


def train(way: Way, seed: int) -> tuple[Any, int]:
    """Losses and states after some steps, and the hash of the schedule's choices."""
    gc.collect()  # an earlier engine's threads are part of no schedule
    core().ps_schedule(seed)
    run = training.Run(dict(way.options), way.net)
    engine, losses = run.engine, []
    with engine:
        for step in range(STEPS):
            way.before_step(engine, step)
            for micro_batch in range(way.micro_batches):
                generator = torch.Generator().manual_seed(10 * step + micro_batch)
                loss = engine(torch.randint(0, training.TOKENS, (2, way.length), generator=generator))
                engine.backward(loss)
                losses.append(loss.item())
            for group in run.optimizer.param_groups:
                group["lr"] = way.learning_rates[step]
            run.optimizer.step()
            run.optimizer.zero_grad()
        trace = int(core().ps_trace())
        return {**run.state(), "losses": losses}, trace


def schedules(name: str) -> Callable[[Setting], Points]:
    """Points: seeds."""

    def points(setting: Setting) -> Points:
        gc.disable()
        way = WAYS[name]
        if "disk_memory" in way.options:
            folder = setting.folder / "disk"
            folder.mkdir()
            disk = {**way.options["disk_memory"], "path": str(folder)}
            way = dataclasses.replace(way, options={**way.options, "disk_memory": disk})
        plain = dataclasses.replace(way, options=roomy(way.options), before_step=Way.before_step)
        with bug(0):
            expected, _ = train(plain, 1)
        gc.collect()
        gc.freeze()  # modules and their code: each schedule collects what it has made
        traces = set()
        for seed in itertools.count(setting.seed):
            setting.note(f"seed {seed}")
            state, trace = train(way, seed)
            difference = first_difference(state, expected, f"seed {seed}")
            if difference is not None or trace not in traces:
                traces.add(trace)
                yield difference

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


SHOWN_IN = {
    **dict.fromkeys((5, 6, 8, 9, 10, 13, 28, 32, 33), "scarce device memory"),
    **dict.fromkeys((1,), "updates on the host"),
    **dict.fromkeys((7,), "updates ahead, with clipping"),
    **dict.fromkeys((29,), "updates ahead that are rolled back"),
    **dict.fromkeys((30,), "values in place that are rolled back"),
    **dict.fromkeys((27,), "updates that commit in backward"),
    **dict.fromkeys((14, 19, 21, 22, 23, 35), "states on a disk"),
    **dict.fromkeys((15, 16, 18, 31, 34), "round trips"),
    **dict.fromkeys((11, 12), "other paths"),
    **dict.fromkeys((24, 25, 26), "offloaded activations"),
}
"""The way of training in which some schedule shows a bug. ``planted_races.MASKED`` has the others."""


def planted() -> Iterator[Planted]:
    """All bugs that some schedule shows."""
    names = {**{each.number: each.name for each in BUGS}, **QUEUE_BUGS}
    for number, way in SHOWN_IN.items():
        yield Planted(names[number], way, functools.partial(bug, number))
    for number in (25, 26):
        yield Planted(f"of a product: {names[number]}", PRODUCTS, functools.partial(bug, number))


PROOF = Proof(
    name="races",
    claim="Losses, parameters and states have the same bits in whatever order queues go on.",
    points="schedules",
    cases=[Case(way, schedules(way)) for way in WAYS],
    planted=list(planted()),
    environment=environment,
    quiet_seconds=60,
)
