import os
import signal

import pytest
import torch

from patrickstar.ranks.distributed import open_ranks
from patrickstar.ranks.exchanges import open_exchanges
from patrickstar.ranks.mesh import Mesh, MeshRanks
from patrickstar.sequence import Mode, SequenceGroup
from tests.collective.test_exchange import ROUNDS, addresses, random_messages
from tests.distributed import rank_outcomes, run_ranks
from tests.gpu.test_ranks import NUM_RANKS, TIMEOUT_SECONDS, see_gpus
from tests.gpu.test_shared_gpu import see_one_gpu
from tests.sequence.test_attention import CASES, dense, sharded

pytestmark = pytest.mark.gpu

NUM_NCCL_RANKS = min(NUM_RANKS, 4)
NUMEL = 8 << 20
SHORT_SLEEP, LONG_SLEEP = 2_000_000, 100_000_000  # cycles: about 1 and 50 ms


@pytest.fixture(
    params=[
        pytest.param("nccl", marks=pytest.mark.skipif(NUM_RANKS < 2, reason="NCCL needs a GPU for each rank")),
        "one GPU",
    ]
)
def on_gpus(request):
    return (NUM_NCCL_RANKS, None, see_gpus) if request.param == "nccl" else (3, 0, see_one_gpu)


def run(on_gpus, function, *args):
    num_ranks, device_index, environment = on_gpus
    return run_ranks(num_ranks, function, device_index, *args, timeout_seconds=300, environment=environment)


def open_on(device_index, timeout_seconds=60):
    ranks = open_ranks(device_type="cuda", device_index=device_index, timeout_seconds=timeout_seconds)
    torch.cuda.set_device(ranks.context.device)
    return ranks


def exchange_at_random(device_index):
    with open_on(device_index) as ranks:
        group = ranks.open_communicator("a test")
        rounds = []
        for seed in range(ROUNDS):
            messages = random_messages(group.size, seed)
            torch.cuda._sleep(SHORT_SLEEP)
            sends = [(end, values.cuda(non_blocking=True)) for start, end, values in messages if start == group.rank]
            expected = [(start, values) for start, end, values in messages if end == group.rank]
            receives = [(start, torch.full_like(values, 77, device="cuda")) for start, values in expected]
            group.exchange(addresses(sends), addresses(receives))
            rounds.append((sends, expected, receives))
        torch.cuda.synchronize()
        group.check()
        assert group.oldest_pending_seconds() == 0.0
        for seed, (_, expected, receives) in enumerate(rounds):
            for (start, values), (_, got) in zip(expected, receives, strict=True):
                assert torch.equal(got.cpu(), values), f"round {seed}: {values.numel()} bytes from rank {start}"


def test_any_messages(on_gpus):
    run(on_gpus, exchange_at_random)


def ring(exchanges, value):
    sent = torch.full((NUMEL,), float(value), device="cuda")
    received = torch.full((NUMEL,), -7.0, device="cuda")
    after, before = (exchanges.rank + 1) % exchanges.size, (exchanges.rank - 1) % exchanges.size
    return exchanges.begin([(after, sent)], [(before, received)]), received


def overwrite():
    return [torch.full((NUMEL,), -1.0, device="cuda") for _ in range(4)]


def is_untouched(trash):
    return all(bool((values == -1.0).all()) for values in trash)


def compute_meanwhile(device_index):
    with open_on(device_index) as ranks:
        exchanges = open_exchanges(ranks, "a ring")
        before = (exchanges.rank - 1) % exchanges.size
        for index in range(20):
            torch.cuda._sleep(LONG_SLEEP if index % exchanges.size == exchanges.rank else SHORT_SLEEP)
            pending, received = ring(exchanges, 100 * index + exchanges.rank)
            trash = overwrite()  # must not overwrite data in transit
            pending.wait()
            got = received + 0.0
            del received, pending
            trash += overwrite()
            assert bool((got == 100 * index + before).all()) and is_untouched(trash), f"round {index}"


def test_memory_is_kept_until_the_wait(on_gpus):
    run(on_gpus, compute_meanwhile)


def wait_elsewhere(device_index):
    with open_on(device_index) as ranks:
        exchanges = open_exchanges(ranks, "a ring")
        before = (exchanges.rank - 1) % exchanges.size
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        for index in range(10):
            with torch.cuda.stream(first):
                torch.cuda._sleep(LONG_SLEEP if index % exchanges.size == exchanges.rank else SHORT_SLEEP)
                pending, received = ring(exchanges, 100 * index + exchanges.rank)
            with torch.cuda.stream(second):
                pending.wait()
                torch.cuda._sleep(SHORT_SLEEP)
                got = received + 0.0
            del received, pending
            with torch.cuda.stream(first):
                trash = overwrite()
            torch.cuda.synchronize()
            assert bool((got == 100 * index + before).all()) and is_untouched(trash), f"round {index}"


def test_another_stream_may_wait(on_gpus):
    run(on_gpus, wait_elsewhere)


def forget_to_wait(device_index):
    with open_on(device_index) as ranks:
        exchanges = open_exchanges(ranks, "a ring")
        before = (exchanges.rank - 1) % exchanges.size
        for index in range(10):
            if exchanges.rank % 2:
                torch.cuda._sleep(LONG_SLEEP)
            pending, received = ring(exchanges, 100 * index + exchanges.rank)
            if exchanges.rank % 2:
                pending.wait()
                assert bool((received == 100 * index + before).all()), f"round {index}"
            del pending, received
            trash = overwrite()
            torch.cuda.synchronize()
            assert is_untouched(trash), f"round {index}"


def test_what_nobody_waits_for_keeps_its_memory(on_gpus):
    run(on_gpus, forget_to_wait)


def attend(device_index):
    with open_on(device_index) as ranks:
        group = SequenceGroup.of_ranks(ranks)
        found = {}
        for name in ("grouped dropout", "padded and packed"):
            expected = dense(CASES[name])
            for mode in (Mode.RSA, Mode.RING, Mode.ZIGZAG, Mode.ULYSSES):
                here, got = sharded(CASES[name], mode, group, device="cuda")
                gaps = [(part.cpu() - all_[:, :, here]).abs().max() for part, all_ in zip(got, expected, strict=True)]
                found[name, mode.value] = max(gaps).item()
        return found


def test_attention(on_gpus):
    for found in run(on_gpus, attend):
        print(found)
        assert max(found.values()) < 1e-10


def exchange_along_each_axis(device_index):
    with open_on(device_index) as world_group:
        ranks = MeshRanks(world_group, Mesh(data=len(world_group.members) // 2, sequence=2))
        along = {axis: open_exchanges(ranks.along(axis), axis) for axis in ("data", "sequence")}
        for index in range(20):
            begun = {}
            for axis in sorted(along, reverse=world_group.context.rank % 2 == 1):
                begun[axis] = ring(along[axis], index + world_group.context.rank) if along[axis].size > 1 else None
            for axis, exchange in begun.items():
                if exchange is None:
                    continue
                pending, received = exchange
                pending.wait()
                members = ranks.along(axis).members
                expected = index + members[ranks.along(axis).rank - 1]
                assert bool((received == expected).all()), f"round {index} along {axis}"


@pytest.mark.skipif(NUM_RANKS < 2, reason="NCCL needs a GPU for each rank")
def test_axes_over_nccl():
    run((NUM_NCCL_RANKS // 2 * 2, None, see_gpus), exchange_along_each_axis)


def test_axes_on_one_gpu():
    run((4, 0, see_one_gpu), exchange_along_each_axis)


def lose_the_last_rank(device_index):
    with open_on(device_index, TIMEOUT_SECONDS) as ranks:
        exchanges = open_exchanges(ranks, "a ring")
        for index in range(1000):
            with ranks.guard(f"round {index}"):
                if index == 10 and exchanges.rank == exchanges.size - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                pending, received = ring(exchanges, index)
                pending.wait()
                received.sum().item()


def test_a_killed_rank(on_gpus):
    num_ranks, device_index, environment = on_gpus
    outcomes = rank_outcomes(num_ranks, lose_the_last_rank, device_index, timeout_seconds=180, environment=environment)
    assert outcomes[-1].returncode == -signal.SIGKILL
    for outcome in outcomes[:-1]:
        print(outcome.error)
        assert outcome.error.startswith("RankFailure: ") and f"rank {num_ranks - 1}" in outcome.error
