"""Ranks as threads; sources and sinks that hold arbitrary ranges of tensors."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from patrickstar.checkpoint import TensorRange, TensorShard
from tests.bits import assert_same_bits

TIMEOUT_SECONDS = 60


class ThreadPeers:
    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[bytes]):
        self.rank, self.size = rank, size
        self._barrier, self._board = barrier, board

    def exchange(self, message: bytes) -> list[bytes]:
        self._board[self.rank] = message
        self._barrier.wait(TIMEOUT_SECONDS)
        messages = list(self._board)
        self._barrier.wait(TIMEOUT_SECONDS)
        return messages


def on_ranks(size: int, work: Callable[[ThreadPeers], Any]) -> list[Any]:
    barrier, board = threading.Barrier(size), [b""] * size

    def run(rank: int) -> Any:
        try:
            return work(ThreadPeers(rank, size, barrier, board))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@dataclasses.dataclass(frozen=True)
class Held:
    """A tensor of which rank ``i`` holds the elements [edges[i], edges[i + 1])."""

    name: str
    kind: str
    values: torch.Tensor
    edges: Sequence[int]
    order: tuple[int, ...] | None = None

    def range_of(self, rank: int) -> dict[str, Any]:
        begin, end = self.edges[rank], self.edges[rank + 1]
        shape, dtype = tuple(self.values.shape), self.values.dtype
        fields = {"name": self.name, "kind": self.kind, "shape": shape, "dtype": dtype}
        return {**fields, "begin": begin, "end": end, "order": self.order}

    def flat(self) -> torch.Tensor:
        return (self.values if self.order is None else self.values.permute(self.order)).reshape(-1)


class HeldSource:
    def __init__(self, tensors: Sequence[Held], rank: int):
        self._tensors, self._rank = tensors, rank

    def shards(self):
        for held in self._tensors:
            fields = held.range_of(self._rank)
            if fields["begin"] < fields["end"] or (held.values.numel() == 0 and self._rank == 0):
                yield TensorShard(**fields, read=lambda h=held, f=fields: h.flat()[f["begin"] : f["end"]].clone())


class HeldSink:
    def __init__(self, tensors: Sequence[Held], rank: int):
        self._tensors, self._rank = tensors, rank
        self.got: dict[tuple[str, str], torch.Tensor] = {}

    def wanted(self):
        for held in self._tensors:
            yield TensorRange(**held.range_of(self._rank))

    def write(self, wanted, values):
        self.got[(wanted.name, wanted.kind)] = values.clone()

    def check(self):
        expected = {}
        for held in self._tensors:
            fields = held.range_of(self._rank)
            if fields["begin"] < fields["end"] or held.values.numel() == 0:
                expected[(held.name, held.kind)] = held.flat()[fields["begin"] : fields["end"]]
        assert_same_bits(self.got, expected)
