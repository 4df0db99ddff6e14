import threading

import pytest
import torch

from patrickstar import _C
from patrickstar.ranks.distributed import open_ranks
from tests.bits import assert_same_bits
from tests.collective.test_rank_mean import reference
from tests.distributed import run_ranks
from tests.optim.kernel_calls import DTYPES, random_values


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
    # One rank's mean is what it has, whatever NaN that is.
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
        # The same data in shards cut elsewhere: the same bits.
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
