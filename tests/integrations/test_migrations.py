"""Scripts of other projects' shapes under ``patrickstar run``: each trains in an engine, or is refused with the change
that it needs. TRL's own script is in test_unchanged_scripts.py.
"""

import json
import logging
import sys

import pytest
from accelerate.state import AcceleratorState, GradientState
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from patrickstar.command.main import main
from patrickstar.command.script import run_script
from patrickstar.config import OptimizerType, States
from patrickstar.integrations.accelerate import PatrickStarAccelerator
from patrickstar.integrations.trainer_arguments import check_arguments, optimizer_of
from patrickstar.session.registry import close_open_engine, open_sessions
from tests.integrations.trainer_runs import arguments, gpt2

BUDGET = ("--device-memory", "2MiB")


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs a script's text by ``patrickstar run``, or alone; returns exit status, the printed JSON and errors."""
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run_text(text, *script_args, flags=BUDGET, alone=False):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        script = tmp_path / "script.py"
        script.write_text(text)
        arguments = [str(tmp_path / "out"), *script_args]
        capsys.readouterr()
        status = run_script(script, arguments) if alone else main(["run", *flags, str(script), *arguments])
        out, err = capsys.readouterr()
        printed = [line for line in out.splitlines() if line.startswith(("{", "["))]
        return status, json.loads(printed[-1]) if printed else None, err

    yield run_text
    close_open_engine()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def refusal(err):
    return next(line for line in err.splitlines() if line.startswith("patrickstar run: "))


TRAINER = """
import json, sys
from transformers import HfArgumentParser, Trainer, TrainingArguments
from tests.integrations.trainer_runs import Tokens, gpt2

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
trainer = Trainer(gpt2(), args, train_dataset=Tokens(8, seed=1))
trainer.train()
config = trainer.engine._session.config
print(json.dumps({
    "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    "schedule": type(trainer.lr_scheduler).__name__,
    "optimizer": [config.optimizer.type.value, config.optimizer.states.value],
    "stage": config.zero_optimization.stage,
    "budget": trainer.engine.report()["device_budget_bytes"],
    "deepspeed": args.deepspeed,
}))
"""
TRAINER_FLAGS = "--use_cpu --max_steps 2 --per_device_train_batch_size 2 --learning_rate 1e-3 --logging_steps 1"
AUTO = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
DEEPSPEED_FILE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"loss_scale": 0},  # off, as in DeepSpeed, since `enabled` is missing
    "optimizer": {"type": "Adam", "params": AUTO},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 0},
    "project": "llamas",
}


def trainer_flags(*more):
    return ["--report_to", "none", "--save_strategy", "no", *TRAINER_FLAGS.split(), *more]


def trainer_script(text):
    return text.replace("import json, sys", "import json, sys\nsys.argv.insert(1, '--output_dir')")


def test_a_trainer_with_a_deepspeed_file(run, tmp_path, caplog):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(DEEPSPEED_FILE))
    flags = trainer_flags("--deepspeed", str(file))
    status, said, _ = run(trainer_script(TRAINER), *flags)
    assert (status, said["stage"], said["schedule"]) == (0, 3, "WarmupDecayLR")
    assert (said["optimizer"], said["budget"], said["deepspeed"]) == (["AdamW", "fp32"], 2**21, str(file))
    assert "unknown keys without effect, as in DeepSpeed: project" in caplog.messages
    file.write_text(json.dumps({**DEEPSPEED_FILE, "optimizer": {"type": "Lion", "params": {"lr": "auto"}}}))
    status, lion, _ = run(trainer_script(TRAINER), *flags)
    assert (status, lion["optimizer"]) == (0, ["Lion", "fp32"])  # the file's, as with DeepSpeed
    status, eight, _ = run(trainer_script(TRAINER), *trainer_flags("--optim", "paged_adamw_8bit"))
    assert (status, eight["optimizer"], eight["stage"]) == (0, ["AdamW", "8bit"], 0)
    assert said["losses"][0] == lion["losses"][0] == eight["losses"][0]
    file.write_text(json.dumps({**DEEPSPEED_FILE, "gradient_clipping": 0.25}))
    with pytest.raises(ValueError, match=r"gradient_clipping is 0.25 .*max_grad_norm is 1.0; leave"):
        run(trainer_script(TRAINER), *flags)


PREEMPTED = """
import json, signal, sys
from transformers import Trainer, TrainerCallback, TrainingArguments
from tests.integrations.trainer_runs import Tokens, gpt2

steps = []

class Told(TrainerCallback):
    def on_step_begin(self, args, state, *_, **__):
        steps.append(state.global_step)
        if len(sys.argv) > 2 and state.global_step == 1:
            signal.raise_signal(signal.SIGTERM)

args = TrainingArguments(sys.argv[1], use_cpu=True, max_steps=4, save_strategy="no", report_to=[])
Trainer(gpt2(), args, train_dataset=Tokens(8, seed=1), callbacks=[Told()]).train()
print(json.dumps(steps))
"""


def test_a_trainer_that_a_scheduler_ends(run, tmp_path, caplog):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"device_memory": "2MiB", "resume": "auto", "grace_seconds": 100}))
    flags = ("--config", str(file))
    assert run(PREEMPTED, "told", flags=flags)[0] == 75
    close_open_engine()
    assert run(PREEMPTED, flags=flags)[:2] == (0, [2, 3])
    close_open_engine()
    assert run(LOOP, flags=flags)[0] == 0
    assert "left to the script's own loop, and not taken from the configuration: resume, grace_seconds" in caplog.text


LOOP = """
import json, sys, torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch.utils.data import DataLoader
from tests.integrations.trainer_runs import Tokens, gpt2

has_plugin = "--plugin" in sys.argv
plugin = DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=2, gradient_clipping=0.5) if has_plugin else None
accelerator = Accelerator(True, gradient_accumulation_steps=1 if has_plugin else 2, deepspeed_plugin=plugin, cpu=True)
model = gpt2()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Tokens(8, seed=1), batch_size=1))
losses = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients and not has_plugin:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
accelerator.unwrap_model(model).save_pretrained(sys.argv[1])
engine = getattr(accelerator, "engine", None)
config = engine._session.config if engine else None
said = config and [config.zero_optimization.stage, config.gradient_clipping, str(config.compute_dtype)]
print(json.dumps([losses, said]))
"""


def test_a_loop_of_accelerate(run, tmp_path):
    _, (expected, without_engine), _ = run(LOOP, alone=True)
    assert without_engine is None
    status, (losses, config), _ = run(LOOP)
    assert (status, config) == (0, [0, 0.0, "torch.float32"])
    assert losses == pytest.approx(expected, rel=1e-6)
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"model.safetensors", "config.json"}
    close_open_engine()
    status, (losses, config), _ = run(LOOP, "--plugin")
    assert (status, config) == (
        0,
        [3, 0.5, "torch.float32"],
    )  # the plugin's accumulation and clipping, as with DeepSpeed
    assert losses == pytest.approx(expected, rel=1e-6)


def test_a_loop_that_accelerate_launch_starts_with_deepspeed(run, tmp_path, monkeypatch, caplog):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**DEEPSPEED_FILE, "gradient_accumulation_steps": 2, "optimizer": {}}))
    launch = {"USE_DEEPSPEED": "true", "DEEPSPEED_CONFIG_FILE": str(file), "MIXED_PRECISION": "bf16"}
    for name, value in launch.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    status, (losses, config), _ = run(LOOP)
    assert (status, config) == (0, [3, 1.0, "torch.bfloat16"]) and len(losses) == 8
    assert any("left to the script's own loop" in line and "scheduler" in line for line in caplog.messages)
    accelerator = PatrickStarAccelerator(cpu=True)  # with the class itself, outside patrickstar run
    assert accelerator.gradient_accumulation_steps == 2 and accelerator.mixed_precision == "bf16"
    assert accelerator.state.deepspeed_plugin is None
    monkeypatch.delenv("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    status, said, _ = run(trainer_script(TRAINER), *trainer_flags())
    assert (status, said["stage"], said["deepspeed"]) == (0, 2, None)


DEEPSPEED = """
import json, torch
import deepspeed

model = torch.nn.Linear(8, 8)
config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(2):
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
print(json.dumps([engine.global_steps]))
"""


def test_a_script_of_deepspeed(run):
    status, said, err = run(DEEPSPEED)
    assert (status, said) == (2, None) and not open_sessions()
    assert "it imports deepspeed, " in refusal(err) and "write import patrickstar as deepspeed" in refusal(err)
    status, said, _ = run(DEEPSPEED.replace("import deepspeed", "import patrickstar as deepspeed"), flags=())
    assert (status, said) == (0, [2])


PLAIN = """
import json, torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    print(json.dumps([step]))
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
"""


def test_a_plain_loop_is_refused_at_its_first_step(run):
    status, said, err = run(PLAIN)
    assert (status, said) == (2, [0])
    assert "torch.optim.adamw.AdamW updates a model that is in no engine: " in refusal(err)
    assert "initialize_engine(lambda: model, 0, config) of patrickstar.runtime, and engine.backward" in refusal(err)
    assert run(PLAIN, alone=True)[:2] == (0, [2])  # the check has ended with the command


def test_another_loop_beside_an_engine_is_warned_of(run, caplog):
    script = DEEPSPEED.replace("import deepspeed", "import patrickstar as deepspeed") + PLAIN
    assert run(script, flags=())[:2] == (0, [2])
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["torch.optim.adamw.AdamW updates 2 parameters that are in no engine"]


def test_a_script_without_an_engine_is_refused_at_its_end(run):
    status, _, err = run("import sys; sys.exit(0)")
    assert status == 2 and "script.py: it has ended without an engine: a Trainer of transformers" in refusal(err)
    assert run("print('usage')", "--help")[0] == 0
    assert run("import sys; sys.exit(3)")[0] == 3
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        run("import nowhere")


LIGHTNING = """
import lightning.pytorch as pl, torch
from torch.utils.data import DataLoader

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(8, 8)

    def training_step(self, batch, _):
        return self.body(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = pl.Trainer(max_steps=2, accelerator="cpu", **quiet)
trainer.fit(Module(), DataLoader(torch.ones(8, 8), batch_size=2))
"""


def test_a_script_of_lightning(run):
    status, _, err = run(LIGHTNING)
    assert status == 2 and 'give its Trainer strategy="patrickstar" (docs/guides/lightning.md)' in refusal(err)
    changed = LIGHTNING.replace("import lightning", "import patrickstar.integrations.lightning, lightning")
    assert run(changed.replace("max_steps=2,", "max_steps=2, strategy='patrickstar',"), flags=())[0] == 0


def test_eight_bit_optimizers_by_every_name(tmp_path):
    names = [name for name in OptimizerNames if name.value.endswith("8bit") and "ademamix" not in name.value]
    taken = {name.value for name in names if not name.value.startswith(("galore", "rmsprop"))}
    assert {"adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "paged_adamw_8bit"} < taken
    for name in sorted(taken):
        kind = OptimizerType.LION if "lion" in name else OptimizerType.ADAMW
        assert optimizer_of(TrainingArguments(str(tmp_path), optim=name)) == (kind, States.EIGHT_BIT)
    assert optimizer_of(TrainingArguments(str(tmp_path), optim="paged_adamw_32bit"))[1] is States.FP32
    for name in ("adafactor", "galore_adamw"):
        with pytest.raises(
            ValueError, match=r"use AdamW with optimizer.states .8bit.\): set optim to 'adamw_bnb_8bit'"
        ):
            optimizer_of(TrainingArguments(str(tmp_path), optim=name))


def test_deepspeed_outside_patrickstar_run_is_refused_with_the_way_to_say_it(tmp_path):
    args = arguments(tmp_path)
    args.deepspeed = "ds.json"
    with pytest.raises(ValueError, match="give its configuration as patrickstar_config, or start the script by"):
        check_arguments(args, gpt2())
