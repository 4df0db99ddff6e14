import pytest
import torch
from torch.optim.swa_utils import get_ema_avg_fn

from patrickstar.integrations.lightning import PatrickStarStrategy
from patrickstar.integrations.lightning.package import pl
from tests.bits import assert_same_bits
from tests.integrations.lightning_runs import CONFIG, fit

pytestmark = pytest.mark.filterwarnings("ignore")


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
