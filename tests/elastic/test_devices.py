import dataclasses

import pytest
import torch

from patrickstar import _C
from patrickstar.elastic.movement import Move
from patrickstar.engine.resize_devices import DeviceShards, params_on_device, stored_bytes, those_with_room
from patrickstar.engine.resize_room import MemoryFacts, device_rooms
from patrickstar.ranks.addresses import listen
from patrickstar.ranks.authenticated_store import ServedStore
from patrickstar.ranks.passing import PassingPlace, passing_communicator
from tests.elastic.runs import state_of
from tests.elastic.test_memory import CONFIGS, step, trained
from tests.elastic.test_resize import assert_same


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
