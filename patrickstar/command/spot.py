"""``patrickstar spot CLOUD command...``: runs a command, which gets SIGTERM when the cloud takes the machine back."""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

from patrickstar.command.flags import CommandParser
from patrickstar.machine.spot_notices import Cloud, MetadataService

_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_SIGNALLED = 128
"""Added to the number of the signal that ended the command, as by a shell."""


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Returns the parser of the command's options, the cloud and the command that it runs."""
    description = (
        "Runs a command on a spot machine and ends it by SIGTERM when the cloud takes the machine back. SavedRun, a "
        "Trainer and Lightning then save the run. The status is the command's."
    )
    parser = CommandParser(prog, description)
    parser.add_argument("--seconds", type=float, default=5.0, help="between two questions to the cloud (default: 5)")
    parser.add_argument(
        "--metadata", default="", metavar="URL", help="address of the metadata service (default: the cloud's)"
    )
    parser.add_argument("cloud", choices=[cloud.value for cloud in Cloud], help="whose machine this is")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="such as torchrun ... train.py")
    return parser


def main(arguments: Sequence[str] | None = None, prog: str = "python -m patrickstar.command.spot") -> int:
    """Runs the command; returns its status. 2 is for wrong arguments, and for a cloud that does not answer."""
    parser = make_parser(prog)
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error("give a command to run after the cloud")
    if not 0 < options.seconds <= 60:
        parser.error(f"--seconds is {options.seconds:g}; give more than 0 and at most 60")
    service = MetadataService(Cloud(options.cloud), options.metadata)
    try:
        service.takes_back()
    except (OSError, ValueError) as error:
        parser.error(f"no metadata service of {options.cloud} at {service.url} ({error}); is this a machine of it?")
    with _signals_for_one_process() as pass_on_to:
        try:
            process = subprocess.Popen(options.command)
        except OSError as error:
            parser.error(f"{options.command[0]} cannot be run: {error}")
        pass_on_to(process)
        _end_when_told(process, service, options.seconds, prog)
        status = process.wait()
    return status if status >= 0 else _SIGNALLED - status


def _end_when_told(process: subprocess.Popen[bytes], service: MetadataService, seconds: float, prog: str) -> None:
    """Returns when the process has ended, or was told to end."""
    answers = True
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return
        try:
            is_told, answers = service.takes_back(), True
        except (OSError, ValueError) as error:
            if answers:
                print(f"{prog}: {service.url} does not answer ({error}); it is asked again", file=sys.stderr)
            is_told, answers = False, False
        if is_told:
            print(f"{prog}: the cloud takes this machine back; the command gets SIGTERM", file=sys.stderr)
            process.terminate()
            return


@contextlib.contextmanager
def _signals_for_one_process() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Yields a function that names the process, which then gets earlier signals too. A terminal sends it Ctrl-C."""
    processes: list[subprocess.Popen[bytes]] = []
    earlier: list[int] = []

    def receive(number: int, _frame: object) -> None:
        if processes:
            processes[0].send_signal(number)
        else:
            earlier.append(number)

    def pass_on_to(process: subprocess.Popen[bytes]) -> None:
        processes.append(process)
        for number in earlier:
            process.send_signal(number)

    handlers = {number: signal.signal(number, receive) for number in _PASSED_ON}
    handlers[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield pass_on_to
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
