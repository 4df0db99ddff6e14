"""Common flags of all commands: names, types, help with defaults, old spellings, one-line errors.

Standard library only: ``patrickstar env`` works without PyTorch.
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
"""Old flag names -> new ones. Old names are accepted and shown nowhere."""

WRONG_USAGE = 2
"""Exit status of a wrong argument or file, as in argparse."""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Adds each default to its help text unless the text names it."""

    def _format_action(self, action: argparse.Action) -> str:
        default = action.default
        is_shown = not (default is None or default is argparse.SUPPRESS or isinstance(default, (bool, list)))
        if action.option_strings and is_shown and "default" not in (action.help or ""):
            action.help = f"{action.help} (default: %(default)s)" if action.help else "default: %(default)s"
        return super()._format_action(action)


class CommandParser(argparse.ArgumentParser):
    """Accepts :data:`OLD_SPELLINGS`, shows defaults and reports errors in one line."""

    def __init__(self, prog: str | None = None, description: str | None = None, **options: object):
        options.setdefault("formatter_class", _Formatter)
        super().__init__(prog=prog, description=description, allow_abbrev=False, **options)  # type: ignore[arg-type]

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def,override]
        """Parses arguments after translating old spellings."""
        given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args([self._spelled(word) for word in given], namespace)

    def _spelled(self, word: str) -> str:
        flag, equals, value = word.partition("=")
        today = OLD_SPELLINGS.get(flag)
        known = self._option_string_actions
        return f"{today}{equals}{value}" if today in known and flag not in known else word

    def error(self, message: str) -> NoReturn:
        """Exits with one line and status 2."""
        self.exit(WRONG_USAGE, f"{self.prog}: {one_line(message)}\n")


def memory_size(text: str) -> int:
    """Flag type: an amount of memory, in bytes."""
    try:
        return parse_size_with_unit(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def at_least_1(text: str) -> int:
    """Flag type: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it is {text!r}; give a whole number of at least 1")
    return int(text)


def at_least_0(text: str) -> int:
    """Flag type: a whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"it is {text!r}; give a whole number of at least 0")
    return int(text)


def not_negative(text: str) -> float:
    """Flag type: a finite number of at least 0."""
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"it is {text!r}; give a number of at least 0")
    return value


def positive(text: str) -> float:
    """Flag type: a finite number above 0."""
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
    """Returns the exit status of ``run``. Errors that a user can resolve are printed in one line, with status 2."""
    try:
        return run()
    except BrokenPipeError:  # the reader closed the pipe
        sys.stderr.close()
        return 1
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        if type(error) in (RuntimeError, NotImplementedError, RecursionError):  # PatrickStar's errors are subclasses
            raise
        print(f"{prog}: {one_line(str(error))}", file=sys.stderr)
        return WRONG_USAGE


def one_line(text: str) -> str:
    """Joins the lines of a message."""
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def words_after(arguments: Sequence[str] | None) -> list[str]:
    """Returns ``arguments``, or the command line after the program's name."""
    return sys.argv[1:] if arguments is None else list(arguments)
