"""Signals from outside to torchrun and its ranks, for ``make prove-interrupts``.

A point starts ``torchrun`` with two ranks, each with a DataLoader's worker, and sends signals at a random instant:
SIGTERM to torchrun or its process group, once or twice, or SIGTERM or SIGUSR1 to one rank. The run must have saved all
steps that it had made, and must go on with the bits of a run without signals.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from proofs.cases import Points, Setting, bug_in_ranks, replaced
from tests.bits import first_difference
from tests.distributed import ROOT, run_ranks

STEPS = 8
STEP_SECONDS = 0.2
LIMIT_SECONDS = 90


def train(folder: str, pause: float) -> tuple[int, Any]:
    """The rest of the run in ``folder``; returns its first step and the state at the end."""
    import torch

    from patrickstar import SavedRun
    from proofs.training import Run

    run = Run()
    with run.engine, SavedRun(run.engine, folder, minutes=0) as saved:
        begin = saved.client_state.get("step", 0)
        numbers = torch.utils.data.DataLoader(
            range(STEPS),
            batch_size=None,
            sampler=range(begin, STEPS),
            num_workers=1,
            worker_init_fn=SavedRun.detach_worker,
            generator=torch.Generator(),
        )
        for step in numbers:
            run.step(int(step))
            time.sleep(pause)
            if os.environ["RANK"] == "0":
                print(f"step {step + 1}", flush=True)
            saved.after_step({"step": int(step) + 1})
        return begin, run.state()


class Launched:
    """torchrun with the run in ``folder``."""

    def __init__(self, folder: Path):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        self._process = subprocess.Popen(
            [*command, "-m", "proofs.launched_signals", str(folder)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PATRICKSTAR_PROOF_BUG": bug_in_ranks()},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.num_steps = 0

    def wait_for(self, num_steps: int) -> None:
        """Returns once so many steps are made."""
        while self.num_steps < num_steps and self._read():
            pass

    def send(self, target: str, signum: signal.Signals) -> None:
        """Sends a signal to "torchrun", its "group", or "rank 0" or "rank 1"."""
        pid = self._process.pid
        with contextlib.suppress(ProcessLookupError, IndexError):
            if target == "torchrun":
                os.kill(pid, signum)
            elif target == "group":
                os.killpg(pid, signum)
            else:
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                os.kill(int(children[int(target[-1])]), signum)

    def end(self) -> int:
        """Reads to the end, and returns the exit status."""
        while self._read():
            pass
        return self._process.wait(LIMIT_SECONDS)

    def _read(self) -> bool:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line.startswith("step "):
            self.num_steps = int(line.split()[1])
        return bool(line)


def at_random_instants(setting: Setting) -> Points:
    """Points: starts of torchrun."""
    chooser = random.Random(setting.seed)
    (_, expected), _ = run_ranks(2, train, str(setting.folder / "whole"), 0.0)
    number = 0
    while True:
        number += 1
        folder = setting.folder / str(number)
        target = chooser.choice(["torchrun", "torchrun", "group", "rank 0", "rank 1"])
        signum = chooser.choice([signal.SIGTERM, signal.SIGUSR1]) if "rank" in target else signal.SIGTERM
        wanted, delay = chooser.choice([0, *range(1, STEPS - 2)]), chooser.uniform(0, STEP_SECONDS)
        again = chooser.choice([None, chooser.uniform(0.3, 1.5)])
        setting.note(f"{signum.name} to {target} {delay:.2f} s after step {wanted}, again after {again}")
        launched = Launched(folder)
        launched.wait_for(wanted)
        time.sleep(delay if wanted else chooser.uniform(0, 10))
        launched.send(target, signum)
        made = launched.num_steps
        if again is not None and "rank" not in target:
            time.sleep(again)
            launched.send(target, signum)
        status = launched.end()
        if status == 0 and wanted:
            yield "torchrun ends as if the run were complete"
            continue
        (begin, found), _ = run_ranks(2, train, str(folder), 0.0)
        yield (
            f"{made} steps were made, and the run goes on after {begin}"
            if begin < made and status
            else first_difference(found, expected, "the run that goes on")
        )


@contextlib.contextmanager
def attached_workers() -> Iterator[None]:
    """DataLoader workers stay in their rank's process group."""
    from patrickstar import SavedRun

    with replaced(SavedRun, "detach_worker", staticmethod(lambda worker=0: None)):
        yield


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """Signals are received and forgotten."""
    from patrickstar import SavedRun

    with replaced(SavedRun, "_receive", lambda self, number, frame: None):
        yield


IN_RANKS = {"attached workers": attached_workers, "deaf": deaf}


def main() -> None:
    """A rank that torchrun started."""
    name = os.environ["PATRICKSTAR_PROOF_BUG"]
    with IN_RANKS[name]() if name else contextlib.nullcontext():
        train(sys.argv[1], STEP_SECONDS)


if __name__ == "__main__":
    main()
