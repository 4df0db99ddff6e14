import pytest
import torch

from patrickstar.elastic.transfers import FileServer, fetch, own_address
from tests.distributed import free_port, run_ranks
from tests.elastic.runs import train_across_nodes
from tests.elastic.test_resize import ALONE, assert_same
from tests.nodes import two_nodes

KEY = bytes(32)


@pytest.fixture
def served(tmp_path):
    content = bytes(range(256)) * 10_000
    (tmp_path / "shards").write_bytes(content)
    (tmp_path / "empty").touch()
    files = {name: tmp_path / name for name in ("shards", "empty", "missing")}
    server = FileServer("127.0.0.1", KEY, files, timeout_seconds=10)
    yield server, content, tmp_path
    server.close()


def get(server, target, name="shards", key=KEY, **options):
    fetch(server.address, key, name, target, client="3", timeout_seconds=10, **options)
    return target.read_bytes()


def test_pieces_arrive_as_they_are(served):
    server, content, folder = served
    assert get(server, folder / "whole") == content
    assert get(server, folder / "piece", begin=1_000_001, size=1_234_567) == content[1_000_001 : 1_000_001 + 1_234_567]
    assert get(server, folder / "nothing", name="empty") == b""
    server.close()
    assert server.has_given("shards", "3")
    assert not server.has_given("shards", "2")
    with pytest.raises(OSError, match="refused"):
        get(server, folder / "later")


def test_what_is_not_there_is_refused(served):
    server, content, folder = served
    for options, why in (
        ({"name": "passwd"}, "KeyError"),
        ({"name": "missing"}, "No such file"),
        ({"begin": len(content), "size": 1}, f"has {len(content)} bytes"),
        ({"begin": -1}, f"has {len(content)} bytes"),
    ):
        with pytest.raises(OSError, match=f"does not give .*{why}"):
            get(server, folder / "refused", **options)
    with pytest.raises(OSError, match="closed the connection: this process has another secret"):
        get(server, folder / "refused", key=bytes([1] * 32))
    assert not (folder / "refused").exists()
    assert not server.has_given("shards", "3")


def test_the_own_address_is_that_of_the_interface_to_the_other():
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("no such host") != ""


def test_a_process_on_another_node_joins_and_leaves(tmp_path):
    """Each node has a network, a name and a folder of its own; the first serves the rendezvous."""
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    plan = [1, 2, 2, 1]
    with two_nodes() as nodes:
        first, second = run_ranks(
            2,
            train_across_nodes,
            nodes[0].address,
            free_port(),
            plan,
            f"{tmp_path}/{{}}",
            nodes=nodes,
            environment=lambda _: ALONE,
        )
    (state, _), (joined, _) = first["after"][1], second["after"][1]
    assert_same(state, joined)
    assert_same(first["before"][3][0], second["before"][3][0])
    assert_same(first["before"][3][0], first["after"][3][0])
    assert [resized.received_bytes > 0 for resized in (*first["resized"], *second["resized"])] == [
        False,
        True,
        True,
        False,
    ]
    means = [
        torch.tensor([loss for one in (first, second) for loss in one["losses"].get(step, [])]).mean()
        for step in range(4)
    ]
    assert torch.stack(means).isfinite().all()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
