import json
import logging
import os

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.checkpoint import checkpoint

from patrickstar import RankFailure, StateError
from patrickstar.activations.activation_rules import Saved
from patrickstar.checkpoint import tags
from patrickstar.integrations.lightning import PatrickStarPrecision, PatrickStarStrategy
from patrickstar.integrations.lightning.package import pl
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.integrations.lightning_runs import (
    CONFIG,
    NUM_PARAMETERS,
    WIDTH,
    Regression,
    SaveAfter,
    fit,
    loader,
    make_module,
    make_trainer,
    relative_error,
)
from tests.recomputing import choose_by_fixed_times

pytestmark = pytest.mark.filterwarnings("ignore")
TOLERANCE = 1e-6  # relative
BATCHES = 8  # of an epoch


def assert_ordinary(module):
    assert {type(param) for param in module.parameters()} == {nn.Parameter}
    assert all(param.device.type == "cpu" and param.requires_grad for param in module.parameters())
    module.loss(next(iter(loader()))).backward()
    assert all(param.grad is not None for param in module.parameters())
    module.zero_grad()


class Resizes(pl.Callback):
    refusals = 0

    def on_train_batch_end(self, trainer, *_):
        with pytest.raises(StateError, match="Lightning's loops and data loaders keep the ranks"):
            trainer.strategy.engine.resize(1)
        self.refusals += 1
        trainer.should_stop = True


def test_a_resize_is_refused():
    callback = Resizes()
    fit(PatrickStarStrategy(CONFIG), callbacks=[callback])
    assert callback.refusals > 0


def test_numbers_are_those_of_plain_lightning(tmp_path):
    plain = fit("auto", callbacks=[SaveAfter(0, tmp_path / "plain.ckpt")])
    ours = fit(PatrickStarStrategy(CONFIG), callbacks=[SaveAfter(0, tmp_path / "ours.ckpt")])
    assert relative_error(ours.losses, plain.losses) <= TOLERANCE
    assert relative_error(ours.norms, plain.norms) <= TOLERANCE
    assert relative_error(ours.evaluated, plain.evaluated) <= TOLERANCE
    assert ours.reports[0]["device_peak_bytes"] <= CONFIG["device_memory"]
    assert_ordinary(ours)

    resumed = fit("auto", ckpt_path=tmp_path / "plain.ckpt")
    to_plain = fit("auto", ckpt_path=tmp_path / "ours.ckpt")
    from_plain = fit(PatrickStarStrategy(CONFIG), ckpt_path=tmp_path / "plain.ckpt")
    assert relative_error(to_plain.losses, resumed.losses) <= TOLERANCE
    assert relative_error(from_plain.losses, resumed.losses) <= TOLERANCE
    loaded = Regression.load_from_checkpoint(tmp_path / "ours.ckpt", map_location="cpu")
    saved = torch.load(tmp_path / "ours.ckpt")["state_dict"]
    assert_same_bits(loaded.state_dict(), saved)


class Checkpointed(Regression):
    def forward(self, inputs):
        for first in range(0, len(self.body), 2):
            inputs = checkpoint(self.body[first : first + 2], inputs, use_reentrant=False)
        return inputs

    def on_train_end(self):
        super().on_train_end()
        self.saved = self.trainer.strategy.engine._session.checkpoint_calls.saved


def test_checkpointed_calls_save_what_pays(monkeypatch):
    choose_by_fixed_times(monkeypatch.setattr)
    always, auto = (
        fit(PatrickStarStrategy({"activations": {"recompute": recompute}}), kind=Checkpointed, max_epochs=1)
        for recompute in ("always", "auto")
    )
    assert set(always.saved) == set()
    assert set(auto.saved) == {Saved.EVERYTHING}
    assert auto.losses == always.losses
    assert_same_bits(auto.state_dict(), always.state_dict())


class Thaw(pl.callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.body[:-2])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.body[2:-2], optimizer, lr=2e-3)


class Thawed(Regression):
    def configure_optimizers(self):
        return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], lr=1e-3)


def test_layers_are_unfrozen():
    plain = fit("auto", kind=Thawed, callbacks=[Thaw()])
    ours = fit(PatrickStarStrategy(CONFIG), kind=Thawed, callbacks=[Thaw()])
    assert relative_error(ours.losses, plain.losses) <= TOLERANCE
    assert relative_error(ours.evaluated, plain.evaluated) <= TOLERANCE
    assert all(param.requires_grad for param in ours.body[2:].parameters())
    assert not any(param.requires_grad for param in ours.body[0].parameters())


@pytest.mark.parametrize(
    ("precision", "checkpoint_format"),
    [("32-true", "folder"), ("bf16-true", "file"), ("bf16-mixed", "folder"), ("16-mixed", "file")],
)
def test_resumed_is_uninterrupted(precision, checkpoint_format, tmp_path):
    def run(**options):
        strategy = PatrickStarStrategy(CONFIG, checkpoint_format=checkpoint_format)
        options |= {"max_epochs": 3, "limit_train_batches": 4}
        # Lightning itself has no float16 without a GPU.
        how = {"plugins": PatrickStarPrecision(precision)} if precision == "16-mixed" else {"precision": precision}
        return fit(strategy, **how, **options)

    whole = run(callbacks=[SaveAfter(0, tmp_path / "last.ckpt"), SaveAfter(1, tmp_path / "last.ckpt")])
    resumed = run(ckpt_path=tmp_path / "last.ckpt")
    assert len(resumed.losses) == 4 and resumed.losses == whole.losses[8:]
    assert len(resumed.norms) == 2 and resumed.norms == whole.norms[4:]
    assert_same_bits(resumed.state_dict(), whole.state_dict())
    assert (whole.reports[0]["loss_scale"] > 1) == (precision == "16-mixed")
    if checkpoint_format == "folder":
        assert tags(tmp_path / "last.ckpt") == ["global_step4"]  # the older one is gone
    if precision != "32-true":
        exact = fit("auto", max_epochs=3, limit_train_batches=4)
        error = relative_error(whole.losses, exact.losses)
        print(f"{precision}: losses within {error:.1e} of float32's")
        assert TOLERANCE < error < 2e-2


class Failing(Regression):
    def training_step(self, batch, index):
        if index == 3 and self.global_rank == self.trainer.world_size - 1:
            raise RuntimeError("no batch")
        return super().training_step(batch, index)


class Shifted(Regression):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("running", torch.randn(WIDTH, dtype=torch.bfloat16))

    def forward(self, inputs):
        if self.training:
            self.running.mul_(0.5).add_(inputs.detach().mean(0).bfloat16())
        return super().forward(inputs + self.shift + self.running.float())


def fit_shifted(seed):
    torch.manual_seed(seed)
    module = Shifted()
    make_trainer(PatrickStarStrategy(CONFIG), devices=2, max_epochs=1).fit(module, loader())
    return module.losses, dict(module.state_dict())


def rank_runs(folder):
    # All ranks train rank 0's model.
    assert_same_bits(fit_shifted(5 * int(os.environ["RANK"])), fit_shifted(0))
    plain = fit("ddp", devices=2)
    for checkpoint_format in ("file", "folder"):
        path = f"{folder}/{checkpoint_format}"
        ours = fit(
            PatrickStarStrategy(CONFIG, checkpoint_format=checkpoint_format), devices=2, callbacks=[SaveAfter(0, path)]
        )
        assert relative_error(ours.losses, plain.losses) <= TOLERANCE
        assert relative_error(ours.norms, plain.norms) <= TOLERANCE
        assert relative_error(ours.evaluated, plain.evaluated) <= TOLERANCE
        assert ours.reports[0]["device_peak_bytes"] <= CONFIG["device_memory"]
        strategy = PatrickStarStrategy(CONFIG, checkpoint_format=checkpoint_format)
        assert fit(strategy, devices=2, ckpt_path=path).losses == ours.losses[BATCHES // 2 :]
    module = make_module()
    trainer = make_trainer(PatrickStarStrategy(CONFIG), devices=2)
    metrics = trainer.validate(module, loader(), ckpt_path=path, verbose=False)
    error = RuntimeError if trainer.global_rank == 1 else RankFailure
    with pytest.raises(error, match="no batch"):  # the last rank's, of which the other is told
        make_trainer(PatrickStarStrategy(CONFIG), devices=2).fit(make_module(Failing), loader())
    return plain.losses, metrics[0]["loss"], sum(module.evaluated) / len(module.evaluated)


@pytest.mark.slow
def test_two_ranks(tmp_path):
    (losses, metric, mean), (other_losses, other_metric, other_mean) = run_ranks(2, rank_runs, str(tmp_path))
    assert losses != other_losses and len(losses) == BATCHES  # each has its half of the data
    assert metric == other_metric == pytest.approx((mean + other_mean) / 2, rel=1e-6)  # sync_dist
    whole = fit(PatrickStarStrategy(CONFIG, checkpoint_format="folder"), ckpt_path=tmp_path / "folder")
    assert len(whole.losses) == BATCHES  # one rank goes on from what two saved


def test_evaluation_holds_parameters_alone():
    for name in ("validate", "test", "predict"):
        results = []
        for strategy in ("auto", PatrickStarStrategy(CONFIG)):
            module = make_module()
            options = {} if name == "predict" else {"verbose": False}
            results.append(getattr(make_trainer(strategy), name)(module, loader(), **options))
        if name == "predict":
            assert_same_bits(*results)
            assert module.reports[0]["host_peak_bytes"] < 8 * NUM_PARAMETERS  # 16 in training
        else:
            assert results[0] == results[1]
        assert_ordinary(module)


def test_best_and_last_checkpoints(tmp_path):
    results = []
    for index, strategy in enumerate(("auto", PatrickStarStrategy(CONFIG, checkpoint_format="folder"))):
        keep = pl.callbacks.ModelCheckpoint(tmp_path / str(index), monitor="loss", save_top_k=1, save_last=True)
        trainer = make_trainer(strategy, callbacks=[keep], enable_checkpointing=True, max_epochs=3)
        trainer.fit(make_module(), loader(), loader())
        results.append([trainer.test(ckpt_path=name, dataloaders=loader(), verbose=False) for name in ("best", "last")])
        assert len(list((tmp_path / str(index)).iterdir())) == 2  # the best of before is removed
    for (plain,), (ours,) in zip(*results, strict=True):
        assert ours["loss"] == pytest.approx(plain["loss"], rel=TOLERANCE)


class Manual(Regression):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, _):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.05, "norm")
        optimizer.step()
        self.lr_schedulers().step()


class Plateau(Regression):
    def configure_optimizers(self):
        optimizer = self.make_optimizer()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}

    def training_step(self, batch, index):
        return None if index % 4 == 3 else super().training_step(batch, index)

    def on_train_end(self):
        super().on_train_end()
        self.losses.append(self.trainer.optimizers[0].param_groups[0]["lr"])


class BuiltLate(Regression):
    def __init__(self):
        super().__init__()
        self.body = None

    def configure_model(self):
        if self.body is None:
            self.body = self.make_body()


@pytest.mark.parametrize(
    ("kind", "options", "strategy_options"),
    [
        (Manual, {"gradient_clip_val": None, "accumulate_grad_batches": 1}, {}),
        (Plateau, {}, {}),
        (BuiltLate, {}, {"module_init": "cpu"}),
        (BuiltLate, {}, {"module_init": "meta"}),
    ],
    ids=["manual", "plateau", "built_on_cpu", "built_on_meta"],
)
def test_ways_to_write_a_module(kind, options, strategy_options):
    plain = fit("auto", kind, **options)
    ours = fit(PatrickStarStrategy(CONFIG, **strategy_options), kind, **options)
    assert relative_error(ours.losses, plain.losses) <= TOLERANCE
    assert_ordinary(ours)


def test_after_a_run(tmp_path):
    plain = fit("auto", max_epochs=3)
    for after_run in ("module", "everything", "nothing"):
        module = make_module()
        trainer = make_trainer(PatrickStarStrategy(CONFIG, after_run=after_run))
        trainer.fit(module, loader(), loader())
        if after_run == "nothing":
            assert all(param.numel() == 0 for param in module.parameters())
            continue
        assert_ordinary(module)
        trainer.save_checkpoint(tmp_path / after_run)
        options = {"ckpt_path": tmp_path / after_run, "max_epochs": 3}
        if after_run == "everything":
            assert type(trainer.optimizers[0]) is torch.optim.AdamW
            assert relative_error(fit("auto", **options).losses, plain.losses[2 * BATCHES :]) <= TOLERANCE
        else:
            with pytest.raises(ValueError, match="load the weights alone with load_from_checkpoint"):
                fit(PatrickStarStrategy(CONFIG), **options)


class Adapted(Regression):
    def __init__(self):
        super().__init__()
        self.strict_loading = False
        self.body.requires_grad_(False)
        self.body[-2].requires_grad_(True)

    def state_dict(self):
        return {name: value for name, value in super().state_dict().items() if name.startswith("body.14.")}


class Bfloat16(Regression):
    def __init__(self):
        super().__init__()
        self.bfloat16()


@pytest.mark.parametrize(("kind", "precision"), [(Adapted, "32-true"), (Bfloat16, "bf16-true")])
def test_what_a_file_holds(kind, precision, tmp_path):
    path = tmp_path / "halfway.ckpt"
    whole = fit(PatrickStarStrategy(CONFIG), kind, precision=precision, callbacks=[SaveAfter(0, path)])
    resumed = fit(PatrickStarStrategy(CONFIG), kind, precision=precision, ckpt_path=path)
    assert resumed.losses == whole.losses[BATCHES:]  # float32 values that the module itself does not have
    assert len(torch.load(path)["state_dict"]) == (2 if kind is Adapted else 16)
    assert resumed.body[0].weight.dtype == (torch.bfloat16 if kind is Bfloat16 else torch.float32)


def test_a_failed_run_leaves_an_ordinary_module():
    module = make_module(Failing)
    strategy = PatrickStarStrategy(CONFIG)
    with pytest.raises(RuntimeError, match="no batch"):
        make_trainer(strategy).fit(module, loader())
    assert_ordinary(module)
    with pytest.raises(StateError, match="there is no engine"):
        print(strategy.engine)


class HoldsEngine(Regression):
    def configure_optimizers(self):
        self.engine, optimizer = initialize_engine(lambda: self, 0, {"optimizer": {"type": "AdamW"}})
        return optimizer


def test_an_unmodified_trainer_raises():
    module = make_module(HoldsEngine)
    with pytest.raises(StateError) as caught:
        make_trainer("auto").fit(module, loader())
    module.engine.close()
    causes = [caught.value]
    while causes[-1].__context__ is not None:
        causes.append(causes[-1].__context__)
    assert any("loss.backward() was called; call model.backward(loss) instead" in str(cause) for cause in causes)
    assert_same_bits(list(module.parameters()), list(make_module().parameters()))  # nothing was updated


class TwoOptimizers(Manual):
    def configure_optimizers(self):
        return [torch.optim.AdamW(self.body[0].parameters()), torch.optim.AdamW(self.body[2].parameters())]


class Adagrad(Regression):
    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


class OwnBackward(Regression):
    def backward(self, loss):
        loss.backward()


MANUAL = {"gradient_clip_val": None, "accumulate_grad_batches": 1}


REFUSED = [
    ({}, TwoOptimizers, MANUAL, "returned 2 optimizers; an engine has one"),
    ({}, Adagrad, {}, "torch.optim.adagrad.Adagrad; PatrickStar updates as torch.optim.Adam"),
    ({}, OwnBackward, {}, "OwnBackward overrides backward"),
    ({}, Regression, {"gradient_clip_algorithm": "value"}, 'gradient_clip_algorithm is "value"'),
    ({}, Regression, {"precision": "64-true"}, 'precision is "64-true"; PatrickStar trains in "32-true", "bf16'),
    ({}, Regression, {"precision": "16-true"}, 'give one of them \\("16-mixed" for float16\\)'),
    ({}, Regression, {"sync_batchnorm": True}, "sync_batchnorm replaces layers"),
    ({"gradient_clipping": 1.0}, Regression, {}, r"gradient_clipping is 1.0 .*gradient_clip_val is 0.05"),
    ({"bf16": {}}, Regression, {}, r'bf16.enabled is True .*Trainer\(precision="32-true"\) \(bf16\) is False'),
    ({"optimizer": {"type": "Adam"}}, Regression, {}, "optimizer.type is 'Adam' .* class is 'AdamW'"),
    ({"optimizer": {"params": {"lr": 1.0}}}, Regression, {}, "optimizer.params.lr is 1.0 .* lr is 0.01"),
]


def test_what_cannot_be_done_is_refused():
    for config, kind, options, message in REFUSED:
        module = make_module(kind)
        with pytest.raises(ValueError, match=message):
            make_trainer(PatrickStarStrategy(config), **options).fit(module, loader())
        assert {type(param) for param in module.parameters()} == {nn.Parameter}


def test_by_name_with_a_file(tmp_path, caplog):
    assert isinstance(make_trainer("patrickstar").strategy, PatrickStarStrategy)
    caplog.set_level(logging.INFO, "patrickstar")
    for printed, lines in ({}, 0), ({"steps_per_print": 3}, 2):  # Lightning says by itself how a run goes
        config = {"gradient_clipping": 0.05, "default_chunk_size": 8192, **printed}
        (tmp_path / "config.json").write_text(json.dumps(config))
        ours = fit(PatrickStarStrategy(tmp_path / "config.json"), gradient_clip_val=None)
        said = [message for message in caplog.messages if message.startswith("step ")]
        assert len(said) == lines
        assert relative_error(ours.losses, fit("auto").losses) <= TOLERANCE
    assert said[1].startswith(f"step 6  loss {sum(ours.losses[10:12]) / 2:.4f}  ")  # mean of two batches
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON|is neither JSON"):
        PatrickStarStrategy(str(tmp_path / "config.json"))


class Averages(pl.callbacks.WeightAveraging):
    def __init__(self):
        super().__init__(avg_fn=get_ema_avg_fn(0.9))
        self.ends = None

    def on_train_end(self, trainer, module):
        self.ends = trainer.strategy.engine.state_dict()
        super().on_train_end(trainer, module)


class Keeps(pl.Callback):
    ends = None

    def on_train_end(self, trainer, module):
        self.ends = trainer.strategy.engine.state_dict()


def test_averaged_weights_leave_the_training_as_it_is():
    with_averages, without = Averages(), Keeps()
    for callback in (with_averages, without):
        module = fit(PatrickStarStrategy(CONFIG), callbacks=[callback], precision="bf16-mixed")
        if callback is with_averages:
            averaged = dict(module.named_parameters())
    assert_same_bits(with_averages.ends, without.ends)
    for name, value in averaged.items():
        assert not torch.equal(value, value.bfloat16().float()), name
        assert_same_bits(value.detach(), dict(with_averages._average_model.module.named_parameters())[name].detach())
