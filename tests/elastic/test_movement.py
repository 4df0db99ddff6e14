import dataclasses
import itertools
import os
import random

import pytest
import torch

from patrickstar import _C
from patrickstar.elastic import published
from patrickstar.elastic.movement import Move, assign_ranks, find_moves
from patrickstar.elastic.published import PublishedShards
from patrickstar.elastic.transfers import FileServer
from patrickstar.ranks.addresses import listen
from patrickstar.ranks.authenticated_store import ServedStore
from patrickstar.ranks.passing import PassingPlace, passing_communicator
from patrickstar.resize.devices import DeviceShards, params_on_device, stored_bytes, those_with_room
from patrickstar.resize.memory import MemoryFacts, device_rooms
from tests.elastic.runs import state_of
from tests.elastic.test_memory import CONFIGS, step, trained
from tests.elastic.test_resize import assert_same


def parts_of(numels, chunk_numel, num_ranks):
    layouts = [
        _C.Layout.pack(
            numels, [_C.DType.FLOAT32] * len(numels), [True] * len(numels), chunk_numel, num_ranks=num_ranks, rank=rank
        )
        for rank in range(num_ranks)
    ]
    return [
        [(begin, begin + numel) for begin, numel, _ in map(layout.shard_of, range(len(numels)))] for layout in layouts
    ]


def owner_of(parts, param, element):
    owners = [rank for rank, of_rank in enumerate(parts) if of_rank[param][0] <= element < of_rank[param][1]]
    assert len(owners) == 1
    return owners[0]


def test_moves_are_all_that_is_lacking_and_nothing_else():
    for seed in range(20):
        check_moves(random.Random(seed))


def check_moves(chance):
    numels = [chance.choice([1, 300, 5000, 9000]) for _ in range(chance.randint(1, 6))]
    num_old, num_new = chance.randint(1, 5), chance.randint(1, 5)
    old, new = parts_of(numels, 16384, num_old), parts_of(numels, 16384, num_new)
    former = assign_ranks(num_old, num_new)
    moves = find_moves(old, new, former)
    for param, numel in enumerate(numels):
        for element in {*range(0, numel, 97), *(edge for parts in (*old, *new) for edge in parts[param])} - {numel}:
            target, source = owner_of(new, param, element), owner_of(old, param, element)
            travels = [m for m in moves if m.param == param and m.begin <= element < m.end]
            expected = [] if former[target] == source else [(source, target)]
            assert [(move.source, move.target) for move in travels] == expected


def equal_parts(numel, num_ranks):
    return [[(rank * numel // num_ranks, (rank + 1) * numel // num_ranks)] for rank in range(num_ranks)]


def test_no_other_order_of_ranks_keeps_more():
    for num_old, num_new in itertools.product(range(1, 6), repeat=2):
        check_order(num_old, num_new)


def check_order(num_old, num_new):
    old, new = equal_parts(60, num_old), equal_parts(60, num_new)
    former = assign_ranks(num_old, num_new)
    assert former[0] == 0
    stayed = [rank for rank in former if rank is not None]
    assert len(stayed) == len(set(stayed)) == min(num_old, num_new)
    least = min(
        sum(move.numel for move in find_moves(old, new, [0, *rest]))
        for rest in set(itertools.permutations([*range(1, num_old), *[None] * (num_new - 1)], num_new - 1))
        if sum(rank is not None for rank in rest) == min(num_old, num_new) - 1
    )
    assert sum(move.numel for move in find_moves(old, new, former)) == least


def test_doubling_moves_half_and_keeps_places():
    assert assign_ranks(2, 4) == [0, None, None, 1] or assign_ranks(2, 4) == [0, None, 1, None]
    moves = find_moves(equal_parts(4096, 2), equal_parts(4096, 4), assign_ranks(2, 4))
    assert sum(move.numel for move in moves) == 2048


def test_who_leaves_may_be_said():
    assert assign_ranks(4, 3, leaving=[2]) == [0, 1, 3]
    assert [rank for rank in assign_ranks(3, 3, leaving=[1]) if rank is not None] == [0, 2]
    with pytest.raises(ValueError, match="rank 0 leads"):
        assign_ranks(2, 1, leaving=[0])
    with pytest.raises(ValueError, match="let more leave"):
        assign_ranks(4, 2, leaving=[3])


def test_as_many_as_devices_have_room_for():
    """Parameter 1 takes 40 bytes of rank 0's device and 80 of rank 1's; a tenth of each device is left free."""
    sizes = {0: (2, 2), 1: (4, 4), 3: (1,)}
    moves = [Move(0, 1, 0, 0, 5), Move(0, 1, 1, 0, 10), Move(1, 0, 1, 10, 15), Move(0, 1, 3, 0, 1)]
    chosen = [those_with_room([0, 1, 3], sizes, moves, rooms) for rooms in ([1000, 1000], [44, 1000], [1000, 111])]
    assert chosen == [[0, 1, 3], [0], [0]]
    assert those_with_room([0, 1, 3], sizes, moves, [45, 113]) == [0, 1, 3]
    assert those_with_room([0, 1, 3], sizes, moves, [0, 0]) == []


def test_elements_are_copied_as_they_are_stored():
    engine, optimizer = trained(CONFIGS["on the device"])
    with engine:
        runtime = engine._session.runtime
        params = params_on_device(engine._session)
        assert params == list(range(6))
        size = engine.state_dict()["0.weight"].numel()
        assert stored_bytes(engine._session, [0]) == {0: (4, 4, 4)}
        before = state_of(engine, optimizer)
        copies = []
        for address in runtime.stored_on_device(0):
            copies.append(_C.DeviceMemory(-1, 4 * size))
            runtime.copy_on_device(copies[-1].address, address, 4 * size)
        zeros = torch.zeros(size)
        runtime.write_values(0, _C.ArrayKind.MASTER, zeros.data_ptr(), _C.Tier.HOST)
        assert not engine.state_dict()["0.weight"].any()
        parts = [(0, 100, 0), (100, size, 400)]
        ranges = [
            (array, begin, end, copy.address + at, _C.Tier.DEVICE)
            for array, copy in enumerate(copies)
            for begin, end, at in parts
        ]
        with pytest.raises(ValueError, match=rf"0.weight: {size - 100} elements are given of a part of {size}"):
            runtime.write_stored(0, ranges[1:])
        with pytest.raises(ValueError, match="array 3 of 0.weight, which has 3"):
            runtime.write_stored(0, [(3, 0, size, copies[0].address, _C.Tier.DEVICE)])
        runtime.write_stored(0, ranges)
        assert_same(before, state_of(engine, optimizer))


@pytest.mark.parametrize("name", ["8bit", "on the host"])
def test_what_cannot_be_copied_so_is_not(name):
    engine, _ = trained(CONFIGS[name])
    with engine:
        assert params_on_device(engine._session) == []
        with pytest.raises(RuntimeError, match="is not on the device"):
            engine._session.runtime.stored_on_device(0)


def test_a_device_without_room_for_what_is_kept(monkeypatch, tmp_path):
    engine, optimizer = trained(CONFIGS["on the device"])

    def make(*args):
        raise _C.MemoryBudgetError("no room")

    with engine:
        before = state_of(engine, optimizer)
        monkeypatch.setattr(DeviceShards, "_make", make)
        engine.resize(1, folder=str(tmp_path))
        assert_same(before, state_of(engine, optimizer))
        step(engine, optimizer)


def test_a_process_that_does_not_come():
    store = ServedStore(listen("127.0.0.1", 0), bytes(32), timeout_seconds=60)
    place = PassingPlace(rank=1, size=2, host="127.0.0.1", port=store.port, key=bytes(32))
    called = []
    with (
        pytest.raises(OSError, match="the 2 processes of a test were not connected"),
        passing_communicator("a test", place, torch.device("cpu"), lambda: called.append(1), timeout_seconds=0.5),
    ):
        pass
    assert called == [1]


def test_processes_that_share_a_gpu_receive_nothing_there():
    facts = dict.fromkeys(("available_bytes", "usable_bytes", "reserve_bytes", "held_bytes", "device_bytes"), 1)
    one = MemoryFacts(host="a", device="first", free_device_bytes=5, **facts)
    shares, apart = dataclasses.replace(one), dataclasses.replace(one, device="second", free_device_bytes=7)
    assert device_rooms([one], [one, shares]) == [0, 0]
    assert device_rooms([one], [one, apart]) == [5, 7]
    assert device_rooms([one, apart], [one]) == [5]
    simulated = dataclasses.replace(one, device="")
    assert device_rooms([simulated], [simulated, dataclasses.replace(simulated)]) == [5, 5]


MOVES = sorted(
    Move(source, target, param, 10 * param, 10 * param + size)
    for source, target in ((0, 1), (0, 2), (1, 2))
    for param, size in enumerate((5, 1, 7, 3, 9))
)
TOKEN, KEY = "0" * 32, bytes(32)
ARRAYS = {0: 3, 1: 3, 2: 1, 3: 3, 4: 1}


def content(piece):
    text = f"{piece.move.source}{piece.move.target}{piece.move.param}{piece.array}".encode()
    return text * piece.move.numel


def write(shards, rank):
    def fill(pieces, files):
        for descriptor, size in files:
            os.posix_fallocate(descriptor, 0, size)
        for piece in pieces:
            os.pwrite(files[piece.file][0], content(piece), piece.at)

    shards.write(rank, fill)


def check(shards, target):
    with shards.opened(target) as (pieces, files):
        assert sum(size for _, size in files) == sum(piece.move.numel * 4 for piece in pieces)
        wanted = {(move, array) for move in MOVES if move.target == target for array in range(ARRAYS[move.param])}
        assert {(piece.move, piece.array) for piece in pieces} == wanted
        for piece in pieces:
            assert os.pread(files[piece.file][0], piece.move.numel * 4, piece.at) == content(piece)


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr(published, "_FILE_BYTES", 64)
    monkeypatch.setattr(published, "_MOST_FILES", 3)


@pytest.mark.usefixtures("small_files")
def test_several_files_of_each_pair_have_it_all_once(tmp_path):
    shards = PublishedShards(tmp_path, TOKEN, KEY, MOVES, ARRAYS)
    assert len(shards.files) == 6
    for file in shards.files:
        assert 64 <= file.num_bytes <= 120  # as even as whole moves are
    for rank in (0, 1):
        write(shards, rank)
    for target in (1, 2):
        shards.reach(target, [], 10)
        check(shards, target)
    shards.remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small_files")
def test_files_that_are_elsewhere_are_fetched_and_cut_ones_are_refused(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    shards, mine = (PublishedShards(folder, TOKEN, KEY, MOVES, ARRAYS) for folder in (there, here))
    write(shards, 0)
    write(mine, 1)
    server = FileServer("127.0.0.1", KEY, {file.name: shards.path(file) for file in shards.of_source(0)}, 10)
    try:
        mine.reach(2, [server.address, "127.0.0.1:1"], 10)
        check(mine, 2)
    finally:
        server.close()
    assert all(server.has_given(file.name, "2") == (file.target == 2) for file in shards.of_source(0))
    cut = next(file for file in mine.files if file.target == 2)
    os.truncate(mine.path(cut), cut.num_bytes - 1)
    with pytest.raises(OSError, match=f"bytes instead of {cut.num_bytes}"):
        mine.reach(2, ["127.0.0.1:1"] * 2, 10)


def test_little_is_one_file(tmp_path):
    assert [file.target for file in PublishedShards(tmp_path, TOKEN, KEY, MOVES, ARRAYS).files] == [1, 2, 2]
