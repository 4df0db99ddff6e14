import math

import pytest

from patrickstar.tensor2d import Sent
from patrickstar.tensor2d.cost import LayerShape, Mode, choose, crossing_tokens, received_1d, received_2d

H = 1024
GPT = LayerShape(hidden=H)


def test_elements_of_square_meshes():
    for q in (1, 2, 4, 8):
        tokens, p = 48 * H, q * q
        published = received_2d(GPT, tokens, q, q, Sent.INPUT)
        assert published.forward == (q - 1) / q**2 * (7 * tokens * H + 12 * H**2)
        assert published.backward == 2 * published.forward
        assert received_2d(GPT, tokens, q, q).forward == (q - 1) / q**2 * (4 * tokens * H + 12 * H**2)
        one = received_1d(GPT, tokens, p)
        assert one.forward == 4 * (p - 1) / p * tokens * H and one.total == 2.5 * one.forward


def test_where_one_dimension_and_two_cross():
    assert crossing_tokens(GPT, 2, 2, Sent.INPUT) == pytest.approx(2.4 * H)
    assert crossing_tokens(GPT, 4, 4, Sent.INPUT) == pytest.approx(12 / 13 * H)  # 0.92 h
    assert crossing_tokens(GPT, 2, 2) == pytest.approx(1.5 * H)
    assert crossing_tokens(GPT, 4, 4) == pytest.approx(0.75 * H)
    assert crossing_tokens(GPT, 2, 2, passes="total") == pytest.approx(9 / 4.5 * H)
    assert crossing_tokens(GPT, 2, 1) == pytest.approx(3 * H)
    assert crossing_tokens(GPT, 1, 2, Sent.INPUT) == math.inf  # 3.5 bsh and 2 bsh
    assert crossing_tokens(GPT, 1, 2) == math.inf  # the same 2 bsh
    for rows, columns in ((2, 2), (2, 4), (4, 2), (4, 4)):
        tokens = crossing_tokens(GPT, rows, columns, passes="total")
        for factor in (0.99, 1.01):
            one = received_1d(GPT, factor * tokens, rows * columns).total
            assert (received_2d(GPT, factor * tokens, rows, columns).total < one) == (factor > 1)


def test_llama_layers_are_counted():
    llama = LayerShape(hidden=4096, intermediate=14336, keys=1024, is_gated=True)
    assert sum(m * n for m, n in llama.linears()) == 4096 * (4096 + 2048 + 4096 + 3 * 14336)
    assert received_2d(llama, 100, 1, 2).forward == 4 * 100 * 4096 / 2


def test_choices_say_why():
    few = choose(GPT, batch=4, length=128, heads=16, ranks=4)
    assert (few.mode, few.rows, few.columns) == (Mode.ONE, 1, 4)
    assert few.received_bytes == 2 * received_1d(GPT, 512, 4).total
    many = choose(GPT, batch=16, length=1024, heads=16, ranks=4)
    assert (many.mode, many.rows, many.columns) == (Mode.TWO, 4, 1)
    assert "16384 tokens are 16 times the hidden size" in many.reason and "one dimension 240 MiB" in many.reason
    assert choose(GPT, batch=2, length=8192, heads=16, ranks=4).rows == 2  # as many rows as samples
    assert "4 x 1 (samples: 2)" in choose(GPT, batch=2, length=8192, heads=16, ranks=4).reason
    only = {mode: choose(GPT, batch=16, length=1024, heads=16, ranks=4, mode=mode) for mode in Mode}
    assert {mode: (found.mode, found.rows, found.columns) for mode, found in only.items()} == {
        Mode.ONE: (Mode.ONE, 1, 4),
        Mode.TWO: (Mode.TWO, 4, 1),
    }
    assert "one dimension" not in only[Mode.TWO].reason and " x " not in only[Mode.ONE].reason
    heads = choose(GPT, batch=4, length=1024, heads=6, ranks=4)
    assert (heads.rows, heads.columns) == (2, 2) and "1 x 4 (heads: 6, of keys 6)" in heads.reason
    with pytest.raises(ValueError, match="cannot be divided among 4 ranks: .*heads: 3.*samples: 5"):
        choose(GPT, batch=5, length=1024, heads=3, ranks=4)
