"""Runs the cases and the planted bugs of a proof in forked processes, so many at a time, within the given time."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib
import json
import logging
import mmap
import multiprocessing
import os
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from proofs.cases import Case, Planted, Proof, Setting
from tests import distributed

PLANTED_SHARE = 0.4  # of the time
LEAST_PLANTED_SECONDS = 60.0
MOST_VIOLATIONS = 20  # of a case that are kept
POLL_SECONDS = 0.02
NOTE_BYTES = 500
ENDED, STOPPED = 0, 3
# Errors of a proof's own code: no sign of a planted bug.
OWN_ERRORS = ("NameError", "AttributeError", "ImportError", "ModuleNotFoundError", "TypeError", "SyntaxError")


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line's."""

    minutes: float = 15.0
    jobs: int = 2
    seed: int = 0
    most_points: int | None = None
    """Limit for each case; None: all that the time allows."""
    most_planted: int | None = None
    only: str = ""
    """A part of a case's name."""


class Progress:
    """The number of points tried and a note, in memory that a forked process shares with its parent."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 + 2 + NOTE_BYTES)

    def add(self, number: int = 1) -> int:
        """Counts more points, and returns how many there are."""
        count = self.count + number
        self._memory[:8] = struct.pack("<q", count)
        return count

    @property
    def count(self) -> int:
        """Points so far."""
        return int(struct.unpack("<q", self._memory[:8])[0])

    def note(self, text: str) -> None:
        """Replaces the note."""
        data = text.encode()[:NOTE_BYTES]
        self._memory[8 : 10 + len(data)] = struct.pack("<H", len(data)) + data

    @property
    def text(self) -> str:
        """The last note."""
        (length,) = struct.unpack("<H", self._memory[8:10])
        return self._memory[10 : 10 + length].decode(errors="replace")


class Job:
    """A case, with a planted bug or without, in a process of its own."""

    def __init__(self, proof: Proof, case: Case, planted: Planted | None, seconds: float, options: Options):
        self.case, self.planted = case, planted
        self._proof, self._options = proof, options
        self._folder = Path(tempfile.mkdtemp(prefix=f"prove-{proof.name}-"))
        self._progress = Progress()
        self._began = self._last_change = time.monotonic()
        self._last_count = 0
        self._deadline = self._began + seconds
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            self._work()

    def _work(self) -> None:
        status = 1
        try:
            os.setsid()
            output = os.open(self._folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for stream in (1, 2):
                os.dup2(output, stream)
            faulthandler.enable()
            logging.getLogger("patrickstar").setLevel(logging.CRITICAL)
            faulthandler.register(signal.SIGUSR2)
            distributed._Fork.__init__ = _fork_here
            importlib.import_module("torch").set_num_threads(1)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
            status = self._try_points()
        except BaseException as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            self._report(f"{type(error).__name__}: {error} ({Path(line.filename).name}:{line.lineno} {line.line})")
            traceback.print_exc()
        finally:
            os._exit(status)

    def _try_points(self) -> int:
        (self._folder / "work").mkdir()
        seed = self._options.seed
        setting = Setting(self._folder / "work", seed, self._progress.note, self._progress.add)
        most = None if self.planted is not None else self._options.most_points
        with self.planted.bug() if self.planted is not None else contextlib.nullcontext():
            for violation in self.case.points(setting):
                count = self._progress.add()
                if violation is not None:
                    self._report(violation)
                    if self.planted is not None:
                        return STOPPED
                if time.monotonic() > self._deadline or (most is not None and count >= most):
                    return STOPPED
        return ENDED

    def _report(self, violation: str) -> None:
        with (self._folder / "violations").open("a") as file:
            file.write(json.dumps(f"{violation} [{self._progress.text}]"[:1500]) + "\n")

    def result(self) -> dict[str, Any] | None:
        """The outcome once the process has ended, else None. A process that hangs is ended."""
        now = time.monotonic()
        if self._progress.count != self._last_count:
            self._last_count, self._last_change = self._progress.count, now
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid == 0 and now - self._last_change <= self._proof.quiet_seconds:
            return None
        end = ""
        if pid == 0:
            end = f"no end after {self._proof.quiet_seconds:.0f} s"
            os.kill(self._pid, signal.SIGUSR2)  # prints where it is
            time.sleep(0.5)
            os.killpg(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            status = 0
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)  # processes that the case has left
        return self._outcome(os.waitstatus_to_exitcode(status), end)

    def _outcome(self, code: int, end: str) -> dict[str, Any]:
        file = self._folder / "violations"
        lines = file.read_text().splitlines() if file.exists() else []
        violations = [
            json.loads(line).replace(f"{self._folder}/", "") for line in lines
        ]  # records name no machine's paths
        if code < 0:
            end = f"the process ended by {signal.Signals(-code).name}"
        elif code not in (ENDED, STOPPED) and not violations:
            end = f"the process ended with {code}"
        if end:
            violations.append(f"{end} [{self._progress.text}]")
            output = (self._folder / "output").read_text(errors="replace") if code or not violations[:-1] else ""
            print(output[-3000:], file=sys.stderr)
        shutil.rmtree(self._folder, ignore_errors=True)
        result: dict[str, Any] = {"case": self.case.name, "points": self._progress.count}
        result["seconds"] = round(time.monotonic() - self._began, 1)
        if self.planted is not None:
            found = violations[0] if violations else None
            is_own = found is not None and found.startswith(OWN_ERRORS)
            return {"name": self.planted.name, **result, "found": None if is_own else found, "error": is_own and found}
        least = self.case.least_points
        if self._progress.count < least and not violations:
            violations.append(f"{self._progress.count} points show nothing; {least} are needed: give more minutes")
        return {**result, "all": code == ENDED, "violations": violations[:MOST_VIOLATIONS]}


def _fork_here(self: Any, target: Any, *args: Any) -> None:
    """Starts a rank as a fork of this process, which has no threads yet, in place of a fork of a server."""
    self._process = multiprocessing.get_context("fork").Process(target=target, args=args)
    self._process.start()
    self.pid = self._process.pid


def run(proof: Proof, options: Options) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the results of the planted bugs and of the cases."""
    importlib.import_module("tests.rank_imports")  # once, before the forks
    end = time.monotonic() + 60 * options.minutes
    cases = [case for case in proof.cases if options.only in case.name]
    planted = [each for each in proof.planted if options.only in each.case][: options.most_planted]
    for each in planted:
        proof.case(each.case)
    share = max(PLANTED_SHARE * 60 * options.minutes * options.jobs / max(len(planted), 1), LEAST_PLANTED_SECONDS)
    first = (Job(proof, proof.case(each.case), each, share, options) for each in planted)
    found = list(_together(first, options.jobs))

    def jobs() -> Iterator[Job]:
        for index, case in enumerate(cases):
            left = max(end - time.monotonic(), 1.0)
            yield Job(proof, case, None, left * min(options.jobs / (len(cases) - index), 1.0), options)

    return found, list(_together(jobs(), options.jobs))


def _together(jobs: Iterator[Job], most: int) -> Iterator[dict[str, Any]]:
    running: list[Job] = []
    more = True
    while more or running:
        while more and len(running) < most:
            job = next(jobs, None)
            more = job is not None
            running += [job] if job is not None else []
        for job in list(running):
            result = job.result()
            if result is not None:
                running.remove(job)
                _show(result)
                yield result
        time.sleep(POLL_SECONDS)


def _show(result: dict[str, Any]) -> None:
    if "found" in result:
        told = f"found after {result['points']} points: {result['found']}" if result["found"] else "NOT FOUND"
        print(f"planted, {result['name']}: {told[:240]}{result['error'] or ''}", flush=True)
    else:
        told = "all" if result["all"] else "stopped"
        print(f"{result['case']}: {result['points']} points ({told}, {result['seconds']} s)", flush=True)
        for violation in result["violations"]:
            print(f"    VIOLATION: {violation}", flush=True)


def holds(found: Sequence[dict[str, Any]], tried: Sequence[dict[str, Any]]) -> bool:
    """True if nothing was violated, each case had its least number of points, and each planted bug was found."""
    well = all(case["points"] and not case["violations"] for case in tried)
    return well and all(each["found"] for each in found)
