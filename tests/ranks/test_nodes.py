import pickle

from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.nodes import num_nodes, two_nodes
from tests.ranks.on_nodes import RUNS, launch_on_a_node, train_each


def test_sequences_and_meshes_on_two_nodes_have_the_bits_of_one(tmp_path):
    """Two ranks on each node: hybrid sequences divide heads within a node and keys between nodes, rows of matrices and
    columns of one dimension are nodes. The other ranks are told so, on one node.
    """
    with two_nodes() as nodes:
        print(f"{num_nodes(nodes)} nodes")
        run_ranks(2, launch_on_a_node, str(tmp_path), nodes=nodes)
    found = [pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(4)]
    here = run_ranks(4, train_each, environment=lambda rank: {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"})
    for name in RUNS:
        print(name, found[0][name]["losses"])
        for rank in range(4):
            one, other = found[rank][name], here[rank][name]
            assert one["local"] == other["local"] == (str(rank % 2), "2")
            assert (one["losses"], one["norms"]) == (other["losses"], other["norms"]), name
            assert_same_bits(one["state"], other["state"])
    assert {rank["hybrid"]["neighbours"] for rank in (*found, *here)} == {2}
