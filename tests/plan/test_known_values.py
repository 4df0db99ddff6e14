"""Values on the meta device that follow from inputs."""

import pytest
import torch

from patrickstar.planning.known_values import KnownValues, ValuesMode


def test_shapes_and_numbers_follow_from_inputs():
    values = KnownValues()
    numbers, features = values.on_meta(torch.arange(6).reshape(2, 3), torch.long), torch.empty(2, 3, 4, device="meta")
    with values.keeping_numbers(), ValuesMode(values):
        mask = numbers > 2
        assert mask.is_meta and mask.tolist() == [[False] * 3, [True] * 3]
        assert features[mask].shape == (3, 4) and features[mask].is_meta
        assert features[mask.unsqueeze(-1).expand_as(features)].shape == (12,)
        assert mask.nonzero().tolist() == [[1, 0], [1, 1], [1, 2]]
        assert torch.repeat_interleave(numbers[0], numbers[0]).tolist() == [1, 2, 2]
        assert int(numbers.sum()) == 15 and bool((numbers < 6).all())
        assert torch.tensor([numbers[1, 1], 5], device="meta").tolist() == [4, 5]
        assert torch.arange(4, device="meta")[numbers[0]].tolist() == [0, 1, 2]


def test_written_values():
    values = KnownValues()
    numbers = values.on_meta(torch.arange(6).reshape(2, 3), torch.long)
    with ValuesMode(values):
        row, mask = numbers[0], numbers > 2
        numbers[0] = 7
        assert row.tolist() == [7, 7, 7] and numbers.tolist() == [[7, 7, 7], [3, 4, 5]]
        numbers.copy_(torch.empty(2, 3, dtype=torch.long, device="meta"))
        assert values.find(numbers) is None is values.find(row)
        assert mask.tolist() == [[False] * 3, [True] * 3]  # was made before


@pytest.mark.parametrize("make", [torch.empty_like, torch.rand_like], ids=["not written", "random"])
def test_shapes_that_follow_from_other_values_are_refused(make):
    values = KnownValues()
    numbers = values.on_meta(torch.arange(6.0), torch.float32)
    with ValuesMode(values):
        others = make(numbers)
        assert values.find(others) is None
        with pytest.raises(NotImplementedError):
            numbers[others > 0]
