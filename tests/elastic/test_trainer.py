import signal

import pytest
import torch

from patrickstar import StateError
from patrickstar.elastic import ResizePhase, serve_rendezvous
from patrickstar.integrations.accelerate import PatrickStarAccelerator
from patrickstar.integrations.elastic_trainer import ElasticTrainer, ElasticTraining
from tests.distributed import rank_outcomes, run_ranks
from tests.elastic.trainer_runs import (
    GLOBAL_BATCH,
    STEPS_PER_EPOCH,
    Count,
    follow_orders,
    loop_with_accelerate,
    train_plainly,
)
from tests.integrations.trainer_runs import Tokens, arguments, engine_config, gpt2

PLAN = {3: 2, STEPS_PER_EPOCH: 3, 11: 1}
"""Steps: within an epoch (not logged), the last of an epoch, and within the next."""


def environment(number):
    alone = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
    return {**alone, "PATRICKSTAR_ELASTIC_JOINS": "1" if number > 0 else "0"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train_plainly(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def elastic(tmp_path_factory):
    store, folder = serve_rendezvous("127.0.0.1", 0), tmp_path_factory.mktemp("elastic")
    return run_ranks(
        3, follow_orders, f"127.0.0.1:{store.port}", PLAN, str(folder), environment=environment, timeout_seconds=200
    )


def logged(result, key):
    return {entry["step"]: float(entry[key]) for entry in result["history"] if key in entry}


def check_against(plain, result, first_step=0):
    for key in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        expected = {step: value for step, value in logged(plain, key).items() if step > first_step}
        assert expected
        assert logged(result, key).keys() == logged(plain, key).keys()
        for step, value in expected.items():
            assert logged(result, key)[step] == pytest.approx(value, rel=2e-4, abs=1e-8), (key, step)
    assert result["epoch"] == plain["epoch"]
    for name, value in plain["state"].items():
        torch.testing.assert_close(result["state"][name].float(), value, rtol=1e-3, atol=1e-3)


def check_samples(plain, results, steps):
    for step in steps:
        seen = [sample for result in results for sample in result["seen"].get(step, [])]
        assert len(seen) == GLOBAL_BATCH
        assert sorted(seen) == sorted(plain["seen"][step])


def test_losses_rates_and_evaluations_are_those_of_the_trainer(plain, elastic):
    (last,) = [result for result in elastic if result["left"] is None]
    assert last["steps"] == plain["steps"] == 2 * STEPS_PER_EPOCH
    check_against(plain, last)
    assert last["loss"] == pytest.approx(plain["loss"], rel=1e-4)
    assert last["flos"] == pytest.approx(plain["flos"])
    assert last["counted"] == plain["steps"]


def test_each_sample_of_an_epoch_is_seen_once(plain, elastic):
    check_samples(plain, elastic, range(plain["steps"]))


def test_ranks_that_join_begin_at_the_step_and_ranks_that_leave_end(elastic):
    began = sorted(min(result["seen"]) for result in elastic)
    assert began == [0, 3, STEPS_PER_EPOCH]
    assert [result["left"] for result in elastic].count(0) == 2
    assert all(max(result["seen"]) == 10 for result in elastic if result["left"] == 0)


def test_a_run_that_is_stopped_goes_on_from_its_checkpoint_on_other_ranks(plain, tmp_path):
    store = serve_rendezvous("127.0.0.1", 0)
    address, options = f"127.0.0.1:{store.port}", {"save_strategy": "steps", "save_steps": 100}
    results = run_ranks(2, follow_orders, address, {2: 1, 4: None}, str(tmp_path), None, options, timeout_seconds=200)
    (stopped,) = [result for result in results if result["left"] is None]
    assert stopped["steps"] == 4
    check_samples(plain, results, range(4))
    checkpoint = str(tmp_path / "checkpoint-4")
    results = run_ranks(3, follow_orders, address, {}, str(tmp_path), checkpoint, options, timeout_seconds=200)
    check_samples(plain, results, range(4, plain["steps"]))
    for result in results:
        check_against(plain, result, first_step=4)


def test_what_cannot_follow_the_ranks_is_refused(tmp_path):
    def make(global_batch=4, config=None, **options):
        args = arguments(tmp_path, **{"gradient_accumulation_steps": 1, "num_train_epochs": 1} | options)
        return ElasticTrainer(
            gpt2(),
            args,
            train_dataset=Tokens(10, 1),
            elastic=ElasticTraining(global_batch=global_batch),
            patrickstar_config=engine_config(**(config or {})),
        )

    for wrong, name in (
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2"),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy is 'sequential'"),
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices is False"),
    ):
        with pytest.raises(ValueError, match=name):
            make(**wrong)
    with pytest.raises(ValueError, match="sequence_parallel and tensor_parallel have ranks that share samples"):
        make(config={"sequence_parallel": {"size": 2}})
    with pytest.raises(ValueError, match="10 samples and a global batch 16"):
        make(global_batch=16).train()
    trainer = make(dataloader_num_workers=1, dataloader_persistent_workers=True)
    assert trainer.train().global_step == 2  # by hand, where nobody gives orders
    with pytest.raises(StateError, match="trains once"):
        trainer.train()
    progress, state = trainer._loop._progress, trainer._loop._progress.state_dict()
    progress.check_state(state)  # of a process that joins
    trainer.add_callback(Count())
    with pytest.raises(ValueError, match=r"have the callbacks \[\], and this process \['Count'\]"):
        progress.check_state(state)
    progress.max_steps = 3
    with pytest.raises(ValueError, match="make 2 steps, and this process would make 3"):
        progress.check_state(state)
    trainer.close()


def test_an_accelerator_follows_the_ranks(tmp_path):
    store = serve_rendezvous("127.0.0.1", 0)
    address, folder = f"127.0.0.1:{store.port}", str(tmp_path)
    first, second = run_ranks(2, loop_with_accelerate, address, {3: 2, 6: 1}, folder, environment=environment)
    straight = loop_with_accelerate(None, {}, folder)
    assert first["losses"] == pytest.approx(straight["losses"], rel=1e-4)
    assert second["losses"] == pytest.approx({step: straight["losses"][step] for step in (3, 4, 5)}, rel=1e-4)
    assert second["left"]
    assert first["main"] == [(1, True)] * 3 + [(2, True)] * 3 + [(1, True)] * 4
    assert second["main"] == [(2, False)] * 3


def test_prepared_data_loaders_keep_their_ranks():
    accelerator = PatrickStarAccelerator(cpu=True, patrickstar_config=engine_config())
    model = gpt2()
    loader = torch.utils.data.DataLoader(Tokens(4, 1))
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    with pytest.raises(StateError, match="resize with 1 prepared data loaders"):
        accelerator.resize(1)
    accelerator.free_memory()


TWO_RANKS = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def check_death(plain, number, num_steps, folder):
    store = serve_rendezvous("127.0.0.1", 0)
    first = TWO_RANKS | store.environment
    outcomes = rank_outcomes(
        2, follow_orders, f"127.0.0.1:{store.port}", {}, str(folder), None, None, GLOBAL_BATCH, (number, num_steps),
        environment=lambda _: first, timeout_seconds=100,
    )  # fmt: skip
    last = outcomes[1 - number]
    assert last.returncode == 0, last.output
    check_against(plain, last.value)
    assert last.value["loss"] == pytest.approx(plain["loss"], rel=1e-4)
    assert last.value["counted"] == plain["steps"]
    for step in range(num_steps, plain["steps"]):
        assert sorted(last.value["seen"][step]) == sorted(plain["seen"][step])


def test_a_killed_rank_costs_the_trainer_one_step(plain, tmp_path):
    check_death(plain, 0, 11, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("num_steps", [0, 1, STEPS_PER_EPOCH - 1, STEPS_PER_EPOCH])
def test_a_rank_is_killed_in_any_step(plain, number, num_steps, tmp_path):
    check_death(plain, number, num_steps, tmp_path)


LEADER, MEMBER, JOINING = 0, 1, 2
IN_A_RESIZE = [(victim, phase) for victim in (LEADER, MEMBER, JOINING) for phase in ResizePhase]
FEW_IN_A_RESIZE = [(LEADER, ResizePhase.CLOSE), (JOINING, ResizePhase.BUILD)]


def check_death_in_a_resize(plain, victim, phase, folder):
    """Two ranks become three after three steps, when one of the processes dies."""
    store = serve_rendezvous("127.0.0.1", 0)
    outcomes = rank_outcomes(
        3, follow_orders, f"127.0.0.1:{store.port}", {3: 3}, str(folder), None, None, GLOBAL_BATCH, None,
        (victim, phase),
        environment=lambda number: store.environment | (environment(number) if number == JOINING else TWO_RANKS),
        timeout_seconds=200,
    )  # fmt: skip
    assert outcomes[victim].returncode == -signal.SIGKILL, outcomes[victim].output
    old = [outcome for number, outcome in enumerate(outcomes[:JOINING]) if number != victim]
    assert all(outcome.returncode == 0 for outcome in old), old
    for outcome in old:
        check_against(plain, outcome.value)
        assert outcome.value["counted"] == plain["steps"]
    check_samples(plain, [outcome.value for outcome in outcomes if outcome.value is not None], range(3, plain["steps"]))


@pytest.mark.parametrize(("victim", "phase"), FEW_IN_A_RESIZE, ids=str)
def test_the_trainer_survives_a_kill_within_a_resize(plain, victim, phase, tmp_path):
    check_death_in_a_resize(plain, victim, phase, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "phase"), [case for case in IN_A_RESIZE if case not in FEW_IN_A_RESIZE], ids=str)
def test_the_trainer_survives_a_kill_in_any_phase(plain, victim, phase, tmp_path):
    check_death_in_a_resize(plain, victim, phase, tmp_path)
