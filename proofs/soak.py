"""prove-soak: training for a long time, with saves, loads, evaluations, errors, and engines that come and go.

Memory, descriptors, threads and mappings must stay as they are. After a warm-up the process is measured at the end of
each round. What rises by more than the limits below, in the last two thirds of the rounds and in both halves of these,
is a leak. A case of fewer than a hundred rounds after the warm-up does not hold. By default a soak takes fifteen
minutes, some hundreds of rounds of each case. Leave it to run for a night: ``make prove-soak ARGS="--minutes 480"``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import statistics
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from patrickstar import CheckpointError
from proofs.cases import Case, Planted, Points, Proof, Setting, replaced
from proofs.training import Run, config, num_descriptors, on_disk
from tests.lifetimes import resident_bytes, settled_num_threads

WARM_UP_ROUNDS = 6
LEAST_ROUNDS = 12  # after the warm-up, before slopes count
SHOWN_ROUNDS = 100  # after the warm-up, before a case holds: small leaks first fill memory that the allocator has
# Per round, of the line through the measurements.
LIMITS = {"descriptors": 0.02, "threads": 0.02, "mappings": 0.2, "resident KiB": 8.0}


def mappings() -> int:
    """Mapped ranges of this process."""
    return len(Path("/proc/self/maps").read_text().splitlines())


def measured() -> dict[str, float]:
    """Descriptors, threads, mappings and memory of the process."""
    gc.collect()
    return {
        "descriptors": num_descriptors(),
        "threads": settled_num_threads(),
        "mappings": mappings(),
        "resident KiB": resident_bytes() / 1024,
    }


def slope(values: list[float]) -> float:
    """Growth per measurement: the median of the slopes of all pairs half the length apart (after Theil and Sen)."""
    half = len(values) // 2
    return statistics.median((values[index + half] - values[index]) / half for index in range(len(values) - half))


def growth(found: list[dict[str, float]]) -> str | None:
    """A complaint about what grows over the limits; None if nothing does, or the rounds are too few to tell.

    A leak grows in both halves of the late rounds. One jump, as of the allocator, is in one of them.
    """
    if len(found) < LEAST_ROUNDS:
        return None
    late = found[len(found) // 3 :]
    middle = len(late) // 2
    grown = {
        name: min(slope([each[name] for each in part]) for part in (late, late[:middle], late[middle:]))
        for name in LIMITS
    }
    over = [f"{name} by {grown[name]:.2f} a round" for name in LIMITS if grown[name] > LIMITS[name]]
    return f"after {len(found)} rounds grow: {', '.join(over)}; last {found[-1]}" if over else None


def rounds(work: Callable[[Setting, int], None]) -> Callable[[Setting], Points]:
    """Points: rounds."""

    def points(setting: Setting) -> Points:
        torch.manual_seed(setting.seed)
        found: list[dict[str, float]] = []
        number = 0
        while True:
            setting.note(f"round {number}; {found[-1] if found else ''}")
            work(setting, number)
            number += 1
            if number > WARM_UP_ROUNDS:
                found.append(measured())
            yield growth(found)

    return points


class Trained:
    """An engine that lives as long as its case."""

    def __init__(self, options: Callable[[Setting], dict[str, Any]]):
        self._options = options
        self._run: Run | None = None

    def __call__(self, setting: Setting, number: int) -> None:
        """Steps, an evaluation, a save, a save beside training, a load, a refused load."""
        if self._run is None:
            self._run = Run(self._options(setting))
        run, folder = self._run, setting.folder / "saves"
        run.steps(20 * number, 20 * number + 20)
        with torch.no_grad():
            run.engine(torch.zeros(2, 4, dtype=torch.long))
        run.engine.save_checkpoint(folder, "now")
        run.engine.save_checkpoint(folder, "later", wait=False)
        run.steps(0, 2)
        run.engine.wait_for_save()
        run.engine.load_checkpoint(folder, "now")
        with contextlib.suppress(CheckpointError):
            run.engine.load_checkpoint(folder, "none")
        shutil.rmtree(folder)


def engines(setting: Setting, _number: int) -> None:
    """Engines that open, train and close; one that ends by an exception."""
    for options in (config(device_memory=110_000), config(), on_disk(setting.folder / "disk")):
        run = Run(options)
        run.steps(0, 2)
        run.close()
    with contextlib.suppress(ZeroDivisionError), Run().engine as engine:
        engine(torch.zeros(2, 4, dtype=torch.long))
        _ = 1 / 0


def planted() -> Iterator[Planted]:
    """Leaks."""
    kept: list[object] = []

    def leaking(call: Callable[..., Any], leak: Callable[[], object]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            kept.append(leak())
            return call(*arguments, **options)

        return wrapped

    def thread() -> threading.Thread:
        waiting = threading.Thread(target=threading.Event().wait, daemon=True)
        waiting.start()
        return waiting

    case = "training, scarce"
    for name, call, leak in (
        ("a step leaks a kilobyte", "step", lambda: bytearray(os.urandom(1024))),
        ("a save leaks a descriptor", "engine.save_checkpoint", lambda: os.open("/dev/null", os.O_RDONLY)),
        ("a load leaks a thread", "engine.load_checkpoint", thread),
    ):
        yield Planted(name, case, lambda call=call, leak=leak: leaking_call(call, leaking, leak))
    yield Planted("an engine that closes stays in memory", "engines that come and go", keeping_engines)


@contextlib.contextmanager
def leaking_call(call: str, leaking: Any, leak: Callable[[], object]) -> Iterator[None]:
    """Adds a leak to a call of :class:`Run`, or of its engine."""
    from patrickstar.engine.engine import Engine

    owner, name = (Engine, call.removeprefix("engine.")) if call.startswith("engine.") else (Run, call)
    with replaced(owner, name, leaking(getattr(owner, name), leak)):
        yield


@contextlib.contextmanager
def keeping_engines() -> Iterator[None]:
    """Closed runs stay referenced."""
    kept: list[Run] = []
    original = Run.close

    def close(self: Run) -> None:
        original(self)
        kept.append(self)

    with replaced(Run, "close", close):
        yield


def soaked(name: str, work: Callable[[Setting, int], None]) -> Case:
    """A case that holds after enough rounds of ``work``."""
    return Case(name, rounds(work), WARM_UP_ROUNDS + SHOWN_ROUNDS)


PROOF = Proof(
    name="soak",
    claim="Memory, descriptors, threads and mappings of a process that trains, saves and loads on and on do not grow.",
    points="rounds of training",
    cases=[
        soaked("training, scarce", Trained(lambda _: config(device_memory=110_000))),
        soaked("training, states on a disk", Trained(lambda setting: on_disk(setting.folder / "disk"))),
        soaked("training, commit", Trained(lambda _: config(device_memory=110_000, speculation="commit"))),
        soaked("engines that come and go", engines),
    ],
    planted=list(planted()),
)
