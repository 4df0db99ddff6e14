import math

import pytest
import torch

from patrickstar.fp8.casting import TILE, Block, Sides, cast
from patrickstar.fp8.grouped import (
    Groups,
    cast_rows,
    cast_turned_weights,
    cast_weights,
    gathered,
    multiply,
    multiply_columns,
    turn,
)

ENDS = [0, 7, 7, 200, 201, 475]
"""Groups that are empty, of one row, and no multiples of 16."""


def values(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return (x * 2.0 ** torch.randint(-6, 6, (*shape[:-1], 1), generator=generator)).bfloat16()


def groups_of(ends, device="cpu"):
    ends = torch.tensor(ends, dtype=torch.int32, device=device)
    return Groups.of(ends, int(ends[-1]))


def parts(ends):
    return list(zip([0, *ends], ends, strict=False))


def same(codes, others):
    return codes.values.view(torch.uint8).equal(others.values.view(torch.uint8)) and codes.scales.equal(others.scales)


def test_rows_have_the_codes_of_whole_lines():
    x = values(300, 256)
    x[3, 5], x[4, 7], x[5] = math.inf, math.nan, 0.0
    whole = cast(x, Block.LINE, Sides.PLAIN)[0]
    codes = cast_rows(x)
    assert codes.values.view(torch.uint8).equal(whole.values.view(torch.uint8)[:300])
    assert torch.equal(codes.scales.nan_to_num(), whole.scales[:300].nan_to_num())
    assert codes.scales.isnan().nonzero().flatten().tolist() == [3, 4]


def test_groups_are_padded_so_that_products_can_sum_over_their_rows():
    groups = groups_of(ENDS)
    assert groups.padded_ends.tolist() == [128, 256, 384, 640, 768, 1152]
    assert groups.num_tiles * TILE >= 1152 and groups.padded_ends.dtype is torch.int32


@pytest.mark.parametrize("spread", [0, 12])
def test_columns_have_the_codes_of_each_groups_own_matrix(spread):
    """Rounding to codes of rows first changes only values far below the largest of their rows."""
    x = torch.randn(475, 128).bfloat16()
    x *= 2.0 ** -torch.linspace(0, spread, 128)
    groups, rows = groups_of(ENDS), cast_rows(x)
    columns = turn(rows, groups)
    direct = rows.dequantized().bfloat16()
    begin = 0
    for group, (first, end) in enumerate(parts(ENDS)):
        size = max(end - first, 1)
        found = columns.values[:, begin : begin + TILE * math.ceil(size / TILE)]
        begin += found.size(1)
        if first == end:
            assert not found.view(torch.uint8).any() and columns.scales[group].eq(1).all()
            continue
        wanted = cast(direct[first:end], Block.LINE, Sides.TRANSPOSED)[1]
        assert found.view(torch.uint8).equal(wanted.values.view(torch.uint8))
        assert columns.scales[group].equal(wanted.scales)
        if spread == 0:
            of_x = cast(x[first:end], Block.LINE, Sides.TRANSPOSED)[1].dequantized()
            error = (wanted.dequantized() - of_x).norm() / of_x.norm()
            assert error < 1e-3  # values at which a power of two begins


def test_rows_are_gathered_as_they_are_turned():
    groups, tokens = groups_of(ENDS), cast_rows(values(60, 128))
    sources = torch.randint(60, (475,), generator=torch.Generator().manual_seed(1))
    assert same(turn(tokens, groups, sources), turn(gathered(tokens, sources), groups))


def test_weights_have_the_codes_of_each_matrix():
    weights = values(3, 256, 128)
    plain, turned = cast_weights(weights), cast_turned_weights(weights)
    for group, matrix in enumerate(weights):
        by_rows, by_columns = cast(matrix, Block.LINE, Sides.BOTH)
        for codes, wanted in ((plain, by_rows), (turned, by_columns)):
            assert codes.values[group].contiguous().view(torch.uint8).equal(wanted.values.view(torch.uint8))
            assert codes.scales[group].equal(wanted.scales)


@pytest.mark.parametrize("ends", [ENDS, [475], [0, 0, 1]])
def test_products_are_those_of_each_groups_values(ends):
    groups, x, grad = groups_of(ends), values(ends[-1], 256), values(ends[-1], 128, seed=1)
    weights = values(len(ends), 128, 256, seed=2)
    rows, grads = cast_rows(x), cast_rows(grad)
    plain, turned = cast_weights(weights), cast_turned_weights(weights)
    x_columns, grad_columns = turn(rows, groups), turn(grads, groups)
    forward, back = multiply(rows, plain, groups), multiply(grads, turned, groups)
    sums = multiply_columns(grad_columns, x_columns, groups)
    assert forward.shape == (ends[-1], 128) and back.shape == x.shape and sums.shape == weights.shape
    begin = 0
    for group, (first, end) in enumerate(parts(ends)):
        columns = slice(begin, int(groups.padded_ends[group]))
        begin = columns.stop
        matrices = [
            codes.values[group].double() * codes.scales[group].double().unsqueeze(1) for codes in (plain, turned)
        ]
        pair = [
            codes.values[:, columns].double() * codes.scales[group].double().unsqueeze(1)
            for codes in (grad_columns, x_columns)
        ]
        for found, exact in (
            (forward[first:end], rows.dequantized()[first:end].double() @ matrices[0].t()),
            (back[first:end], grads.dequantized()[first:end].double() @ matrices[1].t()),
            (sums[group], pair[0] @ pair[1].t()),
        ):
            assert (found.double() - exact).norm() <= 0.003 * exact.norm()


def test_pytorchs_kernel_accepts_shapes_and_strides():
    """The meta device checks what the GPU's kernel checks."""
    groups, rows = groups_of(ENDS, "cpu"), 475
    groups = Groups(groups.ends.to("meta"), groups.padded_ends.to("meta"), groups.num_tiles)
    x, grad = (torch.empty(rows, size, dtype=torch.bfloat16, device="meta") for size in (256, 128))
    weights = torch.empty(6, 128, 256, dtype=torch.bfloat16, device="meta")
    assert multiply(cast_rows(x), cast_weights(weights), groups).shape == (rows, 128)
    assert multiply(cast_rows(grad), cast_turned_weights(weights), groups).shape == (rows, 256)
    assert multiply_columns(turn(cast_rows(grad), groups), turn(cast_rows(x), groups), groups).shape == weights.shape


def test_the_operators_are_as_compilers_expect():
    groups, codes, sources = groups_of(ENDS), cast_rows(values(60, 128)), torch.randint(60, (475,))
    torch.library.opcheck(torch.ops.patrickstar.cast_fp8_rows.default, (values(60, 128),))
    turned = torch.ops.patrickstar.turn_fp8.default
    for arguments, utilities in (
        ((codes.values, codes.scales, sources), ("test_faketensor",)),  # the others compute with arguments of any dtype
        ((values(475, 128), None, None), ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")),
    ):
        of_groups = (groups.ends, groups.padded_ends, groups.num_tiles)
        torch.library.opcheck(turned, (*arguments, *of_groups), test_utils=utilities)
