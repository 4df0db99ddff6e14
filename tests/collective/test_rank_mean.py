import pytest
import torch

from patrickstar import _C
from tests.bits import assert_same_bits, bits
from tests.optim.kernel_calls import CANONICAL_NAN, DTYPES, random_values


def mean_of_ranks(shards, num_ranks, out=None):
    numel = shards.numel() // num_ranks
    out = torch.empty(numel, dtype=shards.dtype) if out is None else out
    _C.collective.mean_of_ranks(shards.data_ptr(), num_ranks, out.data_ptr(), DTYPES[shards.dtype], numel)
    return out


def reference(shards, num_ranks):
    rows = shards.view(num_ranks, -1).float()
    total = rows[0].clone()
    for row in rows[1:]:
        total = total + row
    mean = (total * torch.tensor(1.0 / num_ranks, dtype=torch.float32)).to(shards.dtype)
    canonical = torch.tensor([CANONICAL_NAN[mean.dtype]]).to(bits(mean).dtype).view(mean.dtype)
    return torch.where(mean.isnan(), canonical, mean)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("wild", [False, True])
def test_bits(dtype, num_ranks, wild):
    for numel in (1, 15, 1023, 1024, 2500):
        generator = torch.Generator().manual_seed(numel + num_ranks)
        shards = random_values(num_ranks * numel, dtype, generator, wild)
        assert_same_bits(mean_of_ranks(shards, num_ranks), reference(shards, num_ranks), f"{num_ranks} x {numel}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_precision(dtype):
    shards = random_values(6 * 5000, dtype, torch.Generator().manual_seed(0), False)
    exact = shards.view(6, -1).double().mean(0)
    error = (mean_of_ranks(shards, 6).double() - exact).abs() / shards.view(6, -1).double().abs().amax(0)
    print(f"{dtype}: largest error {error.max():.2e} of the largest summand")
    assert error.max() < max(torch.finfo(dtype).eps, 4 * torch.finfo(torch.float32).eps)


def test_the_order_is_that_of_ranks():
    shards = torch.tensor([1e8, 1.0, -1e8])
    assert mean_of_ranks(shards, 3).item() == 0.0
    assert mean_of_ranks(shards[[0, 2, 1]].clone(), 3).item() == torch.tensor(1.0 / 3).item()


def test_the_result_may_take_a_shards_place():
    shards = torch.randn(3 * 1000)
    expected = mean_of_ranks(shards.clone(), 3)
    for rank in range(3):
        memory = shards.clone()
        assert_same_bits(mean_of_ranks(memory, 3, memory[rank * 1000 : (rank + 1) * 1000]), expected, f"shard {rank}")


def test_flushing_of_denormals_stays_out():
    shards = torch.full((2 * 100,), 1e-40)
    expected = mean_of_ranks(shards, 2)
    if torch.set_flush_denormal(True):
        try:
            assert_same_bits(mean_of_ranks(shards, 2), expected, "denormals")
        finally:
            torch.set_flush_denormal(False)
    assert expected[0].item() == pytest.approx(1e-40, rel=1e-4)


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="num_ranks is 0"):
        _C.collective.mean_of_ranks(0, 0, 0, _C.DType.FLOAT32, 0)
