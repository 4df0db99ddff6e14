import itertools
import os
import signal
import threading

import pytest
import torch
from torch import nn

from patrickstar import _C
from patrickstar.ranks.chunk_ranks import ChunkRanks
from patrickstar.ranks.distributed import join_ranks, open_ranks
from patrickstar.ranks.exchanges import ThreadExchanges, open_exchanges
from patrickstar.ranks.mesh import Axis, Mesh, MeshRanks, nearest_meshes
from patrickstar.runtime import initialize_engine
from tests.distributed import rank_outcomes, run_ranks
from tests.training import make_config

MESHES = [
    Mesh(),
    Mesh(data=5),
    Mesh(data=2, sequence=3),
    Mesh(sequence=4, columns=2),
    Mesh(data=2, sequence=3, rows=2, columns=2),
    Mesh(data=3, sequence=1, rows=4, columns=5),
]


def axes_in_all_ways():
    return itertools.chain.from_iterable(itertools.combinations(Axis, count) for count in range(len(Axis) + 1))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_rank_has_coordinates_of_its_own(mesh):
    expected = itertools.product(range(mesh.data), range(mesh.sequence), range(mesh.rows), range(mesh.columns))
    for rank, coordinates in enumerate(expected):
        assert mesh.coordinates(rank) == dict(zip(Axis, coordinates, strict=True))
        assert mesh.rank(mesh.coordinates(rank)) == rank
    assert rank == mesh.size - 1


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_who_shares_axes(mesh):
    for axes in axes_in_all_ways():
        division = mesh.division(*axes)
        assert sorted(itertools.chain.from_iterable(division)) == list(range(mesh.size))
        for members in division:
            assert list(members) == sorted(members)
            for rank in members:
                others = [axis for axis in Axis if axis not in axes]
                here = [mesh.coordinates(rank)[axis] for axis in others]
                same = [r for r in range(mesh.size) if [mesh.coordinates(r)[axis] for axis in others] == here]
                assert mesh.sharing(rank, *reversed(axes)) == members == tuple(same)


def test_those_that_talk_most_are_neighbours():
    mesh = Mesh(data=2, sequence=2, rows=2, columns=2)
    assert mesh.sharing(0, Axis.COLUMNS) == (0, 1)
    assert mesh.sharing(0, Axis.ROWS) == (0, 2)
    assert mesh.sharing(0, Axis.ROWS, Axis.COLUMNS) == (0, 1, 2, 3)
    assert mesh.sharing(9, Axis.SEQUENCE) == (9, 13)
    assert mesh.sharing(9, Axis.DATA) == (1, 9)
    assert mesh.sharing(9, Axis.DATA, Axis.SEQUENCE) == (1, 5, 9, 13)  # along which chunks are cut


def test_another_number_of_ranks_is_refused():
    Mesh(data=2, sequence=4).check(8)
    with pytest.raises(ValueError) as error:
        Mesh(data=2, sequence=4).check(12)
    assert str(error.value) == (
        "a mesh of data 2 x sequence 4 has 8 ranks, but the run has 12; take data 3 x sequence 4, or data 2 x sequence "
        "6, or data 4 x sequence 3, or start 8 ranks"
    )
    with pytest.raises(ValueError, match="a mesh of data 2 has 2 ranks, but the run has 3; take data 3, or start 2 "):
        Mesh(data=2).check(3)
    with pytest.raises(ValueError, match="mesh: rows is 0; give at least 1"):
        Mesh(rows=0)


def test_the_nearest_meshes():
    assert nearest_meshes(Mesh(data=2, sequence=8), 8)[0] == Mesh(data=1, sequence=8)
    assert nearest_meshes(Mesh(data=1, sequence=4), 6)[0] == Mesh(data=1, sequence=6)
    assert nearest_meshes(Mesh(data=4, rows=2, columns=2), 8)[0] == Mesh(data=2, rows=2, columns=2)
    for num_ranks in range(1, 20):
        found = nearest_meshes(Mesh(data=2, sequence=2, columns=2), num_ranks)
        assert {mesh.size for mesh in found} == {num_ranks} and {mesh.rows for mesh in found} == {1}
        assert len(set(found)) == len(found)


def sum_along(some):
    exchanges = open_exchanges(some, "a sum")
    others = [rank for rank in range(exchanges.size) if rank != exchanges.rank]
    mine = torch.tensor([some.context.rank])
    theirs = {rank: torch.tensor([-1]) for rank in others}
    exchanges.begin([(rank, mine) for rank in others], list(theirs.items())).wait()
    return [int(theirs.get(rank, mine)) for rank in range(exchanges.size)]


def exchange_along_each_axis():
    with open_ranks(timeout_seconds=60) as world_group:
        ranks = MeshRanks(world_group, Mesh(data=2, sequence=2))
        found = {}
        for axes in (["sequence"], ["data"], ["columns"], ["data", "sequence"], [Axis.SEQUENCE, Axis.DATA]):
            some = ranks.along(*axes)
            assert some.members[some.rank] == world_group.context.rank and some.size == len(some.members)
            assert sum_along(some) == list(some.members)
            found[str(axes[0]), len(axes)] = some.members
        neighbours, across = ranks.along("data", "sequence").divide(2)
        assert (neighbours.members, across.members) == (ranks.along("sequence").members, ranks.along("data").members)
        assert (sum_along(across), sum_along(neighbours)) == (list(across.members), list(neighbours.members))
        with pytest.raises(ValueError, match="4 ranks cannot be divided into groups of 3; give a number that divides"):
            ranks.along("data", "sequence").divide(3)
        with pytest.raises(ValueError, match="no axis 'row'; give data, sequence, rows, columns"):
            ranks.along("row")
        with pytest.raises(ValueError, match="a mesh of data 3 has 3 ranks, but the run has 4; take data 4, or start"):
            MeshRanks(world_group, Mesh(data=3))
        return ranks.coordinates[Axis.DATA], ranks.coordinates[Axis.SEQUENCE], found


def test_exchanges_along_each_axis():
    world_group = (0, 1, 2, 3)
    for rank, (data, sequence, found) in enumerate(run_ranks(4, exchange_along_each_axis)):
        assert (data, sequence) == divmod(rank, 2)
        assert found == {
            ("sequence", 1): (2 * data, 2 * data + 1),
            ("data", 1): (sequence, sequence + 2),
            ("columns", 1): (rank,),
            ("data", 2): world_group,
            ("Axis.SEQUENCE", 2): world_group,
        }


def share_chunks():
    with join_ranks(timeout_seconds=60) as world_group:
        rank = world_group.context.rank
        with world_group.guard("opening"):
            chunks = ChunkRanks.along(MeshRanks(world_group, Mesh(data=2, columns=2)), Axis.DATA, Axis.SEQUENCE)
            assert chunks.control.call == "opening"
        assert (chunks.members, chunks.rank, chunks.size) == ((rank % 2, rank % 2 + 2), rank // 2, 2)
        whole = torch.full((2,), rank)
        chunks.gather.all_gather(whole.data_ptr(), 8)
        assert whole.tolist() == list(chunks.members)
        said = chunks.control.exchange(str(rank).encode(), "a number")
        assert world_group.gather.size == 1  # not open: on GPUs it would take memory that nobody uses
        alone = ChunkRanks.along(MeshRanks(world_group, Mesh(rows=2, columns=2)), Axis.DATA, Axis.SEQUENCE)
        assert (alone.members, alone.control.exchange(b"mine")) == ((rank,), [b"mine"])
        every = ChunkRanks.along(MeshRanks(world_group, Mesh(data=2, sequence=2)), Axis.DATA, Axis.SEQUENCE)
        assert every.gather is world_group.gather and (every.gather.size, every.scatter.rank) == (4, rank)
        with pytest.raises(_C.RankMismatch) as error, world_group.guard(f"call {rank}"):
            chunks.control.exchange(b"", "something")
        return said, str(error.value)


def test_ranks_that_share_chunks():
    for rank, (said, message) in enumerate(run_ranks(4, share_chunks)):
        members = (rank % 2, rank % 2 + 2)
        assert said == [str(member).encode() for member in members]
        for member in members:
            assert f"rank {member} is in call {member}" in message


def lose_one_along_an_axis():
    with open_ranks(timeout_seconds=6) as world_group:
        ranks = MeshRanks(world_group, Mesh(data=2, sequence=2))
        sequence = open_exchanges(ranks.along("sequence"), "the sequence")
        data = open_exchanges(ranks.along("data"), "the data")
        mine, theirs = torch.zeros(2, 100)
        for step in range(100):
            with world_group.guard(f"step {step}"):
                if step == 5 and world_group.context.rank == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                for exchanges in (sequence, data):
                    exchanges.begin([(1 - exchanges.rank, mine)], [(1 - exchanges.rank, theirs)]).wait()


def test_a_rank_that_dies_along_one_axis_ends_all():
    outcomes = rank_outcomes(4, lose_one_along_an_axis, timeout_seconds=90)
    assert outcomes[3].returncode == -signal.SIGKILL
    for outcome in outcomes[:3]:
        print(outcome.error)
        assert outcome.error.startswith("RankFailure: ") and "rank 3 of a group of 2 failed rank" in outcome.error


def train_with_data_alone():
    with open_ranks(timeout_seconds=60) as world_group:
        opened = world_group._connections
        before = len(opened._groups), len(opened._communicators)
        assert MeshRanks(world_group, Mesh(data=2)).along("sequence").size == 1
        return before, (len(opened._groups), len(opened._communicators))


def test_a_mesh_opens_nothing_by_itself():
    assert run_ranks(2, train_with_data_alone) == [((3, 2), (3, 2))] * 2


class Nobody:
    rank, size = 0, 2

    def __init__(self):
        self.calls = []

    def exchange(self, sends, receives):
        self.calls.append((threading.current_thread(), sends, receives))


class Sending(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weight, exchanges):
        ctx.save_for_backward(rows, weight)
        out = rows @ weight.t()
        exchanges.begin([(1, weight)], []).wait()
        return out

    @staticmethod
    def backward(ctx, grad):
        rows, weight = ctx.saved_tensors
        with torch._C.DisableTorchFunctionSubclass():
            return grad @ weight, grad.t() @ rows, None


class SendingLinear(nn.Linear):
    def forward(self, rows):
        return Sending.apply(rows, self.weight, self.exchanges)


def test_parameters_that_are_sent_are_used_by_the_thread_that_sends_them():
    communicator = Nobody()

    def build():
        layer = SendingLinear(32, 32, bias=False)
        layer.exchanges = ThreadExchanges(communicator)
        return nn.Sequential(nn.Linear(32, 32, bias=False), layer, nn.Linear(32, 32, bias=False))

    engine, optimizer = initialize_engine(build, 0, make_config("fp32", default_chunk_size=1024))
    with engine:
        engine.backward(engine(torch.ones(2, 32)).sum())
        optimizer.step()
        accesses = engine._session.runtime.timeline()
    backward = [access["uses"] for access in accesses if access["phase"] == _C.Phase.BACKWARD]
    held = [[chunk for chunk, kind, _ in uses if kind == _C.ArrayKind.PARAM] for uses in backward]
    assert held == [[2], [1], [0]]
    ((thread, (message,), receives),) = communicator.calls
    assert thread is not threading.current_thread()
    assert message[::2] == (1, 32 * 32 * 4) and receives == []
