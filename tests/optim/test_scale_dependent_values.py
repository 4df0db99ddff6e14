import math

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar import _C
from tests.bits import assert_same_bits
from tests.optim.kernel_calls import HALVES, ISAS, AdamScalars, adam_scalars, address, make_arrays, run_adam

PIECE = _C.optim.SCALE_DEPENDENT_PIECE
CAPACITY = PIECE // 16
SIZES = [0, 1, 15, 16, 17, 127, 128, 129, 255, 257, 300, 1000, 4097, 70_001]


def between(isa, arrays, scalars, least, most, num_threads=1):
    """``param`` for scales from ``least`` to ``most``, and logs of scale-dependent values."""
    logs = torch.zeros(-(-arrays.master.numel() // PIECE), _C.optim.OPEN_LOG_BYTES, dtype=torch.uint8)
    own = AdamScalars(**{**scalars, "grad_scale": least})
    _C.optim.update_param_between(isa, arrays.range(), own, num_threads, address(logs), most)
    return logs


def complete(isa, arrays, scalars, scale, logs, num_threads=1):
    own = AdamScalars(**{**scalars, "grad_scale": scale})
    _C.optim.update_param_scale_dependent(isa, arrays.range(), own, num_threads, address(logs))


def is_scale_dependent(logs, numel):
    result = torch.zeros(numel, dtype=torch.bool)
    for piece, log in enumerate(logs):
        count = int(log[:8].view(torch.int64))
        here = result[piece * PIECE : (piece + 1) * PIECE]
        if count < 0:
            here[:] = True
        else:
            places = log[8 + 14 * CAPACITY :].view(torch.int16)[:count].to(torch.int64) & 0xFFFF
            assert (places[1:] > places[:-1]).all()
            here[places] = True
    return result


def expected_param(arrays, scalars, scale):
    other = arrays.clone()
    run_adam("scalar", other, {**scalars, "grad_scale": scale})
    return other.param


def float32(value):
    return float(numpy.float32(value))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    numel=st.one_of(st.sampled_from(SIZES), st.integers(0, 700)),
    dtype=st.sampled_from(HALVES),
    seed=st.integers(0, 2**31),
    wild=st.booleans(),
    step=st.sampled_from([1, 3, 1000]),
    lr=st.sampled_from([1e-5, 1e-3, 0.3]),
    eps=st.sampled_from([0.0, 1e-8]),
    bounds=st.tuples(st.floats(2**-20, 2.0), st.floats(1.0, 4.0)),
    shares=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3),
    misalign=st.integers(0, 17),
    num_threads=st.integers(1, 3),
)
def test_scale_dependent_values_hold_for_every_scale_between(
    numel, dtype, seed, wild, step, lr, eps, bounds, shares, misalign, num_threads
):
    initial = make_arrays(numel, dtype, dtype, in_place=False, seed=seed, wild=wild)
    scalars = adam_scalars(step, lr=lr, eps=eps, weight_decay=0.1)
    least, most = float32(bounds[0]), float32(bounds[0] * bounds[1])
    scales = [least, most, *(float32(least + share * (most - least)) for share in shares)]
    for isa in ISAS:
        arrays = initial.clone(misalign=misalign)
        logs = between(isa, arrays, scalars, least, most, num_threads)
        settled = ~is_scale_dependent(logs, numel)
        for scale in scales:
            expected = expected_param(initial, scalars, scale)
            completed = arrays.clone()
            assert_same_bits(completed.param[settled], expected[settled], f"{isa} settled, scale {scale}")
            complete(isa, completed, scalars, scale, logs, num_threads)
            assert_same_bits(completed.param, expected, f"{isa} completed, scale {scale}")
        for name in ("master", "momentum", "variance", "grad"):
            assert_same_bits(getattr(arrays, name), getattr(initial, name), f"{isa} {name}, only read")


@pytest.mark.parametrize("isa", ISAS)
def test_few_values_are_scale_dependent(isa):
    numel = 4_000_000 if isa == ISAS[-1] else 500_000
    generator = torch.Generator().manual_seed(0)
    arrays = make_arrays(numel, torch.bfloat16, torch.bfloat16, in_place=False, seed=1, wild=False)
    arrays.master.normal_(0, 0.02, generator=generator)
    size = torch.empty(numel).log_normal_(-7, 2, generator=generator)
    arrays.grad.copy_(torch.randn(numel, generator=generator) * size)
    arrays.momentum.copy_(torch.randn(numel, generator=generator) * size * 0.23)
    arrays.variance.copy_(size.square())
    scalars = adam_scalars(1000, lr=1e-5, weight_decay=0.01)
    logs = between(isa, arrays, scalars, 0.8, 1.25, 2)
    share = is_scale_dependent(logs, numel).double().mean().item()
    print(f"{isa}: {share:.2%} of {numel} are open")
    assert 0 < share < 0.03
    for scale in (0.8, 0.93, 1.0, 1.25):
        completed = arrays.clone()
        complete(isa, completed, scalars, scale, logs, 2)
        expected = arrays.clone()
        _C.optim.update_param(isa, expected.range(), AdamScalars(**{**scalars, "grad_scale": scale}), 2)
        assert torch.equal(completed.param.view(torch.int16), expected.param.view(torch.int16))


def test_all_is_scale_dependent_with_an_l2_term():
    """An L2 term may turn a gradient's sign between two scales."""
    arrays = make_arrays(5000, torch.bfloat16, torch.bfloat16, in_place=False, seed=2, wild=False)
    scalars = adam_scalars(10, lr=1e-12, weight_decay=0.5, decoupled=False)
    assert is_scale_dependent(between("scalar", arrays, scalars, 0.5, 1.0), 5000).all()


def test_one_scale_leaves_numbers_settled():
    arrays = make_arrays(5000, torch.float16, torch.float16, in_place=False, seed=3, wild=False)
    arrays.grad[70] = math.nan
    logs = between("scalar", arrays, adam_scalars(10), 0.5, 0.5)
    assert is_scale_dependent(logs, 5000)[70] and is_scale_dependent(logs, 5000).sum() < 10


def test_more_than_there_is_room_for():
    initial = make_arrays(2 * PIECE, torch.bfloat16, torch.bfloat16, in_place=False, seed=4, wild=False)
    initial.master[PIECE:] = 1e6  # no step changes these
    scalars = adam_scalars(10, lr=0.1)
    for isa in ISAS:
        arrays = initial.clone()
        logs = between(isa, arrays, scalars, 0.25, 2.0)
        assert is_scale_dependent(logs, 2 * PIECE)[:PIECE].all()
        assert not is_scale_dependent(logs, 2 * PIECE)[PIECE:].any()
        complete(isa, arrays, scalars, 1.5, logs)
        assert_same_bits(arrays.param, expected_param(initial, scalars, 1.5), isa)


def test_parameters_of_32_bits_are_refused():
    arrays = make_arrays(8, torch.float32, torch.float32, in_place=False, seed=0, wild=False)
    with pytest.raises(ValueError, match="scale-independent values need 16 bits"):
        between("scalar", arrays, adam_scalars(1), 0.5, 1.0)
