import dataclasses
import json
import sys

import pytest
from transformers import Trainer, TrainingArguments

from patrickstar.command.main import main
from patrickstar.elastic.batches import BatchRange, LearningRateRule, batch_environment
from patrickstar.integrations.elastic_trainer import ElasticTrainer, ElasticTrainerMixin, ElasticTraining
from patrickstar.integrations.every_trainer import every_trainer_in_engine
from patrickstar.integrations.trainer_arguments import load_off_devices
from patrickstar.integrations.transformers import PatrickStarTrainer, PatrickStarTrainerMixin
from tests.bits import assert_same_bits
from tests.integrations.trainer_runs import (
    PatrickStarSftLikeTrainer,
    SftLikeTrainer,
    Tokens,
    arguments,
    engine_config,
    gpt2,
    make_trainer,
    train,
)


def bare(cls, folder, **more):
    return cls(model=gpt2(), args=arguments(folder), train_dataset=Tokens(10, seed=1), **more)


def test_a_subclass_made_within_the_block_trains_as_one_with_the_mixin(tmp_path):
    expected = train(make_trainer(PatrickStarSftLikeTrainer, tmp_path / "own"))
    with every_trainer_in_engine(engine_config()):
        trainer = bare(SftLikeTrainer, tmp_path / "given")
    assert isinstance(trainer, SftLikeTrainer) and type(trainer).__name__ == "SftLikeTrainer"
    assert type(trainer).__mro__.index(PatrickStarTrainerMixin) < type(trainer).__mro__.index(SftLikeTrainer)
    run = train(trainer)
    assert_same_bits(run.losses, expected.losses)
    assert_same_bits(run.state, expected.state)
    assert run.accuracies == expected.accuracies
    assert run.report["device_peak_bytes"] <= engine_config()["device_memory"]
    assert not isinstance(bare(SftLikeTrainer, tmp_path / "after"), PatrickStarTrainerMixin)


def test_a_trainer_with_a_configuration_of_its_own_keeps_it(tmp_path):
    with every_trainer_in_engine({"device_memory": 1000}):
        trainer = bare(PatrickStarTrainer, tmp_path, patrickstar_config=engine_config())
        with every_trainer_in_engine(engine_config()):
            inner = bare(Trainer, tmp_path)
        assert train(inner).losses == train(trainer).losses  # 1000 bytes would be refused
    assert type(bare(Trainer, tmp_path)) is Trainer


def test_trainers_within_the_block_are_elastic_where_that_is_asked_for(tmp_path):
    options = {"gradient_accumulation_steps": 1, "num_train_epochs": 1}
    args = arguments(tmp_path, **options)
    with every_trainer_in_engine(engine_config(), ElasticTraining(global_batch=4)):
        made = [
            cls(model=gpt2(), args=args, train_dataset=Tokens(10, seed=1))
            for cls in (SftLikeTrainer, PatrickStarTrainer)
        ]
        own = ElasticTrainer(gpt2(), args, train_dataset=Tokens(10, seed=1), elastic=ElasticTraining(global_batch=5))
    assert all(isinstance(trainer, ElasticTrainerMixin) for trainer in made)
    assert [trainer.get_total_train_batch_size(args) for trainer in (*made, own)] == [4, 4, 5]
    assert made[0].train().global_step == 2
    assert len(made[0].state.log_history) == 3 and "accuracy" in made[0].state.log_history[0]
    made[0].close()


@dataclasses.dataclass
class TrlLikeArguments(TrainingArguments):
    model_init_kwargs: dict | None = None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {"device_map": None}),
        ({"dtype": "float32"}, {"device_map": None, "dtype": "float32"}),
        ({"device_map": "cpu"}, {"device_map": "cpu"}),  # refused when it is loaded
    ],
)
def test_a_model_that_trl_gets_by_name_stays_off_the_device(tmp_path, given, expected):
    args = TrlLikeArguments(str(tmp_path), use_cpu=True, model_init_kwargs=given)
    load_off_devices([gpt2(), args])
    assert args.model_init_kwargs == given
    load_off_devices(["some/model", args])
    assert args.model_init_kwargs == expected


SCRIPT = """
import json, sys
from transformers import Trainer
from tests.integrations.trainer_runs import Tokens, arguments, gpt2

trainer = Trainer(gpt2(), arguments(sys.argv[1], max_steps=2), train_dataset=Tokens(10, seed=1))
trainer.train()
print(json.dumps([sys.argv[2:], type(trainer).__mro__[1].__name__, trainer.engine.report()["device_budget_bytes"]]))
"""


def test_a_script_runs_as_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    script, config = tmp_path / "script.py", tmp_path / "config.json"
    script.write_text(SCRIPT)
    config.write_text(json.dumps({"device_memory": "1MiB", "default_chunk_size": 8192, "scheduler": None}))
    flags = ["--config", str(config), "--device-memory", "450KiB"]
    assert main(["run", *flags, str(script), str(tmp_path / "out"), "--device-memory", "3"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said == [["--device-memory", "3"], "PatrickStarTrainerMixin", 450 * 1024]


def test_a_script_follows_orders_with_a_global_batch(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("max_steps=2", "max_steps=2, gradient_accumulation_steps=1"))
    assert main(["run", "--device-memory", "1MiB", "--global-batch", "4", str(script), str(tmp_path / "out")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])[1] == "ElasticTrainerMixin"
    with pytest.raises(SystemExit) as stop:
        main(["run", "--global-batch", "0", str(script)])
    assert stop.value.code == 2
    assert "--global-batch: it is '0'; give a whole number of at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["run", "--global-batch", "job", str(script)])
    assert stop.value.code == 2
    assert "PATRICKSTAR_ELASTIC_BATCH is not set" in capsys.readouterr().err
    batches = BatchRange(min=2, base=4, max=8, rule=LearningRateRule.LINEAR)
    for name, value in batch_environment(batches, 8).items():
        monkeypatch.setenv(name, value)
    assert main(["run", "--device-memory", "1MiB", "--global-batch", "job", str(script), str(tmp_path / "job")]) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "which cannot be read"),
        ('{"devise_memory": "1GiB", "train_batch_size": "auto"}', "device_memory"),
        ("[1]", "config is a list"),
    ],
)
def test_a_wrong_configuration_is_said_before_the_script_begins(tmp_path, capsys, text, said):
    script, config = tmp_path / "script.py", tmp_path / "config.json"
    script.write_text("raise SystemExit('it ran')")
    if text is not None:
        config.write_text(text)
    with pytest.raises(SystemExit) as stop:
        main(["run", "--config", str(config), str(script)])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and not out
    assert err.startswith("patrickstar run: ") and said in err and err.count("\n") == 1
