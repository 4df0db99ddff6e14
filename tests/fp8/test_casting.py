import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from patrickstar.activations.selective_recomputation import keep_products
from patrickstar.fp8 import casting
from patrickstar.fp8.casting import TILE, Block, Codes, Format, Sides, cast
from patrickstar.fp8.products import product


def matrix(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    magnitudes = 2.0 ** torch.randint(-20, 20, (rows, 1), generator=generator)
    x = torch.randn(rows, columns, generator=generator) * magnitudes
    x[:, :TILE] = 0.0
    x[0, 0], x[1, 1], x[2, 2], x[3, 3] = 1e-40, 448.0, 449.0, torch.finfo(torch.bfloat16).max
    return x.bfloat16()


def blocks_of(x, block):
    """Each block as a view, in the order of its scales."""
    rows, columns = x.shape
    height = {Block.STRIP: 1, Block.SQUARE: TILE, Block.LINE: 1, Block.MATRIX: rows}[block]
    width = {Block.STRIP: TILE, Block.SQUARE: TILE, Block.LINE: columns, Block.MATRIX: columns}[block]
    starts = [(row, column) for row in range(0, rows, height) for column in range(0, columns, width)]
    if block is Block.STRIP:
        starts.sort(key=lambda start: (start[1], start[0]))
    return [x[row : row + height, column : column + width] for row, column in starts]


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize("block", Block)
def test_scales_are_least_powers_of_two_and_codes_are_nearest(block, format):
    x = matrix(300, 512)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 84))
    largest = torch.finfo(format.dtype).max
    for codes, wanted in zip(cast(x, block, Sides.BOTH, format), (padded, padded.t()), strict=True):
        assert codes.values.shape == wanted.shape and codes.values.dtype == format.dtype
        found = zip(
            codes.scales.flatten().tolist(), blocks_of(wanted, block), blocks_of(codes.values, block), strict=True
        )
        for scale, values, stored in found:
            magnitude = values.abs().max().item()
            assert math.frexp(scale)[0] == 0.5
            assert magnitude <= largest * scale and (
                magnitude == 0 or magnitude > largest * scale / 2 or scale == 2**-126
            )
            nearest = (values.double() / scale).float().to(format.dtype)  # exact but for the last step
            assert stored.view(torch.uint8).equal(nearest.view(torch.uint8))


@pytest.mark.parametrize("block", Block)
def test_the_operator_is_as_compilers_expect(block):
    for sides in (Sides.PLAIN, Sides.TRANSPOSED, Sides.BOTH):
        torch.library.opcheck(
            torch.ops.patrickstar.cast_fp8.default, (matrix(300, 256), block, sides.value, Format.E4M3)
        )


def test_squares_have_the_same_codes_transposed():
    plain, turned = cast(matrix(256, 384), Block.SQUARE, Sides.BOTH)
    assert turned.values.view(torch.uint8).equal(plain.values.view(torch.uint8).t())
    assert turned.scales.equal(plain.scales.t())


def test_what_was_cast_in_squares_is_cast_again_without_a_change():
    x = matrix(256, 384).clamp(-1e30, 1e30)  # the largest bfloat16 would round to infinity
    once = cast(x, Block.SQUARE, Sides.PLAIN)[0].dequantized()
    assert once.bfloat16().float().equal(once)
    twice = cast(once.bfloat16(), Block.SQUARE, Sides.PLAIN)[0].dequantized()
    assert twice.equal(once)


@pytest.mark.parametrize("block", Block)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_reaches_the_product(block, bad):
    x = torch.ones(200, 256, dtype=torch.bfloat16)
    x[130, 7] = bad
    plain, turned = cast(x, block, Sides.BOTH)
    ones = torch.ones(128, 256)
    assert product(plain, Codes(ones.to(torch.float8_e4m3fn), torch.ones(1), Block.MATRIX), 200)[130].isnan().all()
    sums = product(turned, Codes(ones.to(torch.float8_e4m3fn), torch.ones(1), Block.MATRIX), 256)
    assert sums[7].isnan().all()
    if block in (Block.STRIP, Block.LINE):
        assert (
            product(plain, Codes(ones.to(torch.float8_e4m3fn), torch.ones(1), Block.MATRIX), 200)[129].isfinite().all()
        )


def test_modes_that_see_products_alone_leave_casts_direct():
    keeping, recalling = keep_products()
    with keeping, recalling:
        assert casting.are_operators_seen() and not casting._are_casts_seen()
        with FlopCounterMode(display=False):
            assert casting._are_casts_seen()
    assert not casting.are_operators_seen()
