"""Common flags of all commands: names, types, help with defaults, old spellings, one-line errors.

Standard library only: ``patrickstar env`` works without PyTorch.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

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


class UsageError(ValueError):
    """The user's input cannot be used. Each argument is a mistake: one line that says what to give instead."""


def check_all(*checks: Callable[[], object]) -> None:
    """Makes all checks, though some may fail.

    Raises:
        UsageError: some failed; it has the mistakes of all.
    """
    mistakes: list[object] = []
    for check in checks:
        try:
            check()
        except UsageError as error:
            mistakes += error.args
    if mistakes:
        raise UsageError(*mistakes)


class CommandParser(argparse.ArgumentParser):
    """Accepts :data:`OLD_SPELLINGS`, shows defaults and reports all mistakes at once, a line each."""

    def __init__(self, prog: str | None = None, description: str | None = None, **options: object):
        options.setdefault("formatter_class", _Formatter)
        super().__init__(prog=prog, description=description, allow_abbrev=False, **options)  # type: ignore[arg-type]
        self._mistakes: list[str] = []

    def parse_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def,override]
        """Parses arguments; wrong ones go to :meth:`refuse`, all of them."""
        options, mistakes = self.parse_with_mistakes(args, namespace)
        if mistakes:
            self.refuse(mistakes)
        return options

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def,override]
        """Parses the arguments that this parser knows, after translating old spellings."""
        found = self._parse(args, namespace)
        if self._mistakes:
            self.refuse(self._mistakes)
        return found

    def parse_with_mistakes(
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Returns the options, with defaults for wrong values, and the mistakes. A flag without a value goes to
        :meth:`refuse`.
        """
        options, unknown = self._parse(args, namespace)
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if not flags and unknown:
            self._mistakes.append(f"{' '.join(unknown)!r} belongs to no flag")
        return options, [*self._mistakes, *map(self.unknown_flag, flags)]

    def _parse(self, args: Sequence[str] | None, namespace: Any) -> tuple[argparse.Namespace, list[str]]:
        self._mistakes = []
        given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args([self._spelled(word) for word in given], namespace)

    def named(self, flag: str) -> argparse.Action | None:
        """Returns the action of a flag; None if there is no such flag."""
        return self._option_string_actions.get(flag)

    def unknown_flag(self, flag: str) -> str:
        """Returns the mistake in a flag that does not exist, with the name that is meant."""
        return f"there is no flag {flag}{self.meant(flag)}"

    def meant(self, flag: str) -> str:
        """Returns the question for the nearest flag; empty without one."""
        near = difflib.get_close_matches(flag, self._option_string_actions, n=1)
        return f"; did you mean {near[0]}?" if near else "; --help lists all"

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            value = super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            self._mistakes.append(_without_prefix(str(error)))
            return action.default
        if action.choices is not None and action.option_strings and value not in action.choices:
            choices = ", ".join(map(str, action.choices))
            self._mistakes.append(f"{'/'.join(action.option_strings)}: it is {value!r}; give one of {choices}")
            return action.default
        return value

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if not action.option_strings:  # a flag's choices were checked with its type
            super()._check_value(action, value)

    def _spelled(self, word: str) -> str:
        flag, equals, value = word.partition("=")
        today = OLD_SPELLINGS.get(flag)
        known = self._option_string_actions
        return f"{today}{equals}{value}" if today in known and flag not in known else word

    def error(self, message: str) -> NoReturn:
        """Reports the mistakes so far and ``message``."""
        self.refuse([*self._mistakes, _without_prefix(message)])

    def refuse(self, mistakes: Sequence[str]) -> NoReturn:
        """Exits with a line for each mistake and status 2."""
        self.exit(WRONG_USAGE, "".join(f"{self.prog}: {one_line(mistake)}\n" for mistake in mistakes))


def _without_prefix(message: str) -> str:
    return message.removeprefix("argument ")


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
    """Returns the exit status of ``run``. Errors that a user can resolve are printed in a line each, with status 2."""
    try:
        return run()
    except UsageError as error:
        for mistake in error.args:
            print(f"{prog}: {one_line(str(mistake))}", file=sys.stderr)
        return WRONG_USAGE
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
