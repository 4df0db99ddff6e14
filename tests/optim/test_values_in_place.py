import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar import _C
from tests.bits import assert_same_bits
from tests.optim.kernel_calls import ISAS, AdamScalars, adam_scalars, address
from tests.optim.test_scale_dependent_values import is_scale_dependent
from tests.optim.test_state_types import FLOATS, MOMENTS, State, Update

PIECE = _C.optim.SCALE_DEPENDENT_PIECE
CAPACITY = PIECE // 16
SIZES = [0, 1, 15, 16, 17, 255, 256, 257, 1000, 4097, 70_001]
SPLIT = _C.StateType.LOWER_HALF
FORMATS = {"fp32": FLOATS, **MOMENTS}


class InPlace:
    """The four passes over one range with a split master."""

    def __init__(self, update: Update, isa: str, num_threads: int = 1):
        self.update, self.isa, self.num_threads = update, isa, num_threads
        self.logs = torch.zeros(max(-(-len(update.grad) // PIECE), 1), _C.optim.OPEN_LOG_BYTES, dtype=torch.uint8)

    def _call(self, function, scalars, scale, *more):
        own = AdamScalars(**{**scalars, "grad_scale": scale})
        return function(self.isa, self.update.range(), own, self.num_threads, address(self.logs), *more)

    def put(self, scalars, least, most, capacity=CAPACITY):
        self._call(_C.optim.put_values, scalars, least, most, capacity)
        return is_scale_dependent(self.logs, len(self.update.grad))

    def take_back(self, scalars, least):
        self._call(_C.optim.take_values_back, scalars, least)

    def finish(self, scalars, scale, least):
        self._call(_C.optim.put_scale_dependent_values, scalars, scale)
        return self._call(_C.optim.put_states, scalars, scale, least)


def float32(value):
    return float(numpy.float32(value))


def updated(initial, isa, scalars, scale):
    result = initial.copy()
    result.run(isa, {**scalars, "grad_scale": scale})
    return result


def wild_values(update, seed):
    """Any bit pattern now and then, where a state is of float32."""
    generator = torch.Generator().manual_seed(seed)
    for state in (update.momentum, update.variance):
        if state.type == _C.StateType.FLOAT32:
            places = torch.randint(len(state.data), (len(state.data) // 7,), generator=generator)
            bits = torch.randint(-(2**31), 2**31, (len(places),), generator=generator).to(torch.int32)
            values = bits.view(torch.float32)
            if state is update.variance:
                values = torch.copysign(values, state.data[places])  # its sign is the master's
            state.data[places] = values
    places = torch.randint(len(update.grad), (len(update.grad) // 7,), generator=generator)
    bits = torch.randint(-(2**15), 2**15, (len(places),), generator=generator).to(torch.int16)
    update.grad[places] = bits.view(torch.bfloat16)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    numel=st.one_of(st.sampled_from(SIZES), st.integers(0, 700)),
    moments=st.sampled_from(sorted(FORMATS)),
    seed=st.integers(0, 2**31),
    wild=st.booleans(),
    step=st.sampled_from([1, 3, 1000]),
    lr=st.sampled_from([1e-5, 1e-3, 0.3]),
    bounds=st.tuples(st.floats(2**-20, 2.0), st.sampled_from([1.0, 1.01, 4.0])),
    share=st.floats(0.0, 1.0),
    misalign=st.integers(0, 17),
    num_threads=st.integers(1, 3),
)
def test_all_bits_are_those_of_the_update(numel, moments, seed, wild, step, lr, bounds, share, misalign, num_threads):
    initial = Update.random(numel, FORMATS[moments], SPLIT, torch.bfloat16, torch.bfloat16, seed=seed)
    if wild and numel:
        wild_values(initial, seed)
    scalars = adam_scalars(step, lr=lr, weight_decay=0.1)
    least, most = float32(bounds[0]), float32(bounds[0] * bounds[1])
    scale = float32(least + share * (most - least))
    for isa in ISAS:
        update = initial.copy(misalign)
        passes = InPlace(update, isa, num_threads)
        is_left = passes.put(scalars, least, most)
        expected = updated(initial, isa, scalars, scale)
        assert_same_bits(update.param[~is_left], expected.param[~is_left], f"{isa}: in place")
        assert_same_bits(update.param[is_left], initial.param[is_left], f"{isa}: open")
        finished = update.copy()
        other = InPlace(finished, isa, num_threads)
        other.logs = passes.logs.clone()
        assert other.finish(scalars, scale, least) == 0
        assert_same_bits(finished.memory(), expected.memory(), f"{isa}: finished with {scale}")
        passes.take_back(scalars, least)
        assert_same_bits(update.memory(), initial.memory(), f"{isa}: taken back")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("lr", "most_scale_dependent"), [(1e-5, 0.006), (1e-4, 0.02)])
def test_few_values_are_scale_dependent(isa, lr, most_scale_dependent):
    numel = 4_000_000 if isa == ISAS[-1] else 500_000
    generator = torch.Generator().manual_seed(0)
    initial = Update.random(numel, FLOATS, _C.StateType.FLOAT32, torch.bfloat16, torch.bfloat16, seed=1)
    initial.master.data.normal_(0, 0.02, generator=generator)
    size = torch.empty(numel).log_normal_(-7, 2, generator=generator)
    initial.grad.copy_(torch.randn(numel, generator=generator) * size)
    initial.momentum.data.copy_(torch.randn(numel, generator=generator) * size * 0.23)
    initial.variance.data.copy_(size.square())
    whole = initial.master
    initial.master = State.empty(SPLIT, numel)
    _C.optim.split_master(
        isa, address(whole.data), address(initial.param), address(initial.master.data), address(initial.variance.data),
        numel,
    )  # fmt: skip
    scalars = adam_scalars(1000, lr=lr, weight_decay=0.01)
    for least, most, more in ((1.0, 1.0, 1.0), (0.8, 1.0, 4.0)):
        update = initial.copy()
        passes = InPlace(update, isa, 2)
        share = passes.put(scalars, least, most).double().mean().item()
        print(f"{isa}, learning rate {lr}, scales from {least} to {most}: {share:.2%} of {numel} are open")
        assert 0 < share < more * most_scale_dependent
        finished = update.copy()
        other = InPlace(finished, isa, 2)
        other.logs = passes.logs
        assert other.finish(scalars, 0.93 if least < most else 1.0, least) == 0
        expected = updated(initial, isa, scalars, 0.93 if least < most else 1.0)
        assert_same_bits(finished.memory(), expected.memory(), "finished")
        passes.take_back(scalars, least)
        assert_same_bits(update.memory(), initial.memory(), "taken back")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("capacity", [0, 1, 3, 100])
def test_more_than_there_is_room_for(isa, capacity):
    initial = Update.random(2 * PIECE + 37, FLOATS, SPLIT, torch.bfloat16, torch.bfloat16, seed=4)
    settled = slice(PIECE, 2 * PIECE)  # masters of 10^6, which no step changes
    initial.param[settled], initial.master.data[settled] = 1e6, 0
    initial.variance.data[settled].abs_()
    scalars = adam_scalars(10, lr=1e-2)
    update = initial.copy()
    passes = InPlace(update, isa)
    is_left = passes.put(scalars, 0.25, 2.0, capacity)
    assert is_left[:PIECE].all()
    assert not is_left[settled].any()
    assert_same_bits(update.param[:PIECE], initial.param[:PIECE], "all open")
    assert passes.finish(scalars, 1.5, 0.25) == 0
    assert_same_bits(update.memory(), updated(initial, isa, scalars, 1.5).memory(), "finished")


def test_all_is_scale_dependent_with_an_l2_term():
    initial = Update.random(5000, FLOATS, SPLIT, torch.bfloat16, torch.bfloat16, seed=2)
    scalars = adam_scalars(10, lr=1e-12, weight_decay=0.5, decoupled=False)
    passes = InPlace(initial.copy(), "scalar")
    assert passes.put(scalars, 1.0, 1.0).all()
    assert_same_bits(passes.update.memory(), initial.memory(), "untouched")


@pytest.mark.parametrize("isa", ISAS)
def test_memory_that_was_changed_in_between_is_noticed(isa):
    initial = Update.random(3000, FLOATS, SPLIT, torch.bfloat16, torch.bfloat16, seed=3)
    scalars = adam_scalars(10, lr=1e-3)
    passes = InPlace(initial, isa)
    is_left = passes.put(scalars, 1.0, 1.0)
    place = int((~is_left).nonzero()[2000])
    initial.momentum.data[place] += 1000.0
    assert passes.finish(scalars, 1.0, 1.0) >= 1
