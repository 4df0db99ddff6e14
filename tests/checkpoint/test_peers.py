import json
import subprocess
import sys

import pytest
import torch

from patrickstar.checkpoint import CheckpointError, OneRank
from patrickstar.checkpoint.peers import phase
from tests.checkpoint.ranks import Held, on_ranks
from tests.checkpoint.test_shards import check_load_on

EDGES = {1: (0, 100), 2: (0, 33, 100)}


def tensors(size):
    return [Held(name, "master", torch.arange(100.0) * (1 + index), EDGES[size]) for index, name in enumerate("ab")]


_SCRIPT = """
import datetime, json, sys
import torch.distributed as dist
from patrickstar.checkpoint import CheckpointError, GroupPeers, SaveOptions, save
from tests.checkpoint.ranks import HeldSource
from tests.checkpoint.test_peers import tensors

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
)
peers = GroupPeers()
sizes = [len(message) for message in peers.exchange(b"x" * (rank * 1000))]
save(f"{folder}/saved", "t", HeldSource(tensors(2), rank), {}, SaveOptions(peers=peers))
source = HeldSource(tensors(2) if rank == 0 else [], rank)  # rank 1 lost its part
try:
    save(f"{folder}/saved", "u", source, {}, SaveOptions(peers=peers))
    error = None
except CheckpointError as refused:
    error = str(refused)
print(json.dumps([sizes, error]))
dist.destroy_process_group()
"""


def test_two_processes(tmp_path):
    children = [
        subprocess.Popen([sys.executable, "-c", _SCRIPT, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    results = [child.communicate(timeout=300)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    for result in results:
        sizes, error = json.loads(result.splitlines()[-1])
        assert sizes == [0, 1000]
        assert "master of a: 33 of its 100 elements" in error
    check_load_on(1, tmp_path / "saved", tensors(1))
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["latest", "t"]


def test_a_phase_hears_all_ranks_or_fails_on_all():
    def speak(peers):
        with phase(peers, "it failed") as turn:
            turn.say = {"rank": peers.rank}
        return turn.heard

    assert on_ranks(3, speak) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3

    def stumble(peers):
        with phase(peers, "it failed"):
            if peers.rank > 0:
                raise OSError(28, "No space left on device", f"file{peers.rank}")

    for error in on_ranks(3, stumble):
        assert isinstance(error, CheckpointError)
        assert str(error) == (
            "it failed: rank 1: No space left on device (file1); rank 2: No space left on device (file2)"
        )
    with pytest.raises(CheckpointError, match="^it failed: ValueError: no$"), phase(OneRank(), "it failed"):
        raise ValueError("no")


class Preempted(Exception):  # noqa: N818 (it is no error)
    pass


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, Preempted])
def test_an_interrupt_comes_out_as_it_is_and_the_others_are_told(interrupt):
    def work(peers):
        try:
            with phase(peers, "it failed"):
                if peers.rank == 1:
                    error = interrupt()
                    error.raised_by_signal = True  # as where it is delivered (engine/interrupts.py)
                    raise error
        except BaseException as raised:
            return raised

    first, second = on_ranks(2, work)
    assert isinstance(first, CheckpointError) and f"rank 1: {interrupt.__name__}" in str(first)
    assert type(second) is interrupt
    assert first.on_all_ranks and second.on_all_ranks


class Gone(OneRank):
    def exchange(self, message):
        raise RuntimeError("the others are gone")


def test_an_interrupt_comes_out_as_it_is_where_nobody_can_be_told():
    with pytest.raises(KeyboardInterrupt), phase(Gone(), "it failed"):
        raise KeyboardInterrupt
    with pytest.raises(RuntimeError, match="the others are gone"), phase(Gone(), "it failed"):
        raise ValueError("no")
