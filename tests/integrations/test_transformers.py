import json
import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from patrickstar import StateError, from_pretrained
from patrickstar.integrations.transformers import PatrickStarSeq2SeqTrainer, PatrickStarTrainer
from patrickstar.optimizer.lion import Lion
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.integrations import first_rank
from tests.integrations.trainer_runs import (
    MODEL_DATA_BYTES,
    PatrickStarSftLikeTrainer,
    SftLikeTrainer,
    Tokens,
    arguments,
    engine_config,
    gpt2,
    make_trainer,
    train,
)
from tests.models import t5
from tests.training import make_config, relative_error


def assert_equal_runs(run, plain):
    """Losses, norms and evaluations to 1e-6; parameters, in which Adam divides noise, to 1e-5."""
    assert len(run.losses) == len(plain.losses) > 0
    assert run.losses == pytest.approx(plain.losses, rel=1e-6)
    assert run.norms == pytest.approx(plain.norms, rel=1e-6)
    assert run.evals[1:] == pytest.approx(plain.evals[1:], rel=1e-6)
    assert run.accuracies == plain.accuracies
    assert relative_error(run, plain) < 1e-5
    if run.report:
        assert run.report["device_peak_bytes"] <= MODEL_DATA_BYTES // 4


def assert_same_run(run, expected):
    assert_same_bits(run.losses, expected.losses[-len(run.losses) :])
    assert_same_bits(run.state, expected.state)


def test_training_saving_and_resuming(tmp_path):
    options = {"dropout": 0.1, "eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 2}
    plain = train(make_trainer(Trainer, tmp_path / "plain", **options), evaluate_first=True)
    assert min(plain.norms) > 0.5  # every step is clipped
    trainer = make_trainer(PatrickStarTrainer, tmp_path / "own", save_total_limit=3, **options)
    run = train(trainer, evaluate_first=True)
    assert_equal_runs(run, plain)
    assert run.evals[0] == pytest.approx(plain.evals[0], rel=1e-6)
    assert any(entry.get("patrickstar/device_gib", 0) > 0 for entry in run.history)
    assert any(0 <= entry.get("patrickstar/stalled", -1) <= 1 for entry in run.history)

    checkpoint = tmp_path / "own" / "checkpoint-6"
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == [
        "checkpoint-10",
        "checkpoint-6",
        "checkpoint-8",
    ]
    names = {path.name for path in (tmp_path / "plain" / "checkpoint-6").iterdir()}
    assert {path.name for path in checkpoint.iterdir()} == names - {"optimizer.pt"} | {"patrickstar"}
    saved = json.loads((checkpoint / "config.json").read_text())
    assert saved == json.loads((tmp_path / "plain" / "checkpoint-6" / "config.json").read_text())
    final = GPT2LMHeadModel.from_pretrained(tmp_path / "own" / "checkpoint-10").state_dict()
    assert_same_bits(final, run.state)

    resumed = train(make_trainer(PatrickStarTrainer, tmp_path / "own", **options), resume=str(checkpoint))
    assert_same_run(resumed, run)

    from_plain = str(tmp_path / "plain" / "checkpoint-6")
    gpt2(0.1).save_pretrained(tmp_path / "initial")
    options |= {"save_strategy": "no", "model": from_pretrained(tmp_path / "initial")}  # on the meta device
    resumed = train(make_trainer(PatrickStarTrainer, tmp_path / "more", **options), resume=from_plain)
    assert resumed.losses[-4:] == pytest.approx(plain.losses[-4:], rel=1e-6)


def truncate(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def overwrite(path):
    path.write_bytes(b"no state of an optimizer" * 100)


def forget_a_moment(path):
    state = torch.load(path, weights_only=True)
    del state["state"][3]["exp_avg_sq"]
    torch.save(state, path)


def swap_groups(path):
    state = torch.load(path, weights_only=True)
    state["param_groups"].reverse()
    torch.save(state, path)


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_torch_fused"])
def test_an_ordinary_trainers_checkpoint_is_resumed(tmp_path, optimizer):
    options = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8, "optim": optimizer}
    plain = train(make_trainer(Trainer, tmp_path / "plain", **options))
    checkpoint = str(tmp_path / "plain" / "checkpoint-4")
    resumed = train(make_trainer(PatrickStarTrainer, tmp_path / "own", **options), resume=checkpoint)
    assert resumed.losses[-4:] == pytest.approx(plain.losses[-4:], rel=1e-6)
    assert resumed.norms[-4:] == pytest.approx(plain.norms[-4:], rel=1e-5)
    assert relative_error(resumed, plain) < 1e-5


def as_fsdp(checkpoint, optimizer, model):
    """Turns an ordinary Trainer's checkpoint into what the Trainer writes with FSDP's SHARDED_STATE_DICT."""
    values = load_file(checkpoint / "model.safetensors")
    values["lm_head.weight"] = values["transformer.wte.weight"].clone()
    known = {param: name for name, param in model.named_parameters()}
    names = [known[param] for group in optimizer.param_groups for param in group["params"]]
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    states = {
        "state": {names[key]: value for key, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[key] for key in group["params"]]} for group in state["param_groups"]
        ],
    }
    dcp.save({"model": values}, checkpoint_id=checkpoint / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": states}, checkpoint_id=checkpoint / "optimizer_0")
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "optimizer.pt").unlink()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_trainers_checkpoint_with_fsdp_is_resumed(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    trainer = make_trainer(Trainer, tmp_path / "plain", **options)
    plain = train(trainer)
    checkpoint = tmp_path / "plain" / "checkpoint-4"
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    as_fsdp(checkpoint, optimizer, trainer.accelerator.unwrap_model(trainer.model))
    resumed = train(make_trainer(PatrickStarTrainer, tmp_path / "own", **options), resume=str(checkpoint))
    assert resumed.losses[-4:] == pytest.approx(plain.losses[-4:], rel=1e-6)
    assert relative_error(resumed, plain) < 1e-5


@pytest.mark.parametrize(
    "spoil, message",
    [
        (truncate, "cannot be read"),
        (overwrite, "cannot be read"),
        (forget_a_moment, "has no exp_avg_sq"),
        (swap_groups, "groups of"),
        ("sgd", "has momentum, which neither Adam nor AdamW has"),
        ("adafactor", "neither Adam nor AdamW"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_optimizer_that_cannot_be_taken_over_changes_nothing(tmp_path, spoil, message):
    is_other = isinstance(spoil, str)
    more = {"optim": spoil} if is_other else {}
    train(make_trainer(Trainer, tmp_path, save_strategy="steps", save_steps=1, max_steps=1, **more))
    checkpoint = tmp_path / "checkpoint-1"
    if not is_other:
        spoil(checkpoint / "optimizer.pt")
    trainer = make_trainer(PatrickStarTrainer, tmp_path / "own", max_steps=2)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(ValueError, match=message) as caught:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert str(checkpoint / "optimizer.pt") in str(caught.value)
    trainer.close()
    assert_same_bits(trainer.model.state_dict(), before)


@pytest.mark.parametrize("optim", ["sgd", "lion_32bit"])
def test_optimizers_of_one_moment(tmp_path, optim):
    options = {"learning_rate": 1e-3 if optim == "lion_32bit" else 0.05, "weight_decay": 0.1}
    theirs = {"optim": optim, "optim_args": "momentum=0.9,dampening=0.1"}
    own = make_trainer(PatrickStarTrainer, tmp_path / "own", **options, **theirs)
    if optim == "lion_32bit":
        plain = make_trainer(Trainer, tmp_path / "plain", **options)
        plain.optimizer_cls_and_kwargs = (Lion, {"lr": 1e-3, "betas": (0.9, 0.999)})
    else:
        plain = make_trainer(Trainer, tmp_path / "plain", **options, **theirs)
    assert_equal_runs(train(own), train(plain))


def test_a_subclass_that_overrides_what_trl_overrides(tmp_path):
    plain = train(make_trainer(SftLikeTrainer, tmp_path, eval_strategy="epoch"))
    run = train(make_trainer(PatrickStarSftLikeTrainer, tmp_path, eval_strategy="epoch"))
    assert len(plain.accuracies) == len(plain.losses)
    assert_equal_runs(run, plain)


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing_factor": 0.1, "gradient_checkpointing": True, "gradient_accumulation_steps": 3},
        {"max_grad_norm": 0.0, "optimizer_cls_and_kwargs": (torch.optim.Adam, {"lr": 1e-3, "betas": (0.8, 0.99)})},
        {"max_grad_norm": 0.5, "own_optimizer": True},
    ],
    ids=["smoothing", "adam", "own_optimizer"],
)
def test_options_of_the_trainer(tmp_path, options):
    runs = []
    for cls in (Trainer, PatrickStarTrainer):
        given = dict(options)
        own = {"patrickstar_config": engine_config()} if cls is PatrickStarTrainer else {}
        own |= {"optimizer_cls_and_kwargs": given.pop("optimizer_cls_and_kwargs", None)}
        model = gpt2()
        if given.pop("own_optimizer", False):
            optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "weight_decay": 0.2}], lr=2e-3)
            own["optimizers"] = (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step))
        args = arguments(tmp_path, num_train_epochs=1, **given)
        runs.append(train(cls(model=model, args=args, train_dataset=Tokens(10, 1), **own)))
    assert_equal_runs(runs[1], runs[0])
    rates = [[entry["learning_rate"] for entry in run.history if "loss" in entry] for run in runs]
    assert rates[0] == rates[1]


def test_the_best_model_without_optimizer_states(tmp_path):
    trainer = make_trainer(
        PatrickStarTrainer,
        tmp_path,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_only_model=True,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # the first, then
    )
    run = train(trainer)
    best = trainer.state.best_model_checkpoint
    assert best is not None
    weights = GPT2LMHeadModel.from_pretrained(best).state_dict()
    assert_same_bits(run.state, weights)


def test_a_model_of_model_init_is_made_anew(tmp_path):
    trainer = PatrickStarTrainer(
        model_init=lambda: gpt2(),
        args=arguments(tmp_path, num_train_epochs=1),
        train_dataset=Tokens(4, 1),
        patrickstar_config=engine_config(),
    )
    losses = []
    for _ in range(2):
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    trainer.close()
    trainer.close()
    assert losses[0] == losses[1]
    assert type(next(trainer.model.parameters())) is torch.nn.Parameter
    with pytest.raises(StateError, match="no model is prepared"):
        _ = trainer.engine


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bit(tmp_path, precision):
    options = {precision: True, "max_steps": 4, "save_strategy": "steps", "save_steps": 4}
    config = {"fp16": {"enabled": "auto", "initial_scale_power": 24, "hysteresis": 1}} if precision == "fp16" else {}
    plain = train(make_trainer(Trainer, tmp_path / "plain", max_steps=4))
    trainer = make_trainer(PatrickStarTrainer, tmp_path / "own", config=config, **options)
    trainer.train()
    assert next(trainer.model.parameters()).dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    report = trainer.engine.report()
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / "own" / "checkpoint-4", dtype="auto")
    assert saved.dtype == torch.float32
    assert_same_bits(saved.state_dict(), trainer.engine.state_dict())
    trainer.close()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(plain.losses[0], rel=0.01)
    skipped = report["num_skipped_steps"]
    assert (skipped > 0) == (precision == "fp16")
    assert trainer.lr_scheduler.last_epoch == 4 - skipped


def test_generation_in_evaluation(tmp_path):
    outputs = []
    for cls in (Seq2SeqTrainer, PatrickStarSeq2SeqTrainer):
        torch.manual_seed(0)
        args = Seq2SeqTrainingArguments(
            **{
                **arguments(tmp_path, max_steps=2).to_dict(),
                "predict_with_generate": True,
                "generation_max_length": 6,
                "accelerator_config": None,
            }
        )
        own = {"patrickstar_config": {"device_memory": 400_000, "default_chunk_size": 4096}}
        model = t5()
        trainer = cls(
            model=model, args=args, train_dataset=Tokens(8, 1), **(own if cls is PatrickStarSeq2SeqTrainer else {})
        )
        before = trainer.predict(Tokens(4, 2)).predictions
        trainer.train()
        outputs.append((before.tolist(), trainer.predict(Tokens(4, 2)).predictions.tolist()))
        if cls is PatrickStarSeq2SeqTrainer:
            trainer.close()
    assert outputs[0] == outputs[1]


def test_a_frozen_model_is_evaluated_in_less_memory_than_it_takes(tmp_path):
    expected = make_trainer(Trainer, tmp_path).evaluate()["eval_loss"]
    frozen = gpt2().requires_grad_(False)
    trainer = make_trainer(PatrickStarTrainer, tmp_path, model=frozen, config={"device_memory": 300_000})
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert trainer.engine.report()["device_peak_bytes"] <= 300_000 < 4 * sum(p.numel() for p in frozen.parameters())
    trainer.close()


def test_an_unmodified_trainer_does_not_train_our_model(tmp_path):
    engine, optimizer = initialize_engine(gpt2, 0, make_config())
    with engine:
        args = arguments(tmp_path, max_steps=2)
        trainer = Trainer(engine.module, args, train_dataset=Tokens(4, 1), optimizers=(optimizer, None))
        before = engine.state_dict()
        with pytest.raises((StateError, RuntimeError), match=r"backward\(loss\)|PatrickStar"):
            trainer.train()
        assert_same_bits(engine.state_dict(), before)


@pytest.mark.parametrize(
    ("args", "config", "message"),
    [
        ({"bf16_full_eval": True}, {}, "bf16_full_eval and fp16_full_eval cast"),
        ({"auto_find_batch_size": True}, {}, "set per_device_train_batch_size"),
        ({"save_on_each_node": True}, {}, "save_on_each_node is set"),
        ({"optim": "adafactor"}, {}, "optim is 'adafactor'; .*save as much memory.* optim to 'adamw_bnb_8bit'"),
        ({"bf16": True}, {"bf16": {"enabled": False}}, r"bf16.enabled is False in the configuration, but Training"),
        ({}, {"optimizer": {"params": {"lr": 1e-4}}}, r"optimizer.params.lr is 0.0001 .*learning_rate is 0.003; leave"),
        ({}, {"gradient_clipping": 1.0}, r"gradient_clipping is 1.0 .*max_grad_norm is 0.5"),
        ({}, {"train_batch_size": 4}, "train_batch_size is 4 .* ranks is 2"),
        ({}, {"device_memry": 4}, "unknown key device_memry: did you mean device_memory"),
    ],
)
def test_refused(tmp_path, args, config, message):
    with pytest.raises(ValueError, match=message):
        PatrickStarTrainer(
            gpt2(), arguments(tmp_path, **args), train_dataset=Tokens(4, 1), patrickstar_config=config
        ).train()


def test_a_configuration_in_a_file_may_leave_values_to_the_arguments(tmp_path):
    config = {
        **engine_config(),
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999]}, "speculation": "always"},
        "gradient_clipping": "auto",
        "train_batch_size": 2,
        "bf16": {"enabled": "auto"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    trainer = PatrickStarTrainer(
        gpt2(),
        arguments(tmp_path, max_steps=1),
        train_dataset=Tokens(4, 1),
        patrickstar_config=tmp_path / "config.json",
    )
    trainer.train()
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(trainer.get_learning_rates()[0])
    assert next(trainer.model.parameters()).dtype == torch.float32
    trainer.close()


def test_a_configuration_for_deepspeed(tmp_path, caplog):
    caplog.set_level(logging.INFO, "patrickstar")
    (tmp_path / "ds_config.json").write_text(
        json.dumps(
            {
                "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
                "bfloat16": {"enabled": "auto"},
                "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
                "scheduler": {
                    "type": "WarmupDecayLR",
                    "params": {
                        "warmup_min_lr": "auto",
                        "warmup_max_lr": "auto",
                        "warmup_num_steps": "auto",
                        "total_num_steps": "auto",
                        "warmup_type": "linear",
                    },
                },
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "cpu", "pin_memory": True},
                    "offload_param": {"device": "cpu", "pin_memory": True},
                    "overlap_comm": True,
                    "contiguous_gradients": True,
                    "sub_group_size": 1e9,
                    "reduce_bucket_size": "auto",
                    "stage3_prefetch_bucket_size": "auto",
                    "stage3_param_persistence_threshold": "auto",
                    "stage3_gather_16bit_weights_on_model_save": True,
                },
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
                "steps_per_print": 2,
                "train_batch_size": "auto",
                "train_micro_batch_size_per_gpu": "auto",
                "wall_clock_breakdown": False,
            }
        )
    )
    args = arguments(tmp_path, max_steps=6, warmup_steps=3, learning_rate=1e-3)
    trainer = PatrickStarTrainer(
        gpt2(), args, train_dataset=Tokens(12, 1), patrickstar_config=tmp_path / "ds_config.json"
    )
    run = train(trainer)
    rates = [entry["learning_rate"] for entry in run.history if "loss" in entry]
    # The first step runs with the schedule's beginning, then 1/3, 2/3, 1 of the rate, and down to 0 at the sixth.
    assert rates == pytest.approx([0.0, 0.0, 1e-3 / 3, 2e-3 / 3, 1e-3, 2e-3 / 3], abs=1e-9)
    assert "steps_per_print: left to the Trainer (logging_steps, report_to)" in caplog.messages
    assert sum(" parameters in float32 on " in message for message in caplog.messages) == 1
    assert not any(message.startswith("step ") for message in caplog.messages)


def test_two_ranks(two_ranks):
    for rank in two_ranks:
        runs = rank["trainer"]
        assert_equal_runs(runs["own"], runs["plain"])
        assert_equal_runs(runs["sft"], runs["sft_plain"])
        assert_same_run(runs["resumed"], runs["own"])


def test_two_ranks_that_share_sequences_or_matrices(two_ranks, tmp_path):
    plain = train(make_trainer(Trainer, tmp_path, eval_strategy="epoch"))
    for rank in two_ranks:
        for run in (rank["trainer"]["shared"], rank["trainer"]["matrices"]):
            assert run.losses == pytest.approx(plain.losses, rel=2e-6)
            assert run.norms == pytest.approx(plain.norms, rel=2e-6)
            assert run.evals[1:] == pytest.approx(plain.evals[1:], rel=2e-6)
        assert relative_error(rank["trainer"]["shared"], plain) < 2e-5


def test_two_ranks_generate(two_ranks):
    torch.manual_seed(0)
    model = t5().eval()
    model.generation_config.eos_token_id = list(range(0, 97, 3))
    data = Tokens(6, 2)
    alone = [model.generate(input_ids=data[i]["input_ids"][None], max_length=6)[0].tolist() for i in range(6)]
    assert len({len(tokens) for tokens in alone}) > 1
    width = model.generation_config.max_length or 20
    padded = [tokens + [0] * (width - len(tokens)) for tokens in alone]
    for rank in two_ranks:
        assert rank["generated"] == padded


def test_ranks_with_differing_models(two_ranks):
    first_rank.check([rank["first_rank"] for rank in two_ranks])
