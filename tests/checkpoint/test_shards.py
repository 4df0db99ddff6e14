import dataclasses
import datetime
import json
import os
import random
import weakref

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from patrickstar.checkpoint import Checkpoint, CheckpointError, GroupPeers, OneRank, SaveOptions, save
from patrickstar.checkpoint.export import INDEX_NAME, ExportOptions, export
from patrickstar.checkpoint.peers import phase
from tests.bits import assert_same_bits
from tests.checkpoint.ranks import Held, HeldSink, HeldSource, on_ranks
from tests.distributed import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
SHAPES = [(), (1,), (7,), (0, 3), (5, 6), (3, 1, 4), (2, 3, 2, 2)]


@st.composite
def held_tensors(draw, num_ranks):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    names = draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6, unique=True))
    here, there = [], []
    for name in names:
        shape = draw(st.sampled_from(SHAPES))
        dtype = draw(st.sampled_from(DTYPES))
        values = torch.randint(0, 2**16, shape, generator=generator).to(dtype)
        kind = draw(st.sampled_from(["master", "exp_avg", "frozen", "managed", "buffer"]))
        for tensors, size in ((here, num_ranks[0]), (there, num_ranks[1])):
            cuts = draw(st.lists(st.integers(0, values.numel()), min_size=size - 1, max_size=size - 1))
            order = draw(st.none() | st.permutations(range(len(shape))).map(tuple))
            tensors.append(Held(name, kind, values, [0, *sorted(cuts), values.numel()], order))
    return here, there


def save_on(size, path, tensors, tag="t", state=None, **options):
    def work(peers):
        return save(path, tag, HeldSource(tensors, peers.rank), state or {}, SaveOptions(peers=peers, **options))

    return on_ranks(size, work)


def check_load_on(size, path, tensors, tag=None):
    for rank in range(size):
        sink = HeldSink(tensors, rank)
        with Checkpoint.find(path, tag) as checkpoint:
            checkpoint.load(sink)
        sink.check()


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(), sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)), max_bytes=st.sampled_from([1, 100, 2**30])
)
def test_any_ranks_load_what_any_ranks_saved(tmp_path_factory, data, sizes, max_bytes):
    here, there = data.draw(held_tensors(sizes))
    path = tmp_path_factory.mktemp("saved")
    results = save_on(sizes[0], path, here, max_file_bytes=max_bytes)
    assert results == [path / "t"] * sizes[0]
    check_load_on(sizes[1], path, there)
    check_load_on(sizes[0], path, here)
    with Checkpoint.find(path) as checkpoint:
        checkpoint.verify()
        assert checkpoint.manifest.num_ranks == sizes[0]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), size=st.integers(1, 4), max_bytes=st.sampled_from([1, 100, 2**30]))
def test_export_needs_no_gathering(tmp_path_factory, data, size, max_bytes):
    tensors, _ = data.draw(held_tensors((size, 1)))
    path = tmp_path_factory.mktemp("exported") / "model"

    def work(peers):
        options = ExportOptions(dtype=torch.float32, max_file_bytes=max_bytes, peers=peers, texts={"config.json": "{}"})
        return export(path, list(HeldSource(tensors, peers.rank).shards()), options)

    assert on_ranks(size, work) == [path] * size
    files = sorted(path.glob("*.safetensors"))
    got = {name: values for file in files for name, values in load_file(file).items()}
    if len(files) > 1:
        weight_map = json.loads((path / INDEX_NAME).read_text())["weight_map"]
        assert {name: file.name for file in files for name in load_file(file)} == weight_map
    assert got.keys() == {held.name for held in tensors}
    for held in tensors:
        keeps = held.kind == "buffer" or not held.values.dtype.is_floating_point
        expected = held.values if keeps else held.values.float()
        assert_same_bits(got[held.name], expected, held.name)


def matrix(name="w", edges=(0, 12), kind="master"):
    return Held(name, kind, torch.arange(12.0).view(3, 4), edges)


def test_the_library_reads_the_files(tmp_path):
    tensors = [matrix("a", (0, 5, 12)), matrix("b", (0, 12, 12)), matrix("b", (0, 0, 12), "exp_avg")]
    save_on(2, tmp_path, tensors)
    first, second = (load_file(file) for file in sorted((tmp_path / "t").glob("*.safetensors")))
    assert first.keys() == {"master/a[0:5]", "master/b"}
    assert second.keys() == {"master/a[5:12]", "exp_avg/b"}
    assert_same_bits(first["master/b"], tensors[1].values)
    assert_same_bits(torch.cat([first["master/a[0:5]"], second["master/a[5:12]"]]), tensors[0].values.flatten())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: [matrix(edges=(0, 6, 12)), matrix("v", edges=(0, 6, 6))], "6 of its 12 elements"),
        (lambda t: [matrix(edges=(1, 6, 12))], "element 0 is in no shard"),
    ],
)
def test_what_is_no_whole_tensor_is_not_saved(tmp_path, change, message):
    save_on(2, tmp_path, [matrix(edges=(0, 6, 12))], tag="good")
    errors = save_on(2, tmp_path, change(None), tag="bad")
    assert all(isinstance(error, CheckpointError) and message in str(error) for error in errors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "latest"]
    check_load_on(1, tmp_path, [matrix()])


def test_a_rank_that_fails_fails_all(tmp_path):
    class Unreadable(HeldSource):
        def shards(self):
            for shard in super().shards():
                yield dataclasses.replace(shard, read=burning) if self._rank == 2 else shard

    def work(peers):
        return save(tmp_path, "t", Unreadable([matrix(edges=(0, 3, 6, 12))], peers.rank), {}, SaveOptions(peers=peers))

    errors = on_ranks(3, work)
    assert [type(error) for error in errors] == [CheckpointError] * 3
    assert all("rank 2: ValueError: the disk of rank 2 is on fire" in str(error) for error in errors)
    assert list(tmp_path.iterdir()) == []


def burning():
    raise ValueError("the disk of rank 2 is on fire")


def test_memory_is_one_shard(tmp_path):
    alive, most = set(), 0
    shape, count = (1000,), 20

    def read(index):
        nonlocal most
        values = torch.full(shape, float(index))
        alive.add(index)
        weakref.finalize(values, alive.discard, index)
        most = max(most, len(alive))
        return values

    class Source(HeldSource):
        def shards(self):
            for index, shard in enumerate(super().shards()):
                yield dataclasses.replace(shard, read=lambda i=index: read(i))

    tensors = [Held(f"p{i}", "master", torch.full(shape, float(i)), (0, 1000)) for i in range(count)]
    save(tmp_path, "t", Source(tensors, 0), {})
    assert most <= 2  # the next one is read before the name of the last is taken
    check_load_on(1, tmp_path, tensors)


def test_order_of_files_and_ranks_does_not_matter(tmp_path):
    shuffled = random.Random(0)
    values = [torch.randn(n, 7, generator=torch.Generator().manual_seed(n)) for n in (1, 4, 50)]
    previous = None
    for size in (1, 3, 2, 4, 1):
        tensors = []
        for index, value in enumerate(values):
            cuts = sorted(shuffled.randint(0, value.numel()) for _ in range(size - 1))
            source = value if previous is None else previous[index]
            tensors.append(Held(f"p{index}", "master", source, [0, *cuts, value.numel()]))
        save_on(size, tmp_path, tensors)
        sink = HeldSink([Held(f"p{i}", "master", value, [0, value.numel()]) for i, value in enumerate(values)], 0)
        with Checkpoint.find(tmp_path) as checkpoint:
            checkpoint.load(sink)
        sink.check()
        previous = [sink.got[(f"p{i}", "master")].view(value.shape) for i, value in enumerate(values)]


EDGES = {1: (0, 100), 2: (0, 33, 100)}


def tensors(size):
    return [Held(name, "master", torch.arange(100.0) * (1 + index), EDGES[size]) for index, name in enumerate("ab")]


def save_and_lose_a_part(folder):
    rank = int(os.environ["RANK"])
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timeout)
    peers = GroupPeers()
    sizes = [len(message) for message in peers.exchange(b"x" * (rank * 1000))]
    save(f"{folder}/saved", "t", HeldSource(tensors(2), rank), {}, SaveOptions(peers=peers))
    source = HeldSource(tensors(2) if rank == 0 else [], rank)  # rank 1 lost its part
    with pytest.raises(CheckpointError) as refused:
        save(f"{folder}/saved", "u", source, {}, SaveOptions(peers=peers))
    dist.destroy_process_group()
    return sizes, str(refused.value)


def test_two_processes(tmp_path):
    for sizes, error in run_ranks(2, save_and_lose_a_part, str(tmp_path)):
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
                    error.raised_by_signal = True  # as session/interrupts.py delivers it
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
