import pytest
import torch

from patrickstar import StateError
from patrickstar.ranks.emulated import run_emulated
from patrickstar.ranks.exchanges import open_exchanges
from patrickstar.ranks.mesh import Axis, Mesh, MeshRanks


def test_tensors_come_from_the_ranks_that_sent_them():
    mesh = Mesh(sequence=2, columns=3)

    def run(ranks):
        here = MeshRanks(ranks, mesh)
        lines = [open_exchanges(here.along(axis), axis.value) for axis in (Axis.SEQUENCE, Axis.COLUMNS)]
        came = []
        for line in lines:
            mine = torch.full((2,), float(ranks.context.rank))
            others = [rank for rank in range(line.size) if rank != line.rank]
            incoming = {rank: torch.empty(2) for rank in others}
            line.begin([(rank, mine) for rank in others], list(incoming.items())).wait()
            came.append({rank: tensor[1].item() for rank, tensor in incoming.items()})
        return came, ranks.control.exchange(bytes([ranks.context.rank]), "its number")

    for rank, (came, numbers) in enumerate(run_emulated(mesh.size, run)):
        sequence, column = divmod(rank, 3)
        assert came == [
            {1 - sequence: (1 - sequence) * 3.0 + column},
            {other: sequence * 3.0 + other for other in range(3) if other != column},
        ]
        assert numbers == [bytes([other]) for other in range(6)]


def test_what_one_raises_first_ends_all():
    def run(ranks):
        if ranks.context.rank == 1:
            raise KeyError("first")
        ranks.control.exchange(b"", "what rank 1 never sends")

    with pytest.raises(KeyError, match="first"):
        run_emulated(3, run)
    with pytest.raises(StateError, match="the words"):
        run_emulated(2, lambda ranks: ranks.check_agreement("the words", str(ranks.context.rank)))
