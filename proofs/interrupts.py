"""prove-interrupts: Ctrl-C and other signals at random instants, and at instructions of the package's own code.

The calls are forward, backward, step, save and load; engines are roomy, scarce, on a disk, and
commit in backward. After each signal its exception comes out of the call, the call is made again, and at the end the
run has the bits of one without signals. Signals whose handlers return change nothing. Signals to torchrun are in
proofs/launched_signals.py.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from patrickstar import StateError
from patrickstar.session import interrupts
from proofs import launched_signals
from proofs.cases import Case, Planted, Points, Proof, Setting, in_ranks, replaced
from tests.bits import first_difference
from tests.engine.test_interrupts import MICRO_BATCHES, AtInstructions, AtRandomInstants, Never, Run

STEPS_PER_RUN = 12
TORCHRUN = "torchrun, random instants"
MEAN_INSTRUCTION = 1500


class SavedRun(Run):
    """Saves every third step, and loads every sixth. A step refused as half updated begins
    again from the checkpoint of the step before.
    """

    def redo(self, step: int, interrupts: Any) -> None:
        """Makes one step, whatever comes between."""
        if self.commits:
            self._until_done(interrupts, lambda: self.engine.save_checkpoint(self.folder, tag="before"))
        while self.engine.global_steps == step:
            try:
                with interrupts:
                    self.step(step)
            except KeyboardInterrupt:
                interrupts.count += 1
                if self.engine.global_steps == step:
                    self._begin_again()
        if step % 3 == 2:
            self._until_done(interrupts, lambda: self.engine.save_checkpoint(self.folder, tag="last"))
        if step % 6 == 5:
            self._until_done(interrupts, lambda: self.engine.load_checkpoint(self.folder, tag="last"))

    commits = False
    num_micro_batches = MICRO_BATCHES

    def step(self, step: int) -> None:
        """All micro-batches of a step."""
        for micro_batch in range(self.num_micro_batches):
            self.engine.backward(self.engine(self.batch(step, micro_batch)))
            self.engine.step()

    def _begin_again(self) -> None:
        try:
            self.engine.zero_grad()
        except StateError:
            self.engine.load_checkpoint(self.folder, tag="before")


class Returning(AtRandomInstants):
    """The handler counts, and returns."""

    def _interrupt(self, _signum: int, _frame: Any) -> None:  # type: ignore[override]
        self.count += 1


def runs(make: Callable[[Setting, float], Any], *, micro_batches: int = MICRO_BATCHES, **options: Any) -> Any:
    """Points: signals that came."""

    def points(setting: Setting) -> Points:
        more = dict(options)
        commits = more.get("optimizer", {}).get("speculation") == "commit"
        if "disk_memory" in more:
            (setting.folder / "disk").mkdir()
            more["disk_memory"] = {"path": str(setting.folder / "disk"), "size": "1GiB", "io": "threads"}
        more["gradient_accumulation_steps"] = micro_batches

        def opened(name: str) -> SavedRun:
            run = SavedRun(setting.folder / name, **more)
            run.commits, run.num_micro_batches = commits, micro_batches
            return run

        signal.signal(signal.SIGINT, signal.default_int_handler)
        run = opened("expected")
        begun = time.perf_counter()
        for step in range(STEPS_PER_RUN):
            run.redo(step, Never())
        seconds = (time.perf_counter() - begun) / STEPS_PER_RUN
        expected = run.finish()
        signals = make(setting, seconds)
        for number in itertools.count():
            run, before = opened(f"run {number}"), signals.count
            if isinstance(signals, BetweenUpdates):
                signals.watch(run)
            for step in range(STEPS_PER_RUN):
                setting.note(f"run {number}, step {step}, signal {signals.count}")
                run.redo(step, signals)
                setting.tried(signals.count - before)
                before = signals.count
                if isinstance(signals, Instructions) and signals.num_sent != signals.count:
                    yield f"{signals.num_sent} signals were sent, {signals.count} came out of calls"
            setting.tried(-1)
            yield first_difference(run.finish(), expected, f"run {number}")

    return points


class BetweenUpdates:
    """Sends one SIGINT in half of the backwards, when all layers but the first have their gradients."""

    def __init__(self, seed: int) -> None:
        self.count = 0
        self._chooser = random.Random(seed)
        self._is_armed = False

    def watch(self, run: SavedRun) -> None:
        """Sends signals in backwards of ``run``."""
        run.engine.module.layers[0].weight.register_hook(self._come)

    def __enter__(self) -> None:
        self._is_armed = self._chooser.random() < 0.5

    def __exit__(self, *error: object) -> None:
        self._is_armed = False

    def _come(self, _gradient: Any) -> None:
        if self._is_armed:
            self._is_armed = False
            signal.raise_signal(signal.SIGINT)


def between_updates(setting: Setting, _seconds: float) -> BetweenUpdates:
    """Ctrl-C in the middle of a backward that updates."""
    return BetweenUpdates(setting.seed)


def at_random_instants(setting: Setting, seconds: float) -> AtRandomInstants:
    """Ctrl-C, by an alarm."""
    instants = AtRandomInstants(seconds)
    instants._random.seed(setting.seed)
    return instants


def returning(setting: Setting, seconds: float) -> AtRandomInstants:
    """Signals whose handler returns."""
    instants = Returning(seconds)
    signal.signal(signal.SIGALRM, instants._interrupt)
    return instants


class Instructions(AtInstructions):
    """Counts the signals that are sent: each must come out of a call."""

    num_sent = 0

    def _count(self, frame: Any, event: str, argument: Any) -> Any:
        self.num_sent += event == "opcode" and self._left == 1
        return super()._count(frame, event, argument)


def at_instructions(setting: Setting, _seconds: float) -> Instructions:
    """Ctrl-C at a random instruction of half of the calls: the others end."""
    chooser = random.Random(setting.seed)

    def instants() -> Iterator[int]:
        while True:
            yield chooser.choice((0, int(chooser.expovariate(1 / MEAN_INSTRUCTION)) + 1))

    return Instructions(instants())


def planted() -> Iterator[Planted]:
    """Bugs in how signals are deferred."""
    yield Planted("a signal is lost", "instructions, roomy", lambda: replaced(interrupts, "_deliver", forgetting))
    for case in ("random instants, scarce", "instructions, roomy"):
        yield Planted(f"signals are not deferred ({case})", case, undeferred)
    yield Planted("a signal in a backward comes in the middle of a hook", "random instants, scarce", open_everywhere)
    yield Planted("a half-updated model trains on", "between updates, commit", unbroken)
    for bug in launched_signals.IN_RANKS:
        yield Planted(f"ranks of torchrun: {bug}", TORCHRUN, lambda bug=bug: in_ranks(bug))


@contextlib.contextmanager
def undeferred() -> Iterator[None]:
    """Handlers stay the user's."""
    with replaced(interrupts, "_take_handlers", lambda: None):
        yield


def forgetting() -> None:
    """Forgets signals that wait."""
    interrupts._state.waiting.clear()


@contextlib.contextmanager
def open_everywhere() -> Iterator[None]:
    """Signals within a block are delivered at once."""

    def receive(signum: int, frame: Any) -> None:
        interrupts._state.waiting.setdefault(signum, frame)
        interrupts._deliver()

    with replaced(interrupts, "_receive", receive):
        yield


@contextlib.contextmanager
def unbroken() -> Iterator[None]:
    """Nothing breaks an engine up."""
    from patrickstar.session.wholeness import Wholeness

    with replaced(Wholeness, "break_up", lambda self, because: None):
        yield


SCARCE = {"device_memory": "40KiB", "default_chunk_size": 1024}
COMMIT = {
    "fp16": {"enabled": False},
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}, "speculation": "commit"},
    "default_chunk_size": 1024,
}
DISK = {**SCARCE, "host_memory": "40KiB", "disk_memory": {}}
PROOF = Proof(
    name="interrupts",
    claim="A signal comes out of the engine's call as its handler's exception; nothing is lost, split or done twice.",
    points="signals",
    cases=[
        Case("random instants, roomy", runs(at_random_instants)),
        Case("random instants, scarce", runs(at_random_instants, **SCARCE)),
        Case("random instants, states on a disk", runs(at_random_instants, **DISK)),
        Case("random instants, commit", runs(at_random_instants, micro_batches=1, **COMMIT)),
        Case("between updates, commit", runs(between_updates, micro_batches=1, **COMMIT)),
        Case("handlers that return, scarce", runs(returning, **SCARCE)),
        Case("instructions, roomy", runs(at_instructions)),
        Case("instructions, scarce", runs(at_instructions, **SCARCE)),
        Case(TORCHRUN, launched_signals.at_random_instants),
    ],
    planted=list(planted()),
    quiet_seconds=120,
)
