import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar import _C
from tests.bits import assert_same_bits
from tests.optim.kernel_calls import DTYPES, ISAS, add_up, random_values, sum_squares

BLOCK = _C.optim.SQUARES_BLOCK
LANES = 64


def squares_in_order(values):
    """[Note: one order of summation] with torch's float64 operations; squares of float32 are exact in it."""
    partials = []
    for begin in range(0, values.numel(), BLOCK):
        block = values[begin : begin + BLOCK].double().square()
        lanes = torch.zeros(LANES, dtype=torch.float64)
        for row in block.split(LANES):
            lanes[: row.numel()] += row
        while lanes.numel() > 1:
            lanes = lanes[: lanes.numel() // 2] + lanes[lanes.numel() // 2 :]
        partials.append(lanes)
    return torch.cat(partials) if partials else torch.empty(0, dtype=torch.float64)


@settings(deadline=None, max_examples=80, derandomize=True)
@given(
    numel=st.one_of(
        st.integers(0, 200), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 63, BLOCK + 65, 5 * BLOCK + 1000])
    ),
    dtype=st.sampled_from(list(DTYPES)),
    misalign=st.integers(0, 17),
    seed=st.integers(0, 2**31),
)
def test_every_isa_sums_in_the_documented_order(numel, dtype, misalign, seed):
    generator = torch.Generator().manual_seed(seed)
    values = random_values(numel + misalign, dtype, generator, wild=True)[misalign:]
    finite = torch.where(values.isfinite(), values, torch.ones_like(values))
    expected = squares_in_order(finite)
    for isa in ISAS:
        assert_same_bits(sum_squares(isa, finite), expected, isa)
        assert_same_bits(sum_squares(isa, values), sum_squares("scalar", values), f"{isa}, inf and NaN")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_agrees_with_float64(isa, dtype):
    values = random_values(1_000_003, dtype, torch.Generator().manual_seed(1), wild=False)
    exact = math.fsum(values.double().square().tolist())
    error = abs(math.fsum(sum_squares(isa, values).tolist()) - exact) / exact
    print(f"{isa} {dtype}: relative error of the sum of squares {error:.1e}")
    assert error < 1e-14


@pytest.mark.parametrize("isa", ISAS)
def test_threads_and_pieces_change_nothing(isa):
    values = random_values(40 * BLOCK + 77, torch.bfloat16, torch.Generator().manual_seed(2), wild=False)
    expected = sum_squares(isa, values)
    for num_threads in (2, 3, 7):
        assert_same_bits(sum_squares(isa, values, num_threads), expected, f"{num_threads} threads")
    pieces = [sum_squares(isa, piece) for piece in values.split([BLOCK, 7 * BLOCK, 32 * BLOCK, 77])]
    assert_same_bits(torch.cat(pieces), expected, "pieces of whole blocks")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_partial_is_finite_exactly_when_its_block_is(isa, dtype, bad):
    largest = torch.finfo(dtype).max
    values = torch.full((3 * BLOCK + 10,), largest).to(dtype)
    assert sum_squares(isa, values).isfinite().all(), "the largest values of a whole block fit"
    for position in (BLOCK, BLOCK + 63, BLOCK + 2000, 2 * BLOCK - 1):
        poisoned = values.clone()
        poisoned[position] = bad
        assert sum_squares(isa, poisoned).isfinite().tolist() == [True, False, True, True]
    values[-1] = bad
    assert sum_squares(isa, values).isfinite().tolist() == [True, True, True, False]


@pytest.mark.parametrize("isa", ISAS)
def test_denormals_count(isa):
    values = torch.full((BLOCK,), 1e-45)
    torch.set_flush_denormal(True)
    try:
        partial = sum_squares(isa, values).item()
    finally:
        torch.set_flush_denormal(False)
    assert partial == BLOCK * 2.0**-298


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    count=st.one_of(st.integers(0, 5), st.sampled_from([255, 256, 257, 511, 700, 5000])),
    first=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
def test_partials_are_added_up_to_more_than_twice_a_double(count, first, seed):
    """The error is less than 2^-100 of the exact sum, so its order changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    partials = torch.rand(first + count, dtype=torch.float64, generator=generator)
    partials *= 10.0 ** torch.randint(-30, 30, (first + count,), generator=generator)
    high, low = add_up(partials, first)
    exact = sum((Fraction(value) for value in partials[first:].tolist()), Fraction(0))
    assert abs(Fraction(high) + Fraction(low) - exact) <= exact / 2**100
    assert high + low == float(exact) == math.fsum(partials[first:].tolist())


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_sum_is_finite_exactly_when_its_partials_are(bad):
    for position in (0, 255, 256, 999):
        partials = torch.ones(1000, dtype=torch.float64)
        assert add_up(partials) == (1000, 0)
        partials[position] = bad
        assert not math.isfinite(add_up(partials)[0])
