"""Command behaviour: one-line errors, all mistakes at once, Ctrl-C that saves, protected output folders.

No PyTorch is imported here: ``--help`` and refusals need none.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from patrickstar.command.flags import UsageError, one_line

PROGRAM = ("-m", "patrickstar", "finetune")
"""Words that run ``patrickstar finetune``, after ``python``."""

INTERRUPTED = 128 + signal.SIGINT
"""The exit code of a run that Ctrl-C ended."""

PREEMPTED = os.EX_TEMPFAIL
"""The exit code of a run that was saved because of a scheduler's signal: 75, as with ``SavedRun``."""

_SECONDS_BETWEEN_PRESSES = 1.0
"""A signal that follows another one sooner is the same Ctrl-C, seen by a process and forwarded by its launcher."""


def set_environment() -> None:
    """Sets variables that PyTorch and transformers read when they are imported; a user's own values stay."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # lets cuBLAS be deterministic
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # on shared cores, spinning threads are ten times slower


class StoppedError(Exception):
    """The user or a scheduler ended the run. ``checkpoint`` is the folder for ``--resume``, or None."""

    def __init__(self, step: int, checkpoint: Path | None, *, by_user: bool):
        super().__init__(f"ended after step {step}")
        self.step = step
        self.checkpoint = checkpoint
        self.exit_code = INTERRUPTED if by_user or checkpoint is None else PREEMPTED


class StopRequest:
    """The user's request to end a training run: Ctrl-C, or a scheduler's SIGTERM or SIGUSR1.

    The current step is finished first. The second Ctrl-C raises KeyboardInterrupt, at a time at which the engine stays
    consistent (patrickstar/session/interrupts.py). A scheduler's signals are one request, however many come.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._made_at = 0.0

    @property
    def is_made(self) -> bool:
        """True after a signal."""
        return self._first is not None

    @property
    def is_by_user(self) -> bool:
        """True after Ctrl-C."""
        return self._first == signal.SIGINT

    def receive(self, signum: int, frame: FrameType | None) -> None:
        """The signals' handler."""
        now = time.monotonic()
        if self._first is None:
            self._first, self._made_at = signum, now
            again = "; once more to end at once" if signum == signal.SIGINT else ""
            print(f"\nfinishing this step{again}", file=sys.stderr, flush=True)
        elif signal.SIGINT in (self._first, signum) and now - self._made_at > _SECONDS_BETWEEN_PRESSES:
            raise KeyboardInterrupt  # torchrun forwards the second Ctrl-C as SIGTERM


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Context in which Ctrl-C, SIGTERM and SIGUSR1 are requests to end; restores the former handlers."""
    request = StopRequest()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {signum: signal.signal(signum, request.receive) for signum in signals}
    try:
        yield request
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def python_command(*words: object) -> str:
    """A command line for the running Python, including PYTHONPATH."""
    path = os.environ.get("PYTHONPATH")
    prefix = f"PYTHONPATH={shlex.quote(path)} " if path else ""
    return prefix + shlex.join([sys.executable, *map(str, words)])


def resuming_command(program: Sequence[str], argv: Sequence[str]) -> str:
    """The command line that resumes the run of ``program`` that ``argv`` began."""
    flags = [word for word in argv if word != "--overwrite"]
    if not any(word.partition("=")[0] == "--resume" for word in flags):
        flags.append("--resume")
    size = os.environ.get("LOCAL_WORLD_SIZE")
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={size}"] if size else []
    return python_command(*launcher, *program, *flags)


def shown_path(path: str | Path) -> str:
    """``path`` relative to the current folder if it is inside."""
    path, here = Path(path).resolve(), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def run_command(body: Callable[[], int], program: Sequence[str], argv: Sequence[str], prog: str | None = None) -> int:
    """Runs a command, whose errors that a user can cause are one line each, on rank 0.

    Args:
        body: the command; returns its exit code.
        program: words that run it, after ``python``.
        argv: its arguments.
        prog: its name in errors; None: the script's.

    Returns:
        The exit code: ``body``'s, 2 for wrong input, 1 if the model or a checkpoint does not fit, 130 after Ctrl-C,
        75 if a scheduler's signal came and the run is saved.
    """
    prog = prog or Path(program[0]).name
    try:
        return body()
    except UsageError as error:
        return refuse(prog, error, 2)
    except StoppedError as stop:
        if _is_first_rank():
            print(f"ended after step {stop.step}", end="")
            if stop.checkpoint is None:
                print("; nothing was saved", flush=True)
            else:
                print(f"; saved to {stop.checkpoint}; go on with\n  {resuming_command(program, argv)}", flush=True)
        return stop.exit_code
    except KeyboardInterrupt:
        return refuse(prog, "ended by Ctrl-C; nothing was saved", INTERRUPTED)
    except ImportError as error:
        return refuse(prog, f"{error}; patrickstar env says what is missing and what mends it", 2)
    except Exception as error:
        from patrickstar import _C
        from patrickstar.checkpoint import CheckpointError

        if isinstance(error, (_C.MemoryBudgetError, CheckpointError)):
            return refuse(prog, error, 1)
        raise


def refuse(prog: str, error: object, exit_code: int) -> int:
    """Prints an error that all ranks have, in a line for each mistake, on rank 0; returns ``exit_code``."""
    if _is_first_rank():
        for mistake in error.args if isinstance(error, UsageError) else (error,):
            print(f"{prog}: {one_line(str(mistake))}", file=sys.stderr, flush=True)
    return exit_code


def _is_first_rank() -> bool:
    return int(os.environ.get("RANK") or 0) == 0


def check_output(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Checks that ``folder`` may have a run's output.

    Raises:
        UsageError: it is no folder, or it is not empty and neither flag was given.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output-dir {folder} is no folder; give another one")
    if not (resume or overwrite) and folder.is_dir() and any(folder.iterdir()):
        raise UsageError(
            f"--output-dir {folder} exists and is not empty; give --resume to go on with its run, --overwrite to "
            "replace it, or another folder"
        )


def prepare_output(folder: Path, written: Sequence[Path], *, overwrite: bool) -> None:
    """Makes ``folder`` for a run's output, before anything is loaded; ``overwrite`` removes what is in ``written``.

    Raises:
        UsageError: it cannot be written.
    """
    make_writable("--output-dir", folder)
    if overwrite and _is_first_rank():
        for path in written:
            if path.exists():
                shutil.rmtree(path)


def make_writable(flag: str, folder: Path) -> None:
    """Makes ``folder``, which ``flag`` names, if necessary.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(f"{flag} {folder} cannot be written ({error.strerror}); give another folder") from error
