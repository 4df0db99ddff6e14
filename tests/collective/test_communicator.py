import threading

import pytest
import torch

from patrickstar import _C
from patrickstar.ranks.distributed import open_ranks
from tests.bits import assert_same_bits, bits
from tests.distributed import run_ranks
from tests.optim.kernel_calls import CANONICAL_NAN, DTYPES, random_values


def values_of(rank, num_ranks, shard_numel, dtype, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return random_values(num_ranks * shard_numel, dtype, generator, True)


def all_gather(communicator, whole):
    communicator.all_gather(whole.data_ptr(), whole.numel() * whole.element_size() // communicator.size)


def reduce_scatter_mean(communicator, whole, shard):
    scratch = torch.empty_like(whole)
    numel = whole.numel() // communicator.size
    arguments = (whole.data_ptr(), shard.data_ptr(), scratch.data_ptr(), numel, DTYPES[whole.dtype])
    communicator.reduce_scatter_mean(*arguments)


def check_all_gather(communicator, shard_numel, dtype, seed=0):
    size, rank = communicator.size, communicator.rank
    chunks = [values_of(r, size, shard_numel, dtype, seed) for r in range(size)]
    whole = torch.zeros_like(chunks[0])
    own = slice(rank * shard_numel, (rank + 1) * shard_numel)
    whole[own] = chunks[rank][own]
    all_gather(communicator, whole)
    expected = torch.cat([chunks[r][r * shard_numel : (r + 1) * shard_numel] for r in range(size)])
    assert_same_bits(whole, expected, f"all_gather of {shard_numel} {dtype}")


def check_reduce_scatter(communicator, shard_numel, dtype, in_place, seed=0):
    size, rank = communicator.size, communicator.rank
    own = slice(rank * shard_numel, (rank + 1) * shard_numel)
    chunks = [values_of(r, size, shard_numel, dtype, seed) for r in range(size)]
    whole = chunks[rank].clone()
    shard = whole[own] if in_place else torch.empty(shard_numel, dtype=dtype)
    reduce_scatter_mean(communicator, whole, shard)
    # One rank's mean keeps the bits of any NaN.
    expected = reference(torch.cat([chunk[own] for chunk in chunks]), size) if size > 1 else chunks[0]
    assert_same_bits(shard, expected, f"mean of {shard_numel} {dtype}")


def check_collectives():
    with open_ranks(timeout_seconds=60) as ranks:
        for dtype in DTYPES:
            for shard_numel in (1, 7, 4096):
                check_all_gather(ranks.gather, shard_numel, dtype)
                for in_place in (False, True):
                    check_reduce_scatter(ranks.scatter, shard_numel, dtype, in_place)
        check_all_gather(ranks.gather, 0, torch.float32)
        data = values_of(ranks.context.rank, 1, 1200 * ranks.gather.size, torch.bfloat16)
        whole_mean = torch.empty(0, dtype=torch.bfloat16)
        for num_pieces in (1, 3):
            pieces = []
            for piece in data.view(num_pieces, -1):
                gathered = piece.clone()
                numel = gathered.numel() // ranks.gather.size
                own = gathered[ranks.gather.rank * numel : (ranks.gather.rank + 1) * numel]
                reduce_scatter_mean(ranks.scatter, gathered, own)
                all_gather(ranks.gather, gathered)
                pieces.append(gathered)
            if num_pieces == 1:
                whole_mean = torch.cat(pieces)
        assert_same_bits(torch.cat(pieces), whole_mean, "shards cut in three")
        assert ranks.gather.oldest_pending_seconds() == 0.0
        return ranks.context.rank, ranks.gather.size


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_collectives(num_ranks):
    assert run_ranks(num_ranks, check_collectives) == [(rank, num_ranks) for rank in range(num_ranks)]


def check_large():
    with open_ranks(timeout_seconds=60) as ranks:
        num_bytes = 32 << 20
        whole = torch.full((2 * num_bytes,), ranks.context.rank, dtype=torch.uint8)
        ranks.gather.all_gather(whole.data_ptr(), num_bytes)
        return bool((whole[:num_bytes] == 0).all() and (whole[num_bytes:] == 1).all())


def test_large_messages():
    assert run_ranks(2, check_large) == [True, True]


def use_from_two_threads(num_rounds):
    with open_ranks(timeout_seconds=60) as ranks:
        errors = []

        def repeat(check, communicator, *args):
            try:
                for seed in range(num_rounds):
                    check(communicator, 500, torch.bfloat16, *args, seed=seed)
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=repeat, args=(check_all_gather, ranks.gather)),
            threading.Thread(target=repeat, args=(check_reduce_scatter, ranks.scatter, False)),
        ]
        for thread in threads if ranks.context.rank % 2 else reversed(threads):
            thread.start()
        for seed in range(num_rounds):
            values = ranks.control.exchange(b"x" * seed + bytes([ranks.context.rank]))
            assert values == [b"x" * seed + bytes([rank]) for rank in range(ranks.control.size)]
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def test_communicators_in_two_threads_do_not_mix():
    run_ranks(2, use_from_two_threads, 100)


def exchange_values():
    with open_ranks(timeout_seconds=60) as ranks:
        rank = ranks.context.rank
        first = ranks.control.exchange(bytes(range(256)) * (1000 * rank))
        second = ranks.control.exchange(b"")
        third = ranks.control.exchange(f"rank {rank}".encode())
        return [len(value) for value in first], second, third


def test_exchange():
    for lengths, empty, names in run_ranks(4, exchange_values):
        assert lengths == [0, 256_000, 512_000, 768_000]
        assert empty == [b""] * 4
        assert names == [b"rank 0", b"rank 1", b"rank 2", b"rank 3"]


def test_an_unknown_group_is_refused():
    with pytest.raises(ValueError, match='no group "nobody"'):
        _C.collective.make_c10d_communicator("nobody")
    with pytest.raises(ValueError, match="timeout_seconds is 0"):
        _C.collective.make_c10d_control("nobody", 0)


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
