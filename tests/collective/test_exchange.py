import os
import random
import signal
import threading
import time

import pytest
import torch

from patrickstar import _C
from patrickstar.ranks.distributed import open_ranks
from patrickstar.ranks.exchanges import open_exchanges
from patrickstar.ranks.failures import DisagreementError
from tests.collective.test_failures import PATIENCE_SECONDS, TIMEOUT_SECONDS, kill_self, raise_error, survivors
from tests.distributed import rank_outcomes, run_ranks

ROUNDS = 30
SIZES = (0, 1, 7, 4096, 100_003)


def random_messages(size, seed):
    choose = random.Random(seed)
    pairs = []
    if seed % 2:
        order = choose.sample(range(size), size)
        pairs = [pair for pair in zip(range(size), order, strict=True) for _ in range(3)]
    elif seed % 3:
        pairs = [(choose.randrange(size), choose.randrange(size)) for _ in range(choose.randrange(12))]
    return [
        (start, end, torch.full((choose.choice(SIZES),), choose.randrange(256), dtype=torch.uint8))
        for start, end in pairs
        if start != end
    ]


def addresses(messages):
    return [(peer, tensor.data_ptr(), tensor.numel() * tensor.element_size()) for peer, tensor in messages]


def exchange_at_random():
    with open_ranks(timeout_seconds=60) as ranks:
        group = ranks.open_communicator("a test")
        count = 0
        for seed in range(ROUNDS):
            messages = random_messages(group.size, seed)
            sends = [(end, values) for start, end, values in messages if start == group.rank]
            expected = [(start, values) for start, end, values in messages if end == group.rank]
            receives = [(start, torch.full_like(values, 77)) for start, values in expected]
            group.exchange(addresses(sends), addresses(receives))
            for (start, values), (_, got) in zip(expected, receives, strict=True):
                assert torch.equal(got, values), f"round {seed}: {values.numel()} bytes from rank {start}"
            count += len(receives)
        assert group.oldest_pending_seconds() == 0.0
        return count


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_any_messages(num_ranks):
    expected = [0] * num_ranks
    for seed in range(ROUNDS):
        for _, end, _ in random_messages(num_ranks, seed):
            expected[end] += 1
    assert run_ranks(num_ranks, exchange_at_random) == expected
    assert num_ranks == 1 or min(expected) > ROUNDS


def exchange_much():
    with open_ranks(timeout_seconds=60) as ranks:
        group = ranks.gather
        others = [rank for rank in range(group.size) if rank != group.rank]
        mine = torch.full((8 << 20,), group.rank, dtype=torch.uint8)
        theirs = [(rank, torch.full_like(mine, 77)) for rank in others for _ in range(2)]
        group.exchange(addresses([(rank, mine) for rank in others for _ in range(2)]), addresses(theirs))
        return all(bool((values == rank).all()) for rank, values in theirs)


def test_large_messages_from_all_to_all():
    assert run_ranks(3, exchange_much) == [True] * 3


def refuse_wrong_messages():
    with open_ranks(timeout_seconds=60) as ranks:
        texts = []
        for peer, num_bytes in ((ranks.context.rank, 4), (2, 4), (-1, 4), (1 - ranks.context.rank, -4)):
            for messages in (([(peer, 0, num_bytes)], []), ([], [(peer, 0, num_bytes)])):
                with pytest.raises(ValueError) as error:
                    ranks.gather.exchange(*messages)
                texts.append(str(error.value))
        return texts


def test_who_is_no_other_rank_is_refused():
    texts = run_ranks(2, refuse_wrong_messages)[0]
    assert texts[0] == "an exchange sends to rank 0, on rank 0 of 2; give another rank, from 0 to 1"
    assert texts[1] == "an exchange receives from rank 0, on rank 0 of 2; give another rank, from 0 to 1"
    assert texts[-1] == "an exchange receives from rank 1 a message of -4 bytes; give at least 0"


def test_one_rank_alone_has_nobody_to_talk_to():
    group = _C.collective.make_single_communicator()
    group.exchange([], [])
    with pytest.raises(ValueError, match="sends to rank 0, but the group has one rank; leave the exchange out"):
        group.exchange([(0, 0, 0)], [])


def exchange_forever(at_round_ten):
    """Runs in a ring of three, on its own queue; rank 2 calls `at_round_ten()` in the tenth round."""
    with open_ranks(timeout_seconds=TIMEOUT_SECONDS) as ranks:
        exchanges = open_exchanges(ranks, "a ring")
        mine, theirs = torch.zeros(2, 1000)
        for index in range(1000):
            with ranks.guard(f"round {index}"):
                if index == 10 and ranks.context.rank == 2:
                    at_round_ten()
                exchanges.begin(
                    [((exchanges.rank + 1) % exchanges.size, mine)], [((exchanges.rank - 1) % exchanges.size, theirs)]
                ).wait()
            time.sleep(0.001)


def test_a_killed_rank():
    outcomes = rank_outcomes(4, exchange_forever, kill_self, timeout_seconds=PATIENCE_SECONDS)
    assert outcomes[2].returncode == -signal.SIGKILL
    for outcome in survivors(outcomes, 2):
        print(outcome.error)
        assert outcome.error.startswith("RankFailure: ")
        assert "rank 2 of 4 failed rank" in outcome.error and "in exchange" in outcome.error


def test_a_rank_that_raises():
    outcomes = rank_outcomes(3, exchange_forever, raise_error, timeout_seconds=PATIENCE_SECONDS)
    assert outcomes[2].error == "ValueError: the batch is bad"
    for outcome in survivors(outcomes, 2):
        print(outcome.error)
        assert "rank 2: ValueError: the batch is bad (round 10)" in outcome.error


def stay_away():
    with open_ranks(timeout_seconds=2) as ranks:
        exchanges = open_exchanges(ranks, "a pair")
        if ranks.context.rank == 1:
            time.sleep(7)
            return
        with ranks.guard("the exchange"):
            exchanges.begin([], [(1, torch.zeros(4))]).wait()


def test_a_rank_that_does_not_take_part():
    outcomes = rank_outcomes(2, stay_away, timeout_seconds=PATIENCE_SECONDS)
    print(outcomes[0].error)
    assert outcomes[0].error.startswith("RankFailure: ") and "rank 1" in outcomes[0].error
    assert outcomes[0].seconds < outcomes[1].seconds  # it does not wait for the other to come


def abort_from_a_thread():
    with open_ranks(timeout_seconds=1000) as ranks:
        group = ranks.open_communicator("a test")
        if ranks.context.rank == 0:
            threading.Timer(0.5, group.abort).start()
            for _ in range(2):
                with pytest.raises(_C.RankFailure, match="aborted on this rank"):
                    group.exchange([], [(1, torch.zeros(1).data_ptr(), 4)])
        ranks.control.exchange(b"")


def test_abort_ends_an_exchange_of_another_thread():
    run_ranks(2, abort_from_a_thread, timeout_seconds=PATIENCE_SECONDS)


def begin_and_compute():
    with open_ranks(timeout_seconds=60) as ranks:
        exchanges = open_exchanges(ranks, "a pair")
        other = 1 - exchanges.rank
        pending = []
        for index in range(20):
            got = torch.full((1000 * index,), -1.0)
            sent = torch.full((1000 * index,), 10.0 * index + exchanges.rank)
            pending.append((exchanges.begin([(other, sent)], [(other, got)]), got))
            del sent
        for index, (exchange, got) in enumerate(pending):
            exchange.wait()
            assert torch.equal(got, torch.full((1000 * index,), 10.0 * index + other))
        exchange.wait()  # again: nothing
        with pytest.raises(ValueError, match="give another rank"):
            exchanges.begin([(exchanges.rank, got)], []).wait()


def test_exchanges_wait_for_each_other_and_not_for_their_rank():
    run_ranks(2, begin_and_compute)


def open_some(members_of):
    with open_ranks(timeout_seconds=60) as ranks:
        group = ranks.open_communicator("a test", members_of[ranks.context.rank])
        others = [rank for rank in range(group.size) if rank != group.rank]
        mine = torch.tensor([ranks.context.rank])
        theirs = [(rank, torch.tensor([-1])) for rank in others]
        group.exchange(addresses([(rank, mine) for rank in others]), addresses(theirs))
        return group.rank, group.size, [int(values) for _, values in theirs]


def test_a_communicator_of_some_ranks():
    members_of = [(0, 3), (1, 2), (2, 1), (0, 3)]
    assert run_ranks(4, open_some, members_of) == [(0, 2, [3]), (0, 2, [2]), (1, 2, [1]), (1, 2, [0])]
    assert run_ranks(3, open_some, [(0, 2), (1,), (0, 2)]) == [(0, 2, [2]), (0, 1, []), (1, 2, [0])]


def open_with_different_ones():
    with open_ranks(timeout_seconds=60) as ranks:
        rank = ranks.context.rank
        texts = []
        for members in ([rank + 1], [rank, 7]):
            with pytest.raises(ValueError) as error:
                ranks.open_communicator("a test", members)
            texts.append(str(error.value))
        with pytest.raises(DisagreementError) as error:
            ranks.open_communicator("a test", [0, 1] if rank == 0 else [0, 1, 2][rank - 1 :])
        return [*texts, str(error.value)]


def test_members_that_do_not_go_together_are_refused_on_all_ranks():
    by_rank = run_ranks(3, open_with_different_ones)
    assert len({texts[2] for texts in by_rank}) == 1
    not_here, not_there, different = by_rank[0]
    assert not_here.startswith("rank 0 opens a communicator for a test with rank 1, but the groups are of ranks 0-2;")
    assert "with ranks 0, 7, but the groups are of ranks 0-2" in not_there
    assert different == (
        "ranks share the communicator for a test with different ones (rank 0 with ranks 0-1; rank 1 with ranks 0-2; "
        "rank 2 with ranks 1-2); give the same members on each of them"
    )


def lose_one_of_a_pair():
    with open_ranks(timeout_seconds=TIMEOUT_SECONDS) as ranks:
        rank = ranks.context.rank
        group = ranks.open_communicator("a pair", (rank // 2 * 2, rank // 2 * 2 + 1))
        other = 1 - group.rank
        mine, theirs = torch.zeros(2, 1000)
        for index in range(100_000):
            with ranks.guard(f"round {index}"):
                if index == 10 and rank == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                group.exchange(addresses([(other, mine)]), addresses([(other, theirs)]))
            time.sleep(0.001)


def test_a_rank_that_dies_in_a_group_of_some_ends_all():
    outcomes = rank_outcomes(4, lose_one_of_a_pair, timeout_seconds=PATIENCE_SECONDS)
    for outcome in survivors(outcomes, 3):
        print(outcome.error)
        assert outcome.error.startswith("RankFailure: ")
        assert "rank 3 of a group of 2 failed rank 2 in exchange" in outcome.error
