import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar import _C


def idle_slots(slots, sizes):
    addresses = [slots.acquire(size) for size in sizes]
    for address in addresses:
        slots.release(address)
    return addresses


def test_slots_of_rare_sizes_are_kept_longest():
    slots = _C.SlotPool(2000, 0.0)
    head, *_ = idle_slots(slots, [1000, 100, 100, 100, 80, 80])
    assert slots.trim(150) == 200
    assert slots.trim(1) == 80
    assert slots.acquire(1000) == head
    slots.release(head)
    assert slots.trim(2000) == 1000 + 100 + 80
    assert slots.idle_bytes == slots.used_bytes == 0


def test_slots_in_use_make_a_size_common():
    slots = _C.SlotPool(2000, 0.0)
    used = [slots.acquire(100) for _ in range(3)]
    idle_slots(slots, [500, 500])
    slots.release(used[0])
    assert slots.trim(1) == 100


@pytest.mark.parametrize(("waste_ratio", "served"), [(0.125, True), (0.0, False)])
def test_a_larger_slot_serves_where_memory_is_scarce(waste_ratio, served):
    slots = _C.SlotPool(300, waste_ratio)
    (larger,) = idle_slots(slots, [117])
    assert (slots.acquire(83) == larger) is served
    assert slots.used_bytes == (117 if served else 83)
    # One that is more than half as large again does not.
    slots = _C.SlotPool(300, waste_ratio)
    (larger,) = idle_slots(slots, [117])
    assert slots.acquire(77) != larger


def test_sizes_that_alternate_need_no_new_slots_in_the_end():
    slots = _C.SlotPool(420, 0.125)
    numbers = []
    for _ in range(3):
        for sizes in ([83, 83, 83], [117, 117, 117], [83, 117, 83]):
            assert all(idle_slots(slots, sizes))
        numbers.append(slots.num_allocations)
    assert numbers[0] == numbers[-1]


@given(st.lists(st.tuples(st.integers(1, 400), st.booleans()), max_size=60), st.sampled_from([0.0, 0.125]))
def test_books(requests, waste_ratio):
    slots = _C.SlotPool(1000, waste_ratio)
    used = {}
    for size, release in requests:
        address = slots.acquire(size)
        assert address not in used
        if address:
            used[address] = size
        else:
            assert slots.idle_bytes == 0 and slots.used_bytes + size > 1000
        if release and used:
            slots.release(used.popitem()[0])
        assert sum(used.values()) <= slots.used_bytes <= 1000 - slots.idle_bytes
        assert sum(used.values()) * (1.5 if waste_ratio else 1) >= slots.used_bytes


def test_what_stays_gets_the_size_it_asks_for():
    slots = _C.SlotPool(300, 0.125)
    idle_slots(slots, [110, 110])
    assert slots.acquire(100, _C.SlotFit.EXACT)
    assert slots.used_bytes == 100
    slots.acquire(100, _C.SlotFit.EXACT)
    assert slots.used_bytes == 200
    assert slots.idle_bytes == 0
