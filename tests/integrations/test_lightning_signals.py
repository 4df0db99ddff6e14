"""A scheduler's signal ends a fit with a checkpoint after a whole step, and the same command goes on."""

import os
import signal

import pytest

from patrickstar.checkpoint import latest_tag
from patrickstar.integrations.lightning import PatrickStarStrategy, Preemption
from patrickstar.integrations.lightning.package import pl
from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.integrations.lightning_runs import CONFIG, loader, make_module, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore")
PREEMPTED = 75


class Signal(pl.Callback):
    """Sends a signal in the ``micro_batch``-th forward."""

    def __init__(self, signum, micro_batch):
        self.signum, self.micro_batch = signum, micro_batch

    def on_train_batch_start(self, trainer, module, batch, index):
        if len(module.losses) + 1 == self.micro_batch:
            signal.raise_signal(self.signum)


def fitted(folder, *callbacks, checkpoint_format="folder", saves=True, **options):
    """The module of a fit of 12 steps, four of two micro-batches in an epoch."""
    keep = pl.callbacks.ModelCheckpoint(folder, save_on_exception=saves, save_last=True)
    strategy = PatrickStarStrategy(CONFIG, checkpoint_format=checkpoint_format)
    every = [*callbacks, keep, Preemption()]
    trainer = make_trainer(strategy, callbacks=every, enable_checkpointing=True, max_epochs=3, **options)
    module = make_module()
    trainer.fit(module, loader(), ckpt_path="last")
    return module


@pytest.mark.parametrize(
    ("signum", "micro_batch", "checkpoint_format"),
    [(signal.SIGTERM, 15, "folder"), (signal.SIGUSR1, 15, "file"), (signal.SIGTERM, 16, "folder")],
)
def test_a_signal_ends_a_fit_after_a_whole_step(signum, micro_batch, checkpoint_format, tmp_path):
    """The step is the last of the second epoch: within an epoch Lightning begins with its first batch again."""
    former = signal.getsignal(signum)
    with pytest.raises(SystemExit) as ended:
        fitted(tmp_path / "parts", Signal(signum, micro_batch), checkpoint_format=checkpoint_format)
    assert ended.value.code == PREEMPTED
    assert signal.getsignal(signum) is former
    rest = fitted(tmp_path / "parts", checkpoint_format=checkpoint_format)
    assert len(rest.losses) == 8
    whole = fitted(tmp_path / "whole", checkpoint_format=checkpoint_format)
    assert_same_bits(rest.state_dict(), whole.state_dict())


def test_a_fit_that_would_not_be_saved_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Preemption needs a ModelCheckpoint"):
        fitted(tmp_path, saves=False)


def stopped(folder):
    """Status of a fit on ranks as torchrun's, of which the second gets a signal."""
    os.environ.update({name: "0" for name in ("TORCHELASTIC_RUN_ID", "GROUP_RANK")})
    sent = [Signal(signal.SIGTERM, 3)] if os.environ["RANK"] == "1" else []
    with pytest.raises(SystemExit) as ended:
        fitted(folder, *sent, devices=2)
    return ended.value.code


@pytest.mark.slow
def test_one_ranks_signal_ends_all_in_the_same_step(tmp_path):
    assert run_ranks(2, stopped, str(tmp_path)) == [PREEMPTED] * 2
    assert latest_tag(tmp_path / "last.ckpt") == "global_step2"
