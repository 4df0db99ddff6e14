"""Modules with metrics of torchmetrics."""

import pytest
import torch
import torchmetrics

from patrickstar.integrations.lightning import PatrickStarStrategy
from patrickstar.integrations.lightning.package import pl
from tests.integrations.lightning_runs import BATCH, CONFIG, WIDTH, Regression, loader, make_module, make_trainer


class Measured(Regression):
    def __init__(self):
        super().__init__()
        accuracy = torchmetrics.classification.MulticlassAccuracy
        self.mean = torchmetrics.MeanMetric()
        self.accuracies = torchmetrics.MetricCollection({"micro": accuracy(WIDTH, average="micro")}, prefix="val_")
        self.outputs = torchmetrics.CatMetric()

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.mean(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, _):
        outputs = self(batch[0])
        self.accuracies.update(outputs, batch[1].argmax(1))
        self.outputs.update(outputs.float().sum(1))

    def on_validation_epoch_end(self):
        self.log_dict(self.accuracies.compute())
        self.accuracies.reset()
        self.evaluated.append(self.outputs.compute().tolist())
        self.outputs.reset()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_metrics_are_those_of_plain_lightning(tmp_path, precision):
    modules = []
    for strategy in ("auto", PatrickStarStrategy(CONFIG)):
        folder = tmp_path / ("plain" if strategy == "auto" else "own")
        module = make_module(Measured)
        keep = pl.callbacks.ModelCheckpoint(folder, save_last=True)
        options = {"precision": precision, "enable_checkpointing": True, "callbacks": [keep]}
        trainer = make_trainer(strategy, max_epochs=1, **options)
        trainer.fit(module, loader(), loader())
        resumed = make_module(Measured)
        again = PatrickStarStrategy(CONFIG) if strategy != "auto" else strategy
        trainer = make_trainer(again, max_epochs=2, precision=precision)
        trainer.fit(resumed, loader(), loader(), ckpt_path=folder / "last.ckpt", weights_only=False)
        modules.append((module, resumed, trainer.callback_metrics["mean"].item()))
    (plain, plain_resumed, mean), (own, own_resumed, own_mean) = modules
    tolerance = 1e-5 if precision == "32-true" else 0.05
    assert own_mean == pytest.approx(mean, rel=tolerance)
    for one, other in ((own, plain), (own_resumed, plain_resumed)):
        outputs, expected = torch.tensor(one.evaluated[-1]), torch.tensor(other.evaluated[-1])
        assert len(outputs) == 8 * BATCH
        torch.testing.assert_close(outputs, expected, rtol=tolerance, atol=10 * tolerance)
