import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from patrickstar import _C
from patrickstar.ranks import connections, distributed
from patrickstar.ranks.context import DistributedContext, host_name, make_context
from patrickstar.ranks.distributed import open_ranks
from patrickstar.ranks.passing import PassingPlace, connect_ahead, exchange
from patrickstar.ranks.run_secret import write_secret
from patrickstar.ranks.world_store import serve_world
from tests.distributed import ROOT, free_port, run_ranks, server_environment, start_of
from tests.gpu.test_resize import on_gpus
from tests.nodes import num_nodes, two_nodes

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def no_ranks(monkeypatch):
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("world_size", [None, "1"])
def test_alone(no_ranks, monkeypatch, world_size):
    if world_size:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    with open_ranks() as ranks:
        assert ranks.context == DistributedContext()
        assert not dist.is_initialized()
        assert ranks.control.exchange(b"mine") == [b"mine"]
        whole = torch.arange(6.0)
        shard, scratch = torch.empty(6), torch.empty(6)
        ranks.gather.all_gather(whole.data_ptr(), 24)
        ranks.scatter.reduce_scatter_mean(whole.data_ptr(), shard.data_ptr(), scratch.data_ptr(), 6, _C.DType.FLOAT32)
        assert torch.equal(whole, torch.arange(6.0)) and torch.equal(shard, whole)
        ranks.check_agreement("anything", "is agreed on")
        with pytest.raises(ZeroDivisionError), ranks.guard("a phase"):
            raise ZeroDivisionError


def test_the_device_is_that_of_the_local_rank(no_ranks, monkeypatch):
    assert open_ranks(device_type="cuda").context.device == torch.device("cuda", 0)
    assert open_ranks(device_type="cuda", local_rank=2).context.device == torch.device("cuda", 2)
    assert open_ranks(device_type="cuda", local_rank=2, device_index=0).context.device == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    context = open_ranks(device_type="cuda").context
    assert (context.local_rank, context.device) == (3, torch.device("cuda", 3))


def test_an_incomplete_environment_is_refused(no_ranks, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(_C.StateError, match="WORLD_SIZE is 2, but MASTER_ADDR, MASTER_PORT not set; start .* torchrun"):
        open_ranks()
    with pytest.raises(ValueError, match="timeout_seconds is 0"):
        open_ranks(timeout_seconds=0)


def context_by_environment(local_rank):
    with open_ranks(timeout_seconds=60, local_rank=local_rank) as ranks:
        assert dist.is_initialized()
        context = ranks.context
    assert not dist.is_initialized()
    return context


def test_the_environment_of_torchrun():
    for rank, context in enumerate(run_ranks(2, context_by_environment, None)):
        assert context == DistributedContext(rank=rank, world_size=2, local_rank=rank, local_world_size=2)


def test_local_ranks_are_found_out_where_the_environment_has_none():
    unset = {"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}
    contexts = run_ranks(2, context_by_environment, None, environment=lambda rank: unset)
    assert [(context.local_rank, context.local_world_size) for context in contexts] == [(0, 2), (1, 2)]
    contexts = run_ranks(2, context_by_environment, 5, environment=lambda rank: unset)
    assert [(context.local_rank, context.local_world_size) for context in contexts] == [(5, 2), (5, 2)]


def test_local_ranks_of_some_ranks_are_counted_among_them(no_ranks):
    nodes = {2: host_name(), 3: "another node", 5: host_name()}
    context = make_context(5, 6, lambda: nodes, local_rank=None, device_type="cpu", device_index=None)
    assert (context.local_rank, context.local_world_size) == (1, 2)


def where_the_store_listens():
    """The class of the world's store and the addresses (hexadecimal, as in /proc) at which its port listens."""
    with open_ranks(timeout_seconds=60) as ranks:
        ranks.check_agreement("anything", "is agreed on")
        store = dist.distributed_c10d._get_default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        end = f":{int(os.environ['MASTER_PORT']):04X}"
        tables = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
        lines = [line.split() for line in tables.splitlines()]
        found = {line[1].removesuffix(end) for line in lines if line[1].endswith(end) and line[3] == "0A"}
        return type(store).__name__, found


def test_the_store_of_a_world_listens_where_it_was_told(tmp_path):
    assert run_ranks(2, where_the_store_listens) == [("TCPStore", {"0100007F"})] * 2
    write_secret(tmp_path / "secret")
    secret = {"PATRICKSTAR_ELASTIC_SECRET": str(tmp_path / "secret")}
    first, second = run_ranks(2, where_the_store_listens, environment=lambda rank: secret)
    assert (first, second) == (("ServedStore", {"0100007F"}), ("AuthenticatedStore", {"0100007F"}))


def use_the_users_world():
    dist.init_process_group("gloo")
    gathered = []
    for _ in range(2):  # one after the other, as two engines would
        with open_ranks(timeout_seconds=60) as ranks:
            gathered.append(ranks.control.exchange(str(ranks.context.rank).encode()))
    total = torch.ones(1)
    dist.all_reduce(total)  # still the user's
    dist.destroy_process_group()
    return gathered, total.item()


def test_an_initialised_torch_distributed_is_used_and_left():
    assert run_ranks(2, use_the_users_world) == [([[b"0", b"1"]] * 2, 2.0)] * 2


def connect_before_the_world(meeting_port):
    rank, device = int(os.environ["RANK"]), torch.device("cpu")
    key = bytes(32)
    port = serve_world("127.0.0.1", key, 60) if rank == 0 else None
    meeting = dist.TCPStore("127.0.0.1", meeting_port, is_master=rank == 0, wait_for_workers=False)
    if port is not None:
        meeting.set("port", str(port))
    place = PassingPlace(rank=rank, size=2, host="127.0.0.1", port=int(meeting.get("port")), key=key)
    connected = connect_ahead("a test", place, device, lambda: None, timeout_seconds=60)
    passed, threads = torch.full((2,), float(rank)), threading.active_count()
    sends, receives = ([(1 - rank, passed[which].data_ptr(), 4)] for which in (rank, 1 - rank))
    exchange(connected.scatter, [(sends, receives)], device, timeout_seconds=60)
    assert not dist.is_initialized()
    with open_ranks(timeout_seconds=60, connected=connected) as ranks:
        assert ranks.gather is connected.gather and ranks.scatter is connected.scatter
        gathered = torch.zeros(2)
        gathered[rank] = rank + 1
        ranks.gather.all_gather(gathered.data_ptr(), 4)
    assert threading.active_count() <= threads
    with pytest.raises(RuntimeError):
        connected.gather.all_gather(gathered.data_ptr(), 4)
    connected.close()
    return passed.tolist(), gathered.tolist()


def test_communicators_that_were_connected_before_their_world():
    assert run_ranks(2, connect_before_the_world, free_port()) == [([0.0, 1.0], [1.0, 2.0])] * 2


def test_forks_are_made_where_nothing_uses_cuda(monkeypatch):
    for visible, is_fork in (("", True), ("0", False), (None, False)):
        variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        start = start_of(variables)
        assert (start.__name__ == "_start_fork") == is_fork
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with server_environment():
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    for number in range(2):
        assert start_of({**os.environ, **on_gpus(number)}).__name__ == "_start_process"


def share_gpus(gpus):
    made = []

    def make_staged(group_name, *, device, members):
        made.append(device)
        return _C.collective.make_c10d_communicator(group_name, members)

    connections._gpu_in_use = lambda device: gpus[int(os.environ["RANK"])]
    distributed.warm_up = lambda gather, scatter, device: None
    _C.collective.make_cuda_staged_communicator = make_staged
    with open_ranks(device_type="cuda", device_index=0, timeout_seconds=60) as ranks:
        whole = torch.zeros(ranks.gather.size)
        whole[ranks.gather.rank] = ranks.gather.rank
        ranks.gather.all_gather(whole.data_ptr(), 4)
        context = ranks.context
        return made, whole.tolist(), (context.local_rank, context.device.index, context.num_device_ranks)


def test_ranks_that_share_a_gpu_talk_through_the_host():
    results = run_ranks(3, share_gpus, ["GPU-a", "GPU-b", "GPU-a"])
    assert results == [([0, 0], [0.0, 1.0, 2.0], (rank, 0, sharers)) for rank, sharers in enumerate([2, 1, 2])]


def use_groups_of_some():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    members = [0, 2] if rank in (0, 2) else [1, 3]
    with open_ranks(timeout_seconds=60, ranks=members) as some, open_ranks(timeout_seconds=60) as world_group:
        assert (some.gather.rank, some.gather.size, some.members) == (members.index(rank), 2, tuple(members))
        assert some.context.world_size == 4
        whole = torch.zeros(2)
        whole[some.gather.rank] = rank
        some.gather.all_gather(whole.data_ptr(), 4)
        if rank == 0:
            with pytest.raises(ValueError, match="rank 0 is not one of ranks"):
                open_ranks(ranks=[1, 2])
        return whole.tolist(), len(world_group.control.exchange(b""))


def test_a_group_need_not_be_the_world():
    assert run_ranks(4, use_groups_of_some) == [([0.0, 2.0], 4), ([1.0, 3.0], 4)] * 2


SCRIPT = """
import dataclasses, json, sys
from patrickstar.ranks.distributed import open_ranks
with open_ranks(timeout_seconds=60) as ranks:
    values = [value.decode() for value in ranks.control.exchange(str(ranks.context.rank).encode())]
    context = ranks.context
print("RESULT " + json.dumps([context.rank, context.local_rank, context.world_size, values]), flush=True)
"""


def test_torchrun(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "script.py"]
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(text) for text in re.findall(r"RESULT (\[.*?\]\])", done.stdout)]
    assert sorted(results) == [[0, 0, 2, ["0", "1"]], [1, 1, 2, ["0", "1"]]]


def gather_across_nodes():
    with open_ranks(timeout_seconds=60) as ranks:
        whole = torch.zeros(ranks.gather.size * 100_000)
        own = whole.view(ranks.gather.size, -1)[ranks.gather.rank]
        own.fill_(ranks.gather.rank + 1)
        ranks.gather.all_gather(whole.data_ptr(), 400_000)
        whole.mul_(ranks.gather.rank + 1)
        scratch = torch.empty_like(whole)
        arguments = (whole.data_ptr(), own.data_ptr(), scratch.data_ptr(), 100_000, _C.DType.FLOAT32)
        ranks.scatter.reduce_scatter_mean(*arguments)
        return ranks.context, whole.view(ranks.gather.size, -1).mean(1).tolist()


def test_two_nodes():
    with two_nodes() as nodes:
        print(f"nodes {nodes}")
        common = {"MASTER_PORT": str(free_port()), "LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}
        results = run_ranks(2, gather_across_nodes, nodes=nodes, environment=lambda _: common)
    for rank, (context, means) in enumerate(results):
        assert context.local_rank == (0 if num_nodes(nodes) == 2 else rank)
        assert context.local_world_size == 2 // num_nodes(nodes)
        assert means == [[1.5, 2.0], [2.0, 3.0]][rank]  # own shard: the mean over ranks; the other's: as gathered
