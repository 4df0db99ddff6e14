"""One vocabulary of flags for all commands: names, types, help with defaults, older spellings, errors of one line.

Standard library only: ``patrickstar env`` works where PyTorch does not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from patrickstar.sizes import parse_size_with_unit

OLD_SPELLINGS = {
    "--gpu-mem": "--device-memory",
    "--cpu-mem": "--host-memory",
    "--host-mem": "--host-memory",
    "--batch": "--batch-size",
    "--length": "--seq-len",
    "--clipping": "--clip",
    "--accumulate": "--gradient-accumulation",
    "--accumulation": "--gradient-accumulation",
}
"""What flags were called before, and what they are called now: still accepted, shown nowhere."""

WRONG_USAGE = 2
"""The exit status for an argument or a file that is wrong, as of argparse."""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Says each default, as ``ArgumentDefaultsHelpFormatter`` does, where there is one and the text does not say it."""

    def _format_action(self, action: argparse.Action) -> str:
        default = action.default
        is_shown = not (default is None or default is argparse.SUPPRESS or isinstance(default, (bool, list)))
        if action.option_strings and is_shown and "default" not in (action.help or ""):
            action.help = f"{action.help} (default: %(default)s)" if action.help else "default: %(default)s"
        return super()._format_action(action)


class CommandParser(argparse.ArgumentParser):
    """Accepts :data:`OLD_SPELLINGS` of its flags, shows defaults, and says what is wrong in one line."""

    def __init__(self, prog: str | None = None, description: str | None = None, **options: object):
        options.setdefault("formatter_class", _Formatter)
        super().__init__(prog=prog, description=description, allow_abbrev=False, **options)  # type: ignore[arg-type]

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def,override]
        """As argparse's, of arguments in today's spelling."""
        given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args([self._spelled(word) for word in given], namespace)

    def _spelled(self, word: str) -> str:
        flag, equals, value = word.partition("=")
        today = OLD_SPELLINGS.get(flag)
        known = self._option_string_actions
        return f"{today}{equals}{value}" if today in known and flag not in known else word

    def error(self, message: str) -> NoReturn:
        """Ends the process with one line and status 2."""
        self.exit(WRONG_USAGE, f"{self.prog}: {one_line(message)}\n")


def memory_size(text: str) -> int:
    """The type of a flag that takes an amount of memory: bytes."""
    try:
        return parse_size_with_unit(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def at_least_1(text: str) -> int:
    """The type of a flag that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it is {text!r}; give a whole number of at least 1")
    return int(text)


def at_least_0(text: str) -> int:
    """The type of a flag that counts something of which there may be none."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"it is {text!r}; give a whole number of at least 0")
    return int(text)


def not_negative(text: str) -> float:
    """The type of a flag that takes a number of at least 0."""
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"it is {text!r}; give a number of at least 0")
    return value


def positive(text: str) -> float:
    """The type of a flag that takes a number of more than 0."""
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"it is {text!r}; give a number of more than 0")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def run_reporting(prog: str, run: Callable[[], int]) -> int:
    """The exit status of ``run``; what a user can mend is said in one line, and the status is 2 then."""
    try:
        return run()
    except BrokenPipeError:  # whoever read the output has seen enough
        sys.stderr.close()
        return 1
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        if type(error) in (RuntimeError, NotImplementedError, RecursionError):  # ours are of types of their own
            raise
        print(f"{prog}: {one_line(str(error))}", file=sys.stderr)
        return WRONG_USAGE


def one_line(text: str) -> str:
    """The lines of a message, joined."""
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def words_after(arguments: Sequence[str] | None) -> list[str]:
    """The words of the command line after the program's name; ``arguments`` where they are given."""
    return sys.argv[1:] if arguments is None else list(arguments)
