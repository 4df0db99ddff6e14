import dataclasses
import re

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import patrickstar
from patrickstar.config import parse_config
from patrickstar.elastic import ElasticSampler, Rendezvous, ResizeError, ResizePhase, serve_rendezvous
from patrickstar.elastic.rendezvous import REFUSAL
from patrickstar.integrations.transformers import PatrickStarTrainer
from patrickstar.resize.memory import MemoryFacts, check_copies, expected_budgets
from patrickstar.runtime import initialize_engine
from patrickstar.sizes import show_size
from tests.distributed import run_ranks
from tests.elastic.runs import DEVICE_MEMORY, build, join_another_run, shrink_into_too_little, state_of
from tests.elastic.test_resize import ALONE, assert_same
from tests.integrations.trainer_runs import Tokens, arguments, engine_config, gpt2
from tests.training import make_config


def test_an_engine_that_is_refused_a_resize_goes_on(tmp_path):
    engine, optimizer = initialize_engine(build, 0, make_config(default_chunk_size=16384))
    with engine:
        inputs = torch.randn(4, 16)
        engine.backward(engine(inputs).square().mean())
        with pytest.raises(patrickstar.StateError, match="between backward and step"):
            engine.resize(1)
        optimizer.step()
        before = state_of(engine, optimizer)
        with pytest.raises(ResizeError, match="5 ranks"):
            engine.resize(5, user_state={"sampler": ElasticSampler(100, 12, 3)}, rendezvous="127.0.0.1:1")
        with pytest.raises(ResizeError, match="PATRICKSTAR_ELASTIC"):
            engine.resize(2)
        with pytest.raises(ResizeError, match="1 processes were to join and 0 came within 0.1 s"):
            store = serve_rendezvous("127.0.0.1", 0)
            engine.resize(2, rendezvous=f"127.0.0.1:{store.port}", timeout_seconds=0.1)
        with pytest.raises(ResizeError, match="No such file"):
            engine.resize(1, folder=str(tmp_path / "missing"))
        with pytest.raises(ValueError, match="less than rank_timeout_seconds"):
            engine.resize(1, timeout_seconds=1e6)
        assert_same(before, state_of(engine, optimizer))
        engine.resize(1, folder=str(tmp_path))
        assert_same(before, state_of(engine, optimizer))
        engine.backward(engine(inputs).square().mean())
        optimizer.step()
        assert not torch.equal(before["0.weight"], engine.state_dict()["0.weight"])


def test_two_engines_are_refused():
    first, _ = initialize_engine(lambda: nn.Linear(2, 2))
    second, *_ = patrickstar.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1})
    with first, second, pytest.raises(patrickstar.StateError, match="2 engines are open"):
        first.resize(1)


def test_hosts_that_divide_data_by_the_ranks_they_began_with_refuse(tmp_path):
    data = TensorDataset(torch.randn(4, 2))
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
    engine, *_ = patrickstar.initialize(model=nn.Linear(2, 2), config=config, training_data=data)
    with engine, pytest.raises(patrickstar.StateError, match="given training_data"):
        engine.resize(1)
    engine, *_ = patrickstar.initialize(model=nn.Linear(2, 2), config=config)
    with engine:
        with pytest.raises(ResizeError, match="no multiple of micro-batch x ranks, 2 x 4"):
            engine.resize(4)
        assert engine.gradient_accumulation_steps() == 2
    args = arguments(tmp_path, max_steps=1)
    trainer = PatrickStarTrainer(gpt2(), args, train_dataset=Tokens(4, 1), patrickstar_config=engine_config())
    trainer.train()
    with pytest.raises(patrickstar.StateError, match="use ElasticTrainer"):
        trainer.engine.resize(1)
    trainer.close()


@pytest.mark.parametrize(
    ("difference", "why"),
    [("model", "differs in the model's parameters"), ("data", "of another run: num_samples 120 instead of 60")],
    ids=["model", "data"],
)
def test_a_process_of_another_run_is_sent_away(difference, why):
    store = serve_rendezvous("127.0.0.1", 0)
    address = f"127.0.0.1:{store.port}"
    for result in run_ranks(2, join_another_run, address, difference, environment=lambda number: ALONE):
        assert why in result["error"]
        assert_same(result["before"], result["after"])


@pytest.mark.parametrize(
    ("host_memory", "available", "why", "last_phase"),
    [
        (None, 100_000, "rank 0 is expected to have 384 KiB of its device and", ResizePhase.GATHER),
        (4 * 2**20, 100_000, r"copies .*iB on .*, where 97.7 KiB \(100000 bytes\) are available", ResizePhase.PUBLISH),
    ],
    ids=["budgets", "copies"],
)
def test_hosts_without_room_are_refused_before_anything_moves(host_memory, available, why, last_phase, tmp_path):
    for result in run_ranks(2, shrink_into_too_little, host_memory, str(tmp_path), available):
        assert re.search(why, result["error"]), result["error"]
        assert result["phases"][-1] is last_phase
        assert_same(result["before"], result["after"])
    assert not list(tmp_path.iterdir())


def test_expected_budgets():
    """Two new ranks on a host of which 10 GB are available and cores give 6 GB back; one on another host."""
    one = MemoryFacts(
        host="a",
        available_bytes=10 * 10**9,
        usable_bytes=40 * 10**9,
        reserve_bytes=2 * 10**9,
        held_bytes=3 * 10**9,
        device_bytes=7,
        device="",
        free_device_bytes=5,
    )
    ending = [dataclasses.replace(one, available_bytes=11 * 10**9, held_bytes=0)]
    staying = [one, dataclasses.replace(one, device_bytes=8), dataclasses.replace(one, host="b", held_bytes=0)]
    budgets = expected_budgets(parse_config({}), staying, ending)
    assert [each.host_bytes for each in budgets] == [6.84e9, 6.84e9, 8e9]
    assert [each.device_bytes for each in budgets] == [7, 8, 7]
    given = expected_budgets(parse_config({"device_memory": 5, "host_memory": 6}), staying, ending)
    assert {(each.device_bytes, each.host_bytes) for each in given} == {(5, 6)}
    check_copies([one, one], [4 * 10**9, 5 * 10**9])
    why = r"copies 10.2 GiB \(11000000000 bytes\) on a, where 9.31 GiB \(10000000000 bytes\) are available"
    with pytest.raises(patrickstar.MemoryBudgetError, match=why):
        check_copies([one, one], [5 * 10**9, 6 * 10**9])


def test_ranks_that_budgets_cannot_hold_are_refused_before_anything_moves(tmp_path):
    """128 K elements of 16 bytes take 2 MiB on one rank and half of that on each of two; 1984 KiB are available."""
    host_memory = 1600 * 1024
    for result in run_ranks(2, shrink_into_too_little, host_memory, str(tmp_path)):
        assert "states of each of 1 ranks: needs 2 MiB, has 1.93, short by 0.07" in result["error"], result["error"]
        given = f"device_memory ({show_size(DEVICE_MEMORY)}) and host_memory ({show_size(host_memory)}) together"
        assert f"({given}); keep more ranks" in result["error"]
        assert "a host_memory of at least 1.63MiB" in result["error"]
        assert result["phases"] == [ResizePhase.GATHER]
        assert_same(result["before"], result["after"])
    assert not list(tmp_path.iterdir())


def arrived(rendezvous):
    number = rendezvous.announce()
    rendezvous.arrive(number, {})
    return number


def test_a_gathered_process_and_its_leader_notice_at_once_that_the_other_ends():
    store = serve_rendezvous("127.0.0.1", 0)
    address = f"127.0.0.1:{store.port}"
    leader, joining, late = (Rendezvous.at(address, timeout_seconds=3600) for _ in range(3))
    number, dies = arrived(joining), arrived(late)
    with joining.beating(number):
        with late.beating(dies):
            assert leader.gather(2, 3600).keys() == {number, dies}
        leader.invite(dies, {})
        with pytest.raises(ResizeError, match=f"process {dies} that joins: its process has ended"):
            leader.await_at_work([dies], 3600)
        leader.store._connection.interrupt()  # as the system does for a killed process
        assert joining.invitation(number, 3600) == {REFUSAL: "the rank that leads has ended"}


def test_a_process_that_ends_before_it_is_gathered_ends_the_wait_for_it():
    """One that gives up by itself does not, and the death of one counts once."""
    store = serve_rendezvous("127.0.0.1", 0)
    leader, other, dies, gives_up = (Rendezvous.at(f"127.0.0.1:{store.port}", timeout_seconds=3600) for _ in range(4))
    number, lives = dies.announce(), arrived(other)
    gives_up.withdraw(gives_up.announce())
    for one in (dies, gives_up):
        one.store._connection.interrupt()  # as the system does for a killed process
    with other.beating(lives):
        with pytest.raises(ResizeError, match=f"process {number} that was to join: its process has ended"):
            leader.gather(2, 3600)
        assert leader.gather(1, 3600).keys() == {lives}


def test_processes_that_wait_to_join_are_sent_away_once():
    store = serve_rendezvous("127.0.0.1", 0)
    leader, joining = (Rendezvous.at(f"127.0.0.1:{store.port}") for _ in range(2))
    first = arrived(joining)
    leader.send_all_away("a rank was lost")
    assert joining.invitation(first, 60) == {REFUSAL: "a rank was lost"}
    second = arrived(joining)
    leader.invite(second, {"plan": {}})
    leader.send_away([first, second], "given up")  # after the invitation
    assert joining.invitation(first, 60) == {REFUSAL: "a rank was lost"}
    assert joining.invitation(second, 60) == {"plan": {}}
