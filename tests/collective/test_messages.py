import contextlib
import io
import itertools
import json
import random
import resource
import tracemalloc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from patrickstar import _C
from patrickstar.checkpoint.peers import phase
from patrickstar.checkpoint.plain_state import write_plain_state
from patrickstar.deepspeed.gathered_parameters import _Gathered, _of_rank
from patrickstar.machine.budgets import Budgets
from patrickstar.module.first_rank_values import FirstRankValues, digest, share_rest
from patrickstar.ranks.chunk_ranks import ChunkRanks
from patrickstar.ranks.context import DistributedContext
from patrickstar.ranks.distributed import RankGroups
from patrickstar.session import rank_sync

FLIPS = 400  # per message, at most
SLACK_BYTES = 16 * 2**20


def damaged(message, others=()):
    """Yields (damage, message) forever; ``others`` are messages of other kinds."""
    choose = random.Random(len(message))
    cuts = range(len(message)) if len(message) <= FLIPS else sorted(choose.sample(range(len(message)), FLIPS))
    for length in cuts:
        yield f"cut to {length}", message[:length]
    for count in (1, 4, 8, 24, 1000):
        yield f"{count} zeros more", message + bytes(count)
        yield f"{count} bytes more", message + choose.randbytes(count)
    yield "twice", message * 2
    bits = range(8 * len(message))
    for bit in bits if len(bits) <= 8 * FLIPS else sorted(choose.sample(bits, FLIPS)):
        flipped = bytearray(message)
        flipped[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit}", bytes(flipped)
    for length in (1, 8, 24, 100, 1000):
        yield f"{length} random bytes", choose.randbytes(length)
    for other in others:
        yield "another kind", other


@contextlib.contextmanager
def little_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < SLACK_BYTES
    finally:
        tracemalloc.stop()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < SLACK_BYTES // 1024


@pytest.mark.parametrize("num_chunks", [1, 5, 40])
def test_messages_of_a_step(num_chunks):
    messages = _C.example_messages(num_chunks)
    refused = dict.fromkeys(messages, 0)
    with little_memory():
        for kind, message in messages.items():
            _C.read_message(kind, message, num_chunks)
            for what, bad in damaged(message, [other for name, other in messages.items() if name != kind]):
                try:
                    _C.read_message(kind, bad, num_chunks)
                    assert what.startswith("bit"), (kind, what)  # a value may differ
                except _C.StateError as error:
                    assert "another rank's message of" in str(error)
                    refused[kind] += 1
    assert all(refused.values())
    for other in (num_chunks - 1, num_chunks + 1):
        with pytest.raises(_C.StateError, match="another number of values"):
            _C.read_message("vote", messages["vote"], other)


class SilentError(Exception):
    pass


class Replies:
    """A control group of two whose messages from rank 0 are written by hand."""

    rank, size, call = 1, 2, ""

    def __init__(self):
        self.replies = []

    def enter(self, call):
        pass

    def exchange(self, mine, what=""):
        if not self.replies:
            raise SilentError
        return [self.replies.pop(0), mine]

    def distribute(self, to_each, what=""):
        return self.exchange(to_each[1])


def two_ranks():
    ranks = RankGroups(DistributedContext(rank=1, world_size=2, local_rank=1, local_world_size=2), (0, 1), 1.0)
    ranks.control = Replies()
    return ranks


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.arange(6, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(3))


def read_buffers(ranks):
    rank_sync.BufferSync(ranks, Model()).run(_C.Tracking.TRAINING)


def read_rest(ranks):
    share_rest(ranks, Model(), SimpleNamespace(managed=[]))


def read_gradients(ranks):
    rank_sync.combine_over_ranks(ChunkRanks.all_of(ranks), [nn.Parameter(torch.ones(3))], 2)


def read_random_numbers(ranks):
    with rank_sync.common_random_numbers(ranks):
        pass


def read_turns(ranks):
    with rank_sync.take_turns(ranks, SimpleNamespace(release_after_init=False)) as turn:
        turn._num_after = 0


def read_budgets(ranks):
    rank_sync.common_budgets(ranks, Budgets(device_bytes=10, host_bytes=20))


def read_phase(ranks):
    with phase(ranks.control, "it failed"):
        pass


def read_changes(ranks):
    item = _Gathered.__new__(_Gathered)  # without an engine
    item._values, item._handle = torch.zeros(3), SimpleNamespace(name="weight")
    _of_rank(SimpleNamespace(ranks=ranks, guard=lambda _: contextlib.nullcontext()), [item], [None], 0)


class FewParams:
    specs = [  # noqa: RUF012
        SimpleNamespace(
            name=name, param=torch.arange(6.0), shape=torch.Size([6]), quantization=_C.QuantType.NONE, part=None
        )
        for name in "ab"
    ]
    layout = SimpleNamespace(placement=lambda index: (0, 6 * index), chunk=lambda _: {"shard_numel": 6})
    runtime = SimpleNamespace(write_values=lambda *_: None)

    def batches(self):
        yield [0, 1]

    def source(self, index):
        return self.specs[index].param

    def take(self, ids):
        pass


def read_values(ranks):
    FirstRankValues(ChunkRanks.all_of(ranks), FewParams()).share()


def changes():
    message = io.BytesIO()
    write_plain_state(message, [(torch.tensor([True, False, True]), torch.tensor([1.0, 2.0]))], "changes")
    return message.getvalue()


OWN, OTHER = digest(torch.arange(6.0)), digest(torch.zeros(6))
NONE = digest(torch.zeros(0))
MEAN, COUNT = digest(torch.arange(6, dtype=torch.bfloat16)), digest(torch.tensor([3]))
NEXT = json.dumps([[0, OWN, NONE], [1, NONE, OTHER]]).encode()
REPLIES = {
    read_buffers: [rank_sync._BUFFER_HEAD.pack(0, 12) + bytes(12) + rank_sync._BUFFER_HEAD.pack(1, 8) + bytes(8)],
    read_rest: [json.dumps([OTHER, COUNT]).encode(), bytes(12)],
    read_gradients: [bytes(12)],
    read_random_numbers: [b"17", torch.get_rng_state().numpy().tobytes()],
    read_turns: [b"2"],
    read_budgets: [b"10 20"],
    read_phase: [b'{"say": null}'],
    read_changes: [changes()],
    read_values: [NEXT, b"[]", bytes(24), b"[]"],
}
ONLY_VALUES = {read_gradients, read_rest}
"""Every byte of these messages counts."""


@pytest.mark.parametrize("read", REPLIES, ids=lambda read: read.__name__)
def test_messages_that_python_reads(read, monkeypatch):
    def run(replies):
        ranks = two_ranks()
        ranks.control.replies = list(replies)
        monkeypatch.setattr(RankGroups, "check_agreement", lambda *_: None)
        read(ranks)

    replies = REPLIES[read]
    run(replies)
    others = set(itertools.chain(*REPLIES.values()))
    refused = False
    with little_memory():
        for index, reply in enumerate(replies):
            for what, bad in damaged(reply, others - {reply}):
                try:
                    run([*replies[:index], bad, *replies[index + 1 :]])
                    assert read not in ONLY_VALUES or len(bad) in (0, len(reply)), what
                except SilentError:
                    pass
                except _C.StateError as error:
                    assert "rank" in str(error)
                    refused = True
    assert refused
