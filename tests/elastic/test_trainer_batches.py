"""A Trainer whose global batch changes, against a loop of plain PyTorch with transformers' optimizer and schedule."""

import signal

import pytest
import torch
from transformers import Trainer

from patrickstar.elastic import BatchRange, LearningRateRule, serve_rendezvous
from patrickstar.elastic.batches import batch_environment
from patrickstar.integrations.elastic_trainer import ElasticTrainer, ElasticTraining
from tests.distributed import rank_outcomes, run_ranks
from tests.elastic.test_trainer import environment, logged
from tests.elastic.trainer_runs import NUM_SAMPLES, data, follow_orders
from tests.integrations.trainer_runs import Tokens, arguments, engine_config, gpt2

BATCHES = BatchRange(min=6, base=12, max=24, rule=LearningRateRule.LINEAR, warmup_steps=2)
OPTIONS = {"logging_steps": 1, "eval_strategy": "no", "save_strategy": "steps", "save_steps": 100}
SEED = 7  # of arguments()


def replay(batches, tmp_path, num_epochs=2):
    """Losses and rates by step; ``batches``: the batch of step k, the last one from then on."""
    model, items = gpt2(), data()["train_dataset"]
    trainer = Trainer(model, arguments(tmp_path / "plain"))
    trainer.create_optimizer_and_scheduler(num_epochs * (NUM_SAMPLES // BATCHES.base))
    optimizer, schedule = trainer.optimizer, trainer.lr_scheduler
    found = {"loss": {}, "learning_rate": {}, "seen": {}}
    epoch = cursor = num_samples = step = 0
    before, first, since = BATCHES.base, 1.0, BATCHES.warmup_steps

    def factor():
        target = before / BATCHES.base
        return first + (target - first) * (min(1.0, since / BATCHES.warmup_steps) if target > first else 1.0)

    while True:
        batch = batches[min(step, len(batches) - 1)]
        if batch != before:
            first, before, since = factor(), batch, 0
        if cursor + batch > NUM_SAMPLES:
            epoch, cursor = epoch + 1, 0
        if epoch == num_epochs or num_samples >= num_epochs * (NUM_SAMPLES // BATCHES.base) * BATCHES.base:
            return found, model
        order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(SEED * 1_000_003 + epoch))
        chosen = order[cursor : cursor + batch].tolist()
        rows = [items[index] for index in chosen]
        labels = torch.stack([row["labels"] for row in rows])
        logits = model(input_ids=torch.stack([row["input_ids"] for row in rows])).logits
        outputs, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(outputs, targets, reduction="sum")
        loss = loss / labels.ne(-100).sum()  # transformers counts the first tokens too
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= factor()
        found["learning_rate"][step + 1] = optimizer.param_groups[0]["lr"]
        optimizer.step()
        optimizer.zero_grad()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for _ in range((num_samples + batch) // BATCHES.base - num_samples // BATCHES.base):
            schedule.step()
        cursor, num_samples, since, step = cursor + batch, num_samples + batch, since + 1, step + 1
        found["loss"][step], found["seen"][step - 1] = loss.item(), chosen


def check(results, plain, steps):
    (last,) = [result for result in results if result["left"] is None][:1]
    for step in steps:
        seen = [sample for result in results for sample in result["seen"].get(step, [])]
        assert sorted(seen) == sorted(plain["seen"][step])
        assert logged(last, "loss")[step + 1] == pytest.approx(plain["loss"][step + 1], rel=2e-4)
        # a Trainer logs the rate of the step, before the schedule goes on
        assert logged(last, "learning_rate")[step + 1] == pytest.approx(plain["learning_rate"][step + 1], abs=1e-9)
    return last


def test_losses_rates_and_samples_are_those_of_plain_pytorch(tmp_path):
    store = serve_rendezvous("127.0.0.1", 0)
    address, plan = f"127.0.0.1:{store.port}", {2: (1, 24), 4: (2, 18), 7: None}
    results = run_ranks(
        2, follow_orders, address, plan, str(tmp_path), None, OPTIONS, BATCHES, environment=environment,
        timeout_seconds=200,
    )  # fmt: skip
    plain, model = replay([12, 12, 24, 24, 18], tmp_path)
    check(results, plain, range(7))
    assert max(plain["seen"]) > 8
    results = run_ranks(
        3, follow_orders, address, {}, str(tmp_path), str(tmp_path / "checkpoint-7"), OPTIONS, BATCHES,
        timeout_seconds=200,
    )  # fmt: skip
    last = check(results, plain, range(7, max(plain["seen"]) + 1))
    assert last["steps"] == max(plain["seen"]) + 1
    assert last["epoch"] == 2
    for name, value in model.state_dict().items():
        torch.testing.assert_close(last["state"][name].float(), value, rtol=1e-3, atol=1e-3)


def test_a_killed_rank_costs_one_step_of_the_present_batch(tmp_path):
    """One of three ranks dies after the batch has grown; two take the nearest batch that they can share."""
    store = serve_rendezvous("127.0.0.1", 0)
    first = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", **store.environment}
    outcomes = rank_outcomes(
        3, follow_orders, f"127.0.0.1:{store.port}", {2: (3, 21)}, str(tmp_path), None,
        OPTIONS | {"save_strategy": "no"}, BATCHES, (0, 4),
        environment=lambda _: first, timeout_seconds=100,
    )  # fmt: skip
    assert [outcome.returncode for outcome in outcomes] == [-signal.SIGKILL, 0, 0], outcomes
    plain, model = replay([12, 12, 21, 21, 20], tmp_path)
    values = [outcome.value for outcome in outcomes[1:]]
    last = check(values, plain, range(4, max(plain["seen"]) + 1))
    assert last["steps"] == max(plain["seen"]) + 1
    for name, value in model.state_dict().items():
        torch.testing.assert_close(last["state"][name].float(), value, rtol=1e-3, atol=1e-3)


def test_a_resume_with_the_batch_that_a_scheduler_wants(tmp_path, monkeypatch):
    store = serve_rendezvous("127.0.0.1", 0)

    def train(num_steps, resume):
        options = OPTIONS | {"save_steps": 2, "max_steps": num_steps}
        return follow_orders(f"127.0.0.1:{store.port}", {}, str(tmp_path), resume, options, BATCHES)

    train(2, None)
    for name, value in batch_environment(BATCHES, 24).items():
        monkeypatch.setenv(name, value)
    result = train(6, str(tmp_path / "checkpoint-2"))
    assert {step: len(samples) for step, samples in result["seen"].items()} == {2: 24, 3: 24}
    plain, _ = replay([12, 12, 24], tmp_path)
    for step in (3, 4):
        assert sorted(result["seen"][step - 1]) == sorted(plain["seen"][step - 1])


def test_steps_are_given_for_the_base_batch(tmp_path):
    args = arguments(tmp_path, gradient_accumulation_steps=1, max_steps=5, per_device_train_batch_size=4)
    options = {"train_dataset": Tokens(20, 1), "patrickstar_config": engine_config(device_memory=800_000)}
    batches = BatchRange(min=2, base=4, max=8, rule=LearningRateRule.SQUARE_ROOT)
    trainer = ElasticTrainer(gpt2(), args, elastic=ElasticTraining(global_batch=batches), **options)
    trainer._loop.goes_on, goes_on = grown(trainer), trainer._loop.goes_on
    trainer.before = goes_on
    assert trainer.train().global_step == 3  # 4, 8 and 8 of 20 samples
    assert trainer.lr_scheduler.num_samples == 20
    trainer.close()


def grown(trainer):
    def goes_on():
        found = trainer.before()
        if trainer.state.global_step == 1:
            trainer._loop._run.batch.set(8)
            trainer._loop._run.batch.set_ranks(0, 1)
            trainer.before()
        return found

    return goes_on


def test_a_schedule_that_follows_evaluations_is_refused(tmp_path):
    args = arguments(
        tmp_path, gradient_accumulation_steps=1, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch"
    )
    trainer = ElasticTrainer(
        gpt2(),
        args,
        elastic=ElasticTraining(global_batch=BATCHES),
        train_dataset=Tokens(40, 1),
        eval_dataset=Tokens(4, 1),
    )
    with pytest.raises(ValueError, match="choose another lr_scheduler_type"):
        trainer.train()
    trainer.close()
