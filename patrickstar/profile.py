"""``patrickstar profile script.py args…``: runs a training script and profiles one step of its engine.

It writes a trace for chrome://tracing and https://ui.perfetto.dev, a picture of device memory (with matplotlib), and a
summary, which it also prints. The script is unchanged; the request is the environment variable
``PATRICKSTAR_PROFILE=<step>,<folder>``, the default of ``config["profile"]``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from patrickstar.command.flags import CommandParser, at_least_1
from patrickstar.command.script import run_script
from patrickstar.config import PROFILE_VARIABLE, ProfileConfig


def make_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of this command's options, script and script arguments."""
    defaults = ProfileConfig()
    description = "Runs a training script and profiles one step of its engine: a trace, a picture and a summary."
    parser = CommandParser(prog, description)
    parser.add_argument("--step", type=at_least_1, default=defaults.step, help="which step, from 1")
    parser.add_argument("--output", default=defaults.output, metavar="FOLDER", help="where the files go")
    parser.add_argument("script", help="a Python script that calls initialize_engine")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def main(arguments: Sequence[str] | None = None, prog: str = "python -m patrickstar.profile") -> int:
    """Runs the script; returns its exit status, 1 if no step was profiled, 2 if an argument is wrong."""
    parser = make_parser(prog)
    options = parser.parse_args(arguments)
    script = Path(options.script)
    if not script.is_file():
        parser.error(f"there is no script {script}")
    folder = Path(options.output).resolve()  # the script may change its directory
    began = time.time_ns()
    with _requested(f"{options.step},{folder}"):
        status = run_script(script, options.args)
    written = [file for file in folder.glob("step*.txt") if file.stat().st_mtime_ns >= began - 10**7]
    summaries = [file for file in written if not file.stem.endswith(".program")]
    for file in summaries:
        print(file.read_text(encoding="utf-8"), end="")
        program = file.with_suffix(".program.txt")
        if program in written:
            print("  program      " + program.read_text(encoding="utf-8").splitlines()[0])
        print("  files        " + ", ".join(map(str, sorted(folder.glob(f"{file.stem}.*")))))
    if not summaries:
        print(f"no step was profiled: the script ran no engine for {options.step} steps", file=sys.stderr)
    return status or (0 if summaries else 1)


@contextlib.contextmanager
def _requested(request: str) -> Iterator[None]:
    """Context in which engines of this process and its children profile the requested step."""
    before = os.environ.get(PROFILE_VARIABLE)
    os.environ[PROFILE_VARIABLE] = request
    try:
        yield
    finally:
        if before is None:
            del os.environ[PROFILE_VARIABLE]
        else:
            os.environ[PROFILE_VARIABLE] = before


if __name__ == "__main__":
    sys.exit(main())
