"""Agreement of the ranks that save or load one checkpoint; checkpoints need no other communication."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from patrickstar import _C
from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.memory import bytes_of, tensor_of
from patrickstar.ranks.failures import is_interrupt
from patrickstar.ranks.messages import reading


class Peers(Protocol):
    """The ranks of one model. All must make the same calls in the same order, from one thread each."""

    @property
    def rank(self) -> int:
        """This rank's index, from 0 to :attr:`size` - 1."""

    @property
    def size(self) -> int:
        """Number of ranks that save or load together."""

    def exchange(self, message: bytes) -> list[bytes]:
        """All-gathers messages, by rank. Raises if a rank is gone."""


class OneRank:
    """The only rank of a model."""

    rank = 0
    size = 1

    def exchange(self, message: bytes) -> list[bytes]:
        """A list of ``message`` alone."""
        return [message]


class GroupPeers:
    """The ranks of a ``torch.distributed`` group, with its timeout."""

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | None = None):
        """``group``: None for the default one. ``device``: device of the messages (for NCCL the rank's GPU)."""
        self._group = group
        self._device = device or torch.device("cpu")
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def exchange(self, message: bytes) -> list[bytes]:
        """All-gathers messages, which may differ in length, by rank. All ranks must call it."""
        with _C.HostAllocations():
            length = torch.tensor([len(message)], device=self._device)
            lengths = [int(other) for other in self._gather(length)]
            padded = torch.zeros(max(1, *lengths), dtype=torch.uint8, device=self._device)
            padded[: len(message)] = tensor_of(memoryview(bytearray(message)), torch.uint8).to(self._device)
            gathered = [other.cpu() for other in self._gather(padded)]
        return [bytes(bytes_of(other[:size])) for other, size in zip(gathered, lengths, strict=True)]

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor, group=self._group)
        return gathered


@dataclasses.dataclass
class Turn:
    """The messages at the end of a phase."""

    say: Any = None
    """This rank's message to all ranks, in JSON's types."""
    heard: list[Any] = dataclasses.field(default_factory=list)
    """All ranks' messages, by rank; filled when the phase is over on all ranks."""


@contextlib.contextmanager
def phase(peers: Peers, what: str) -> Iterator[Turn]:
    """Context for work that succeeds on all ranks or on none: a failing rank reports its error to the others.

    Raises:
        CheckpointError: on every rank, if one fails; it names the rank and its error. An interrupted rank
            (``is_interrupt``) raises the interrupt itself.
    """
    turn = Turn()
    failure: BaseException | None = None
    try:
        yield turn
    except GeneratorExit:
        raise
    except BaseException as error:
        failure = error
    said = {"error": _describe(failure)} if failure is not None else {"say": turn.say}
    try:
        messages = peers.exchange(json.dumps(said).encode())
    except Exception as error:
        if failure is not None and is_interrupt(failure):
            raise failure from error
        raise
    if failure is not None and is_interrupt(failure):
        failure.on_all_ranks = peers.size > 1  # type: ignore[attr-defined]
        raise failure
    with reading(f"how it went ({what})"):
        replies = [_reply(message) for message in messages]
    errors = {rank: reply["error"] for rank, reply in enumerate(replies) if "error" in reply}
    if errors:
        who = "; ".join(f"rank {rank}: {error}" for rank, error in errors.items()) if peers.size > 1 else errors[0]
        error = CheckpointError(f"{what}: {who}")
        error.on_all_ranks = True
        raise error from failure
    turn.heard = [reply["say"] for reply in replies]


def _reply(message: bytes) -> dict[str, Any]:
    reply = json.loads(message)
    if not isinstance(reply, dict) or not (reply.keys() == {"say"} or isinstance(reply.get("error"), str)):
        raise ValueError(f"{message[:100]!r}")
    return reply


def _describe(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename is not None else ""
        return f"{error.strerror}{where}"
    return f"{type(error).__name__}: {error}"
