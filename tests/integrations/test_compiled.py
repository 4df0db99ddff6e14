import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from transformers import Trainer

from patrickstar.integrations.accelerate import PatrickStarAccelerator
from patrickstar.integrations.lightning import PatrickStarStrategy
from patrickstar.integrations.transformers import PatrickStarTrainer
from tests.integrations import lightning_runs
from tests.integrations.test_accelerate import assert_equal_loops, parts, run_loop
from tests.integrations.trainer_runs import Tokens, arguments, engine_config, gpt2
from tests.module.compiled.forms import BACKEND

BUDGET = 640_000
"""Device bytes for one of two blocks at a time; model data have 1.7 MB."""


@pytest.fixture(autouse=True)
def _fresh():
    """The first accelerator of a process decides about torch.compile."""
    torch.compiler.reset()
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()
    torch.compiler.reset()


def lora():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(gpt2(), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))


@pytest.mark.parametrize("build", [gpt2, pytest.param(lora, marks=pytest.mark.slow)])
def test_trainer(build, tmp_path):
    logs = []
    for kind in (PatrickStarTrainer, Trainer):
        args = arguments(tmp_path, torch_compile=True, torch_compile_backend=BACKEND)
        own = {"patrickstar_config": engine_config(device_memory=BUDGET)} if kind is PatrickStarTrainer else {}
        trainer = kind(model=build(), args=args, train_dataset=Tokens(8, 1), eval_dataset=Tokens(4, 2), **own)
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        logs.append(
            [value for log in trainer.state.log_history for key in ("loss", "grad_norm") if (value := log.get(key))]
        )
        logs[-1].append(loss)
        if kind is PatrickStarTrainer:
            assert trainer.engine.is_compiled
            trainer.close()
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)


def test_accelerator():
    runs = []
    for kind, own in (
        (Accelerator, {}),
        (PatrickStarAccelerator, {"patrickstar_config": engine_config(device_memory=BUDGET)}),
    ):
        AcceleratorState._reset_state()
        torch.manual_seed(3)
        accelerator = kind(cpu=True, gradient_accumulation_steps=2, dynamo_backend=BACKEND, **own)
        prepared = accelerator.prepare(*parts())
        runs.append(run_loop(accelerator, prepared))
        assert kind is Accelerator or accelerator.engine.is_compiled
        accelerator.free_memory()
    assert_equal_loops(runs[1], runs[0])


def test_cuda_graphs_are_refused():
    plugin = {"dynamo_backend": "cudagraphs"}
    with pytest.raises(ValueError, match="the model is compiled with CUDA graphs"):
        PatrickStarAccelerator(cpu=True, **plugin)


class Blocks(lightning_runs.Regression):
    @staticmethod
    def make_body():
        layers = list(lightning_runs.Regression.make_body())
        return nn.Sequential(nn.Sequential(*layers[:8]), nn.Sequential(*layers[8:]))


class CompiledInside(Blocks):
    def configure_model(self):
        if not hasattr(self.body, "_orig_mod"):
            self.body = torch.compile(self.body, backend=BACKEND)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [Blocks, CompiledInside])
def test_lightning(kind):
    """Lightning alone runs uncompiled: its compiled steps cannot log."""
    config = {**lightning_runs.CONFIG, "device_memory": 3 * lightning_runs.CONFIG["device_memory"] // 2}
    losses = []
    for strategy in (PatrickStarStrategy(config), "auto"):
        module = lightning_runs.make_module(kind)
        compiles = kind is Blocks and strategy != "auto"
        given = torch.compile(module, backend=BACKEND) if compiles else module
        trainer = lightning_runs.make_trainer(strategy)
        trainer.fit(given, lightning_runs.loader(), lightning_runs.loader())
        assert (module._compiler_ctx is not None) == compiles  # as Lightning left it
        assert ("training_step" in vars(module)) == compiles
        trainer.validate(module, lightning_runs.loader())
        losses.append(module.losses + module.evaluated)
        if strategy != "auto":
            assert module.reports[0]["device_peak_bytes"] <= config["device_memory"]
    assert lightning_runs.relative_error(*losses) <= 1e-5
