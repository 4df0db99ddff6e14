"""prove-ranks: one of several ranks is killed, stopped, late, or at fault in another way, in each part of a run.

The others must end with an error within seconds, and say which rank failed. They are processes with gloo and simulated
devices. A rank that is silent counts as lost after ``rank_timeout_seconds``, here a few seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from proofs.cases import Case, Planted, Points, Proof, Setting, bug_in_ranks, in_ranks, replaced
from tests.distributed import GRACE_SECONDS, rank_outcomes

TIMEOUT = 5.0
GRACE = 10.0  # seconds after which the others have ended, beyond the timeout where the rank is silent
TOLD_SECONDS = 4.0  # an exception reaches the others before any timeout
PHASES = ("opening", "forward", "backward", "step", "evaluation", "save", "save beside training", "load", "close")
WITHOUT_STORE = "rank 0 or torchrun's agent ended; see its output"  # which names the rank
STEPS = 4
FAULTY_STEP = 2


def kill(_name: str) -> None:
    """SIGKILL, as of the system's out-of-memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)


def crash(_name: str) -> None:
    """SIGSEGV."""
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def stop(_name: str) -> None:
    """SIGSTOP: the process lives and does nothing."""
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_gil(_name: str) -> None:
    """A thread in foreign code that never lets Python go on."""
    ctypes.PyDLL(None).sleep(120)


def be_late(_name: str) -> None:
    """Comes much later than the timeout."""
    time.sleep(120)


def fail(_name: str) -> None:
    """An exception in the user's code; the process then goes on with something else."""
    raise BadBatchError("the batch is bad")


def leave(_name: str) -> None:
    """Ends the process as if all were done."""
    os._exit(0)


class BadBatchError(Exception):
    """The user's error."""


class OtherCallError(Exception):
    """Raised where a rank makes another call than the others."""


def call_otherwise(_name: str) -> None:
    """Leaves the call out, and makes the next one."""
    raise OtherCallError


FAULTS: dict[str, Callable[[str], None]] = {
    "SIGKILL": kill,
    "SIGSEGV": crash,
    "SIGSTOP": stop,
    "holds the GIL": hold_the_gil,
    "is late": be_late,
    "exception": fail,
    "leaves": leave,
    "other call": call_otherwise,
}
SILENT = ("SIGSTOP", "holds the GIL", "is late")


class Course:
    """One rank's run with a fault in one phase."""

    def __init__(self, folder: Path, phase: str, fault: str, victim: int):
        self._folder, self._phase, self._fault = folder, phase, fault
        self._is_victim = int(os.environ["RANK"]) == victim

    def here(self, phase: str) -> None:
        """The fault, if its place is here."""
        if self._is_victim and phase == self._phase:
            self._phase = ""
            (self._folder / "fault").write_text(str(time.monotonic()))
            FAULTS[self._fault](phase)

    def call(self, phase: str, function: Callable[[], Any]) -> Any:
        """A call of all ranks; the victim may leave it out."""
        try:
            self.here(phase)
        except OtherCallError:
            return None
        return function()


def run(folder: str, phase: str, fault: str, victim: int, bug: str) -> None:
    """Trains, saves, loads and closes. Writes when and how it ends."""
    rank, place = os.environ["RANK"], Path(folder)
    end: BaseException | None = None
    with IN_RANKS[bug]() if bug else contextlib.nullcontext():
        try:
            _train(Course(place, phase, fault, victim), place / "saves")
        except BaseException as error:
            end = error
        said = {"at": time.monotonic(), "kind": type(end).__name__ if end else "", "text": str(end or "")}
    (place / f"end-{rank}").write_text(json.dumps(said))
    if isinstance(end, BadBatchError):
        time.sleep(60)  # the process lives on: the others must hear from the engine
    if end is not None:
        raise end


def _train(course: Course, saves: Path) -> None:
    import torch

    from proofs.training import Run, config

    course.here("opening")
    run = Run(config(device_memory=150_000, rank_timeout_seconds=TIMEOUT))
    blocks = run.engine.module.blocks
    with run.engine:
        for step in range(STEPS):
            faulty = course if step == FAULTY_STEP else Course(saves, "", "", -1)
            hook = blocks[1].register_forward_pre_hook(lambda *_, faulty=faulty: faulty.here("forward"))
            loss = faulty.call("other forward", lambda step=step: _forward(run, step))
            hook.remove()
            loss.register_hook(lambda _, faulty=faulty: faulty.here("backward"))
            run.engine.backward(loss)
            faulty.call("step", run.optimizer.step)
            run.optimizer.zero_grad()
        with torch.no_grad():
            course.call("evaluation", lambda: _forward(run, 0))
        course.call("save", lambda: run.engine.save_checkpoint(saves))
        run.engine.save_checkpoint(saves, tag="later", wait=False)
        course.here("save beside training")
        run.steps(STEPS, STEPS + 1)
        run.engine.wait_for_save()
        course.call("load", lambda: run.engine.load_checkpoint(saves))
        run.steps(STEPS, STEPS + 1)
        course.here("close")


def _forward(run: Any, step: int) -> Any:
    import torch

    number = 2 * step + int(os.environ["RANK"])
    return run.engine(torch.randint(0, 31, (2, 4), generator=torch.Generator().manual_seed(number)))


def cell(folder: Path, num_ranks: int, phase: str, fault: str, victim: int) -> str | None:
    """A complaint about how the other ranks end."""
    folder.mkdir()
    arguments = str(folder), phase, fault, victim, bug_in_ranks()
    stays = fault in SILENT or fault == "exception"  # the victim ends when the harness ends it
    grace = GRACE + TIMEOUT if phase == "opening" else GRACE_SECONDS  # ranks give the store up seconds apart
    outcomes = rank_outcomes(num_ranks, run, *arguments, timeout_seconds=40, grace_seconds=grace if stays else None)
    if not (folder / "fault").exists():
        return f"the fault did not happen: {outcomes[victim].output[-300:]}"
    began = float((folder / "fault").read_text())
    limit = GRACE + (TIMEOUT if fault in SILENT or phase == "opening" else 0)
    if fault == "exception" and phase != "opening":
        limit = TOLD_SECONDS
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        file = folder / f"end-{rank}"
        if not file.exists():
            return f"rank {rank} did not end; {outcome.output[-300:]}"
        end = json.loads(file.read_text())
        if not end["kind"]:
            return f"rank {rank} ends as if nothing was"
        if end["at"] - began > limit:
            return f"rank {rank} ends after {end['at'] - began:.1f} s"
        if f"rank {victim}" not in end["text"] and not (phase == "opening" and WITHOUT_STORE in end["text"]):
            return f"rank {rank} does not name rank {victim}: {end['kind']}: {end['text']}"
    return None


def matrix(num_ranks: int, fault: str) -> Callable[[Setting], Points]:
    """Points: phases, each with one rank at fault."""

    def points(setting: Setting) -> Points:
        chooser = random.Random(f"{setting.seed} {fault}")
        left_out = ("forward", "backward", "close", "opening", "save beside training") if fault == "other call" else ()
        for phase in chooser.sample(PHASES, len(PHASES)):
            if phase in left_out:
                continue
            victim = chooser.randrange(num_ranks)
            setting.note(f"rank {victim} of {num_ranks}: {fault} in {phase}")
            yield cell(setting.folder / phase, num_ranks, phase, fault, victim)

    return points


def resizes(setting: Setting) -> Points:
    """Points: phases of a resize in which a process is killed (tests/elastic/test_kills.py)."""
    from tests.elastic import test_kills

    cases = random.Random(setting.seed).sample(test_kills.CASES, len(test_kills.CASES))
    for number, (plan, victim, phase) in enumerate(cases):
        setting.note(f"{plan}: process {victim} is killed in {phase.name}")
        folder = setting.folder / str(number)
        folder.mkdir()
        test_kills.check(plan, victim, phase, folder)
        yield None


@contextlib.contextmanager
def no_timeout() -> Iterator[None]:
    """Ranks are awaited for ten minutes."""
    from proofs import training

    original = training.config
    with replaced(training, "config", lambda **more: original(**{**more, "rank_timeout_seconds": 600.0})):
        yield


@contextlib.contextmanager
def silent_failure() -> Iterator[None]:
    """A rank that fails tells the others nothing, and keeps its connections."""
    from patrickstar.ranks.distributed import RankGroups

    with (
        replaced(RankGroups, "fail", lambda self, error: None),
        replaced(RankGroups, "leave", lambda self, error: None),
    ):
        yield


@contextlib.contextmanager
def nameless() -> Iterator[None]:
    """Errors do not say which rank failed."""
    from patrickstar import RankFailure

    with replaced(RankFailure, "__str__", lambda self: "a rank failed"):
        yield


@contextlib.contextmanager
def forgiving() -> Iterator[None]:
    """A rank ends as if nothing was when others make other calls."""
    from patrickstar import RankFailure, RankMismatch

    original = globals()["_train"]

    def train(course: Course, saves: Path) -> None:
        with contextlib.suppress(RankMismatch, RankFailure):
            original(course, saves)

    with replaced_global("_train", train):
        yield


@contextlib.contextmanager
def replaced_global(name: str, value: object) -> Iterator[None]:
    """Sets a name of this module as long as the context lasts."""
    before = globals()[name]
    globals()[name] = value
    try:
        yield
    finally:
        globals()[name] = before


IN_RANKS = {"no timeout": no_timeout, "silent": silent_failure, "nameless": nameless, "forgiving": forgiving}


def planted() -> Iterator[Planted]:
    """Bugs in how a lost rank is found and told."""
    for name, case, bug in (
        ("a silent rank is awaited for ten minutes", "2 ranks: SIGSTOP", "no timeout"),
        ("an exception is not told to other ranks", "2 ranks: exception", "silent"),
        ("the error names no rank", "2 ranks: SIGKILL", "nameless"),
        ("a rank whose peer made another call ends as if nothing was", "2 ranks: other call", "forgiving"),
    ):
        yield Planted(name, case, lambda bug=bug: in_ranks(bug))


PROOF = Proof(
    name="ranks",
    claim="A rank that is lost, silent or makes another call ends all ranks within seconds; the error names it.",
    points="faults",
    cases=[
        *(Case(f"{num_ranks} ranks: {fault}", matrix(num_ranks, fault)) for num_ranks in (2, 4) for fault in FAULTS),
        Case("a process is killed in a resize", resizes),
    ],
    planted=list(planted()),
)
