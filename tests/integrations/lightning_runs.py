import logging
import warnings

import torch
from torch import nn
from torch.nn import functional

from patrickstar.integrations.lightning import PatrickStarStrategy
from patrickstar.integrations.lightning.package import pl

for name in ("lightning.pytorch", "pytorch_lightning"):
    logging.getLogger(name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning|pytorch_lightning")
WIDTH, LAYERS, BATCH = 90, 8, 4
NUM_PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
CLIPPING = 0.05
"""Less than every gradient norm of these runs."""
CONFIG = {"device_memory": 16 * NUM_PARAMETERS // 4, "default_chunk_size": 8192}
"""A quarter of model data: parameter, master and two states take 16 bytes in float32."""


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = self.make_body()
        self.losses, self.norms, self.evaluated, self.reports = [], [], [], []

    @staticmethod
    def make_body():
        return nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))

    def forward(self, inputs):
        return self.body(inputs)

    def loss(self, batch):
        inputs, targets = batch
        return functional.mse_loss(self(inputs), targets)

    def training_step(self, batch, _):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, _):
        loss = self.loss(batch)
        self.evaluated.append(loss.item())
        self.log("loss", loss, sync_dist=True)

    def test_step(self, batch, index):
        self.validation_step(batch, index)

    def predict_step(self, batch, _):
        return self(batch[0])

    def on_before_optimizer_step(self, _):
        strategy = self.trainer.strategy
        if isinstance(strategy, PatrickStarStrategy):
            self.norms.append(strategy.engine.grad_norm())
        else:
            gradients = [param.grad for param in self.parameters() if param.requires_grad]
            self.norms.append(nn.utils.get_total_norm(gradients).item())

    def on_train_end(self):
        strategy = self.trainer.strategy
        if isinstance(strategy, PatrickStarStrategy):
            self.reports.append(strategy.engine.report())

    on_predict_end = on_train_end

    def make_optimizer(self):
        weights = [param for param in self.parameters() if param.ndim > 1]
        biases = [param for param in self.parameters() if param.ndim == 1]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 5e-3}]
        return torch.optim.AdamW(groups, lr=1e-2, eps=1e-6)

    def configure_optimizers(self):
        optimizer = self.make_optimizer()
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], [4])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader():
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(8 * BATCH, WIDTH, generator=generator) for _ in range(2))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=BATCH)


def make_module(kind=Regression):
    torch.manual_seed(0)
    return kind()


def make_trainer(strategy, devices=1, **options):
    defaults = {"accumulate_grad_batches": 2, "gradient_clip_val": CLIPPING, "max_epochs": 2, "logger": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    where = {"accelerator": "cpu", "devices": devices}
    return pl.Trainer(strategy=strategy, **(where | defaults | quiet | options))


def fit(strategy, kind=Regression, ckpt_path=None, **options):
    module = make_module(kind)
    make_trainer(strategy, **options).fit(module, loader(), loader(), ckpt_path=ckpt_path)
    return module


def relative_error(values, expected):
    assert len(values) == len(expected) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))


class SaveAfter(pl.Callback):
    def __init__(self, epoch, path):
        self._epoch, self._path = epoch, path

    def on_train_epoch_end(self, trainer, _):
        if trainer.current_epoch == self._epoch:
            trainer.save_checkpoint(self._path)
