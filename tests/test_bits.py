import math

import pytest
import torch

from tests.bits import assert_same_bits, first_difference

NAN = torch.tensor([math.nan])
SAME = [
    (NAN, NAN.clone()),
    (math.nan, math.nan),
    (torch.ones(2, 3).t(), torch.ones(3, 2)),
    (torch.empty(0, 4), torch.empty(0, 4)),
    (torch.tensor(1 + 2j), torch.tensor(1 + 2j)),
    ({"a": [torch.tensor(True), 1.0, "x"]}, {"a": [torch.tensor(True), 1.0, "x"]}),
    (torch.tensor([1.5]).to(torch.float8_e4m3fn), torch.tensor([1.5]).to(torch.float8_e4m3fn)),
]
DIFFERENT = [
    (torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, -0.0]]), r"1 of 2 elements differ, first \[0, 1\]: 0\.0 \(0x0\)"),
    (NAN, -NAN, "1 of 1"),
    (torch.tensor([1 + 2j, 1j]), torch.tensor([1 + 2j, -1j]), "1 of 2"),
    (torch.ones(2), torch.ones(2, 1), r"\(2,\), expected torch.float32 \(2, 1\)"),
    (torch.ones(2), torch.ones(2).half(), "torch.float16"),
    (torch.ones(1), [1.0], "expected"),
    (0.0, -0.0, "0x0.0p"),
    (1, True, "1, expected True"),
    (1, 1.0, "1, expected 1.0"),
    ({"a": 1}, {"a": 1, "b": 2}, "keys"),
    ([1], (1,), "expected"),
    ({"a": [NAN, torch.zeros(1)]}, {"a": [NAN, torch.ones(1)]}, r"values\['a'\]\[1\]: 1 of 1"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_the_same(one, other):
    assert_same_bits(one, other)


@pytest.mark.parametrize(("one", "other", "message"), DIFFERENT)
def test_different(one, other, message):
    with pytest.raises(AssertionError, match=message):
        assert_same_bits(one, other)
    assert first_difference(other, one) is not None
