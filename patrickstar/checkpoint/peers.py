"""How the ranks that save or load one checkpoint agree: the only communication that checkpoints need."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Protocol

from patrickstar.checkpoint.errors import CheckpointError


class Peers(Protocol):
    """The ranks of one model. All make the same calls in the same order, from one thread each."""

    @property
    def rank(self) -> int:
        """This rank's index."""

    @property
    def size(self) -> int:
        """How many there are."""

    def exchange(self, message: bytes) -> list[bytes]:
        """Gives every rank all ranks' messages, by rank. Raises when one of them is gone."""


class OneRank:
    """A rank alone."""

    rank = 0
    size = 1

    def exchange(self, message: bytes) -> list[bytes]:
        """Its own message."""
        return [message]


@dataclasses.dataclass
class Turn:
    """What this rank says at the end of a phase, and what all ranks said."""

    say: Any = None
    """Of JSON's types."""
    heard: list[Any] = dataclasses.field(default_factory=list)
    """By rank; filled when the phase is over on all ranks."""


@contextlib.contextmanager
def phase(peers: Peers, what: str) -> Iterator[Turn]:
    """A piece of work that succeeds on all ranks or on none: a rank that fails says so to the others.

    Raises:
        CheckpointError: on every rank, when one fails; it names the rank and its error.
    """
    turn = Turn()
    failure: Exception | None = None
    try:
        yield turn
    except Exception as error:
        failure = error
    said = {"error": _describe(failure)} if failure is not None else {"say": turn.say}
    replies = [json.loads(message) for message in peers.exchange(json.dumps(said).encode())]
    errors = {rank: reply["error"] for rank, reply in enumerate(replies) if "error" in reply}
    if errors:
        who = "; ".join(f"rank {rank}: {error}" for rank, error in errors.items()) if peers.size > 1 else errors[0]
        raise CheckpointError(f"{what}: {who}") from failure
    turn.heard = [reply["say"] for reply in replies]


def _describe(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename is not None else ""
        return f"{error.strerror}{where}"
    return f"{type(error).__name__}: {error}"
