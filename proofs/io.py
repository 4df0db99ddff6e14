"""prove-io: each file system call of a save, load or export, or of a disk of states, fails once, or from then on.

The process preloads proofs/faulty_calls.c, so calls fail where they are made: in Python, in the C++ core, in libraries.
After each point there is one named error on all ranks, or a complete result. The former checkpoint is as it was, no
descriptor is left, and training goes on with the bits of a run without faults.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from patrickstar import CheckpointError, DiskError, StateError
from patrickstar.checkpoint import Checkpoint, disk, folder, latest_tag
from patrickstar.checkpoint.disk import Disk
from proofs import planted_io
from proofs.cases import Case, Points, Proof, Setting, bug_in_ranks
from proofs.faulty_calls import EVERY, SOURCE, Calls, Failed, Fault, How, failing
from proofs.preloaded import preload
from proofs.training import Run, files, num_descriptors, on_disk, trained
from tests.bits import first_difference
from tests.distributed import run_ranks

CODES = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS)
ERRORS = [
    Fault(f"{errno.errorcode[code]} {'from there on' if and_on else 'once'}", EVERY, How.ERROR, code, and_on)
    for code in CODES
    for and_on in (False, True)
]
HARMLESS = [
    Fault(f"short {what} {'from there on' if and_on else 'once'}", calls, How.SHORT, 0, and_on)
    for what, calls in (("writes", Calls.WRITE), ("reads", Calls.READ))
    for and_on in (False, True)
] + [Fault("EINTR once", Calls.READ | Calls.WRITE | Calls.OPEN, How.ERROR, errno.EINTR)]
# A save succeeds without these: it removes leftovers, and looks at `latest` first.
OPTIONAL = ("unlink", "unlinkat", "rmdir", "opendir", "close", "read", "open", "open64", "openat", "openat64", "flock")
FIRST_STEPS, LAST_STEP = 2, 4


def sweep(fault: Fault, target: Path, call: Callable[[], Any]) -> Iterator[tuple[Failed, Any]]:
    """Repeats ``call`` with the first call failing, the second, and so on, until none fails. Gives its result or
    exception.
    """
    first = 0
    while True:
        first += 1
        with failing(fault, target, first) as failed:
            try:
                result: Any = call()
            except Exception as error:
                result = error
        yield failed, result
        if failed.num_hits == 0:
            return


def check_error(error: Exception, fault: Fault, target: Path, *kinds: type[Exception]) -> str | None:
    """A complaint unless the error is of its kind and names cause and file."""
    said = str(error)
    if not isinstance(error, kinds or CheckpointError):
        return f"{type(error).__name__} instead of {' or '.join(kind.__name__ for kind in kinds)}: {said}"
    if fault.message not in said:
        return f"the error does not say {fault.message!r}: {said}"
    return None if str(target) in said else f"the error names no file: {said}"


def check_saving_error(error: Exception, fault: Fault, target: Path) -> str | None:
    """A complaint unless the error names the file after the cause, too."""
    named = str(target) in str(error).partition(fault.message)[2]
    return check_error(error, fault, target) or (None if named else f"the error names no file: {error}")


class Saves:
    """A folder with one checkpoint, and an engine that saves another one there."""

    def __init__(self, work: Path, tag: str):
        self.path, self._template, self.tag = work / "saves", work / "template", tag
        self.run = Run()
        self.run.steps(0, 1)
        self.run.engine.save_checkpoint(self._template, tag="old")
        self.run.steps(1, FIRST_STEPS)
        self.old = files(self._template / "old")
        self.run.engine.save_checkpoint(work / "new", tag=tag)
        self.new = files(work / "new" / tag)
        self.restore()

    def restore(self) -> None:
        """Brings the former checkpoint back."""
        shutil.rmtree(self.path, ignore_errors=True)
        shutil.copytree(self._template, self.path)

    def contents(self, tag: str) -> str:
        """ "old", "new", "absent" or "mixed"."""
        if not tag or not (self.path / tag).is_dir():
            return "absent"
        found = files(self.path / tag)
        return "old" if found == self.old else "new" if found == self.new else "mixed"

    def check(self, failed: Failed, result: Any, fault: Fault) -> str | None:
        """A complaint about the folder after a save, or None."""
        latest = latest_tag(self.path)
        found = {"latest": self.contents(latest or ""), "old": self.contents("old"), self.tag: self.contents(self.tag)}
        left = [path.name for path in self.path.iterdir() if path.name not in (*found, "old")]
        if "mixed" in found.values() or found["latest"] == "absent":
            return f"after {failed.call}: {found}"
        if self.tag != "old" and found["old"] != "old":
            return f"after {failed.call} the former checkpoint is {found['old']}"
        if isinstance(result, Exception):
            complete = "is complete" in str(result)
            if found[self.tag] not in (("new",) if complete else ("old", "absent")):
                return f"after {failed.call}: {self.tag} is {found[self.tag]}, and the error says {result}"
            if left and not fault.and_on and failed.call not in ("unlink", "unlinkat", "rmdir") and not complete:
                return f"after {failed.call} there is {left}"
            return check_saving_error(result, fault, self.path)
        if failed.num_hits and fault in ERRORS and failed.call not in OPTIONAL:
            return f"{failed.call} failed, and the save says nothing"
        return None if found[self.tag] == found["latest"] == "new" else f"after {failed.call}: {found}"

    def finish(self) -> str | None:
        """Trains on: a difference from the run without faults."""
        self.run.steps(FIRST_STEPS, LAST_STEP)
        state = self.run.state()
        self.run.close()
        return first_difference(state, trained(LAST_STEP), "the run after all faults")


def each_fault(faults: list[Fault], points: Callable[[Setting, Fault], Points]) -> Callable[[Setting], Points]:
    """Points of all faults, one fault after the other."""

    def all_points(setting: Setting) -> Points:
        for number, fault in enumerate(faults):
            work = setting.folder / str(number)
            work.mkdir()
            yield from points(dataclasses.replace(setting, folder=work), fault)
            shutil.rmtree(work)

    return all_points


def saves(tag: str) -> Callable[[Setting, Fault], Points]:
    """Points: calls of a save."""

    def points(setting: Setting, fault: Fault) -> Points:
        saves = Saves(setting.folder, tag)
        descriptors = num_descriptors()
        for failed, result in sweep(fault, saves.path, lambda: saves.run.engine.save_checkpoint(saves.path, tag=tag)):
            setting.note(f"{fault.name}, {failed.call}")
            yield saves.check(failed, result, fault)
            if num_descriptors() != descriptors:
                yield f"{num_descriptors() - descriptors} descriptors stay open after {failed.call}"
                descriptors = num_descriptors()
            saves.run.engine.save_checkpoint(saves.path, tag="next")
            if [path.name for path in saves.path.iterdir() if path.name.startswith(".")]:
                yield f"the next save leaves what {failed.call} left"
            saves.restore()
        yield saves.finish()

    return points


def background_saves(setting: Setting, fault: Fault) -> Points:
    """Points: calls of a save with ``wait=False``; its error comes from the next call that looks."""
    saves = Saves(setting.folder, "new")

    def save() -> None:
        saves.run.engine.save_checkpoint(saves.path, tag="new", wait=False)
        saves.run.engine.wait_for_save()

    for failed, result in sweep(fault, saves.path, save):
        setting.note(f"{fault.name}, {failed.call}")
        yield saves.check(failed, result, fault)
        saves.restore()
    yield saves.finish()


def loads(setting: Setting, fault: Fault) -> Points:
    """Points: calls of a load."""
    run = Run()
    run.steps(0, FIRST_STEPS)
    run.engine.save_checkpoint(setting.folder / "saves")
    expected = run.state()
    run.steps(FIRST_STEPS, LAST_STEP)
    descriptors = num_descriptors()
    for failed, result in sweep(fault, setting.folder, lambda: run.engine.load_checkpoint(setting.folder / "saves")):
        setting.note(f"{fault.name}, {failed.call}")
        if isinstance(result, Exception):
            yield check_error(result, fault, setting.folder)
            run.engine.load_checkpoint(setting.folder / "saves")
        yield first_difference(run.state(), expected, f"loaded after {failed.call}")
        if num_descriptors() != descriptors:
            yield f"{num_descriptors() - descriptors} descriptors stay open after {failed.call}"
            descriptors = num_descriptors()
        run.steps(FIRST_STEPS, FIRST_STEPS + 1)
    run.close()


def verifications(setting: Setting, fault: Fault) -> Points:
    """Points: calls of ``verify``."""
    saves = Saves(setting.folder, "new")

    def verify() -> None:
        with Checkpoint.find(saves.path) as checkpoint:
            checkpoint.verify()

    for failed, result in sweep(fault, saves.path, verify):
        setting.note(f"{fault.name}, {failed.call}")
        if isinstance(result, Exception):
            yield check_error(result, fault, saves.path)
        elif failed.num_hits and fault in ERRORS and failed.call not in ("close", "opendir"):
            yield f"{failed.call} failed, and verify says nothing"
        else:
            yield None
    saves.run.close()


def exports(setting: Setting, fault: Fault) -> Points:
    """Points: calls of ``export_weights``."""
    run = Run()
    run.engine.export_weights(setting.folder / "expected")
    expected, target = files(setting.folder / "expected"), setting.folder / "weights"
    for failed, result in sweep(fault, setting.folder, lambda: run.engine.export_weights(target)):
        setting.note(f"{fault.name}, {failed.call}")
        found = files(target) if target.is_dir() else {}
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(result, Exception):
            complete = found == expected and "is complete" in str(result)
            yield check_error(result, fault, setting.folder)
            yield f"half of an export lies there after {failed.call}" if found and not complete else None
        elif failed.num_hits and fault in ERRORS and failed.call not in OPTIONAL:
            yield f"{failed.call} failed, and the export says nothing"
        else:
            yield first_difference(found, expected, "the exported files")
    run.close()


def disk_states(io: str) -> Callable[[Setting, Fault], Points]:
    """Points: calls on the file of optimizer states, while it is made and while training uses it."""

    def points(setting: Setting, fault: Fault) -> Points:
        options = on_disk(setting.folder / "disk", io)
        expected = trained(LAST_STEP)
        run = Run(options)
        run.steps(0, FIRST_STEPS)
        run.engine.save_checkpoint(setting.folder / "saves")
        run.close()
        opened: list[Run] = []

        def train() -> dict[str, Any]:
            opened.append(Run(options))
            opened[-1].engine.load_checkpoint(setting.folder / "saves")
            opened[-1].steps(FIRST_STEPS, LAST_STEP)
            return opened[-1].state()

        descriptors = num_descriptors()
        for failed, result in sweep(fault, setting.folder / "disk", train):
            setting.note(f"{fault.name}, {failed.call}")
            if isinstance(result, Exception):
                yield check_error(result, fault, setting.folder, DiskError, CheckpointError)
            else:
                yield first_difference(result, expected, f"the run after {failed.call}")
            while opened:
                with contextlib.suppress(DiskError, StateError):
                    opened.pop().close()
            if num_descriptors() != descriptors:
                yield f"{num_descriptors() - descriptors} descriptors stay open after {failed.call}"
                descriptors = num_descriptors()
            if list((setting.folder / "disk").iterdir()):
                yield f"{failed.call} leaves {list((setting.folder / 'disk').iterdir())}"

    return points


CALLS_PER_START = 12


def save_on_two_ranks(work: str, fault: Fault, begin: int, bug: str) -> tuple[list[str], int, bool]:
    """Saves in which a call of rank 1 fails, from the ``begin``-th on: complaints, number of points, and whether it was
    the last of them.
    """
    with planted_io.IN_RANKS[bug]() if bug else contextlib.nullcontext():
        run = Run()
        rank, found = int(os.environ["RANK"]), []
        target = Path(work) / f"from {begin}"
        run.engine.save_checkpoint(target, tag="old")
        for first in range(begin, begin + CALLS_PER_START):
            error: Exception | None = None
            with failing(fault, target, first if rank == 1 else 1 << 40) as failed:
                try:
                    run.engine.save_checkpoint(target, tag="new")
                except Exception as raised:
                    error = raised
            said = f"{type(error).__name__}: {error}" if error is not None else ""
            told = run.engine._session.ranks.control.exchange(said.encode(), "a proof")
            if told[0] != told[1]:
                found.append(f"after {failed.call} the ranks say {told[0]!r} and {told[1]!r}")
            elif error is not None:
                found += filter(None, [check_error(error, fault, target)])
                found += [] if "rank 1: " in said else [f"no rank is named: {said}"]
            elif failed.num_hits and fault in ERRORS and failed.call not in OPTIONAL:
                found.append(f"{failed.call} failed on rank 1, and the save says nothing")
            (_, was_last) = run.engine._session.ranks.control.exchange(b"1" * (failed.num_hits == 0), "a proof")
            if was_last:
                break
            if rank == 0:
                shutil.rmtree(target / "new", ignore_errors=True)
                disk.replace_file(Disk(), target / "latest", folder.latest_bytes("old"), target / ".latest")
            run.engine._session.ranks.control.exchange(b"", "a proof")
        else:
            return found, CALLS_PER_START, False
        return found, first - begin, True


def two_ranks(setting: Setting) -> Points:
    """Points: calls of the second rank in a save of two."""
    for fault in (ERRORS[0], ERRORS[1], ERRORS[2], HARMLESS[0], HARMLESS[1]):
        setting.note(fault.name)
        begin, was_last = 1, False
        while not was_last:
            arguments = str(setting.folder / fault.name), fault, begin, bug_in_ranks()
            _, (complaints, number, was_last) = run_ranks(2, save_on_two_ranks, *arguments, timeout_seconds=60)
            setting.tried(number)
            begin += CALLS_PER_START
            yield "; ".join(complaints) or None


DISK_FAULTS = [ERRORS[0], ERRORS[1], ERRORS[2], *HARMLESS]
PROOF = Proof(
    name="io",
    claim="A file system call that fails is one named error on all ranks; what was saved stays, and training goes on.",
    points="failing calls",
    cases=[
        Case("saves under a new tag", each_fault(ERRORS, saves("new"))),
        Case("saves under the tag that exists", each_fault(ERRORS, saves("old"))),
        Case("saves with short calls", each_fault(HARMLESS, saves("new"))),
        Case("saves in the background", each_fault(ERRORS[:4] + HARMLESS[:2], background_saves)),
        Case("saves of two ranks", two_ranks),
        Case("loads", each_fault(ERRORS[:2], loads)),
        Case("loads with short calls", each_fault(HARMLESS[2:], loads)),
        Case("verify", each_fault(ERRORS[:2] + HARMLESS[2:], verifications)),
        Case("exports", each_fault(ERRORS[:4] + HARMLESS[:2], exports)),
        Case("states on a disk", each_fault(DISK_FAULTS, disk_states("threads"))),
        Case("states on a disk by io_uring", each_fault(DISK_FAULTS, disk_states("auto"))),
    ],
    planted=list(planted_io.planted()),
    environment=lambda: preload(SOURCE),
)
