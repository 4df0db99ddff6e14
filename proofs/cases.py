"""The parts of a proof: cases, whose points are tried one after the other, and planted bugs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

Points = Iterator["str | None"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """Arguments of a case."""

    folder: Path
    """An empty folder of its own."""
    seed: int
    note: Callable[[str], None]
    """Names the point that is tried: the message of a process that is ended by it says so."""
    tried: Callable[[int], None]
    """Counts further points that hold, of several that were tried together."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Points of one kind, tried in a process of their own.

    ``points`` yields after each point: None if the promise holds, else one line about what does not. An exception
    counts as such a line and ends the case. The generator may go on for ever: the runner stops it.
    """

    name: str
    points: Callable[[Setting], Points]
    least_points: int = 1
    """With fewer points nothing is shown, and the case does not hold."""


@dataclasses.dataclass(frozen=True)
class Planted:
    """A bug that a case must find."""

    name: str
    case: str
    bug: Callable[[], contextlib.AbstractContextManager[object]]
    """Plants the bug as long as the context lasts."""


@dataclasses.dataclass(frozen=True)
class Proof:
    """One ``make prove-...``."""

    name: str
    claim: str
    """One sentence for docs/reliability.md."""
    points: str
    """The kind of points, in the plural: "calls that fail"."""
    cases: Sequence[Case]
    planted: Sequence[Planted]
    environment: Callable[[], Mapping[str, str]] = dict
    """Prepares what the process needs, and returns variables for it."""
    quiet_seconds: float = 120
    """A point that takes longer counts as a hang."""

    def case(self, name: str) -> Case:
        """The case of this name."""
        return next(case for case in self.cases if case.name == name)


_in_ranks: list[str] = []


@contextlib.contextmanager
def in_ranks(bug: str) -> Iterator[None]:
    """Names a bug that other processes plant: a case passes :func:`bug_in_ranks` to them."""
    _in_ranks.append(bug)
    try:
        yield
    finally:
        _in_ranks.pop()


def bug_in_ranks() -> str:
    """The bug that a case's other processes plant, or an empty text."""
    return _in_ranks[-1] if _in_ranks else ""


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Sets an attribute as long as the context lasts."""
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if before is not None else delattr(owner, name)
