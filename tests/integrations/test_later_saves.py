"""Saves of Accelerate and Lightning go on beside training; a complete checkpoint stays, whatever happens to them."""

import errno
import threading

import pytest
import torch
from accelerate.utils import ProjectConfiguration

from patrickstar import CheckpointError
from patrickstar.checkpoint import Checkpoint, latest_tag
from patrickstar.engine.engine import Engine
from patrickstar.integrations.accelerate import PatrickStarAccelerator
from patrickstar.integrations.engine_states import is_incomplete
from patrickstar.integrations.lightning import PatrickStarStrategy
from patrickstar.integrations.lightning.package import pl
from patrickstar.integrations.transformers import PatrickStarTrainer
from tests.bits import assert_same_bits
from tests.checkpoint.test_later_saves import Gate
from tests.integrations.lightning_runs import CONFIG, loader, make_module, make_trainer
from tests.integrations.test_accelerate import parts, run_loop
from tests.integrations.trainer_runs import engine_config
from tests.integrations.trainer_runs import make_trainer as make_hf_trainer

pytestmark = pytest.mark.filterwarnings("ignore")
FULL = OSError(errno.ENOSPC, "no space")


@pytest.fixture
def accelerator_of(tmp_path):
    made = []

    def make(**project):
        made.append(
            PatrickStarAccelerator(
                cpu=True,
                project_config=ProjectConfiguration(project_dir=str(tmp_path), **project),
                patrickstar_config=engine_config(),
            )
        )
        torch.manual_seed(3)
        return made[-1], made[-1].prepare(*parts())

    yield make
    for accelerator in made:
        accelerator.free_memory()


def step(accelerator, prepared):
    return run_loop(accelerator, prepared, steps=1)


def states(tmp_path):
    """The named states, and whether each is complete."""
    folders = sorted((tmp_path / "checkpoints").iterdir())
    return {folder.name: latest_tag(folder / "patrickstar") is not None for folder in folders}


def test_accelerate_trains_while_it_saves_and_loads_when_that_is_complete(tmp_path, monkeypatch, accelerator_of):
    accelerator, prepared = accelerator_of()
    step(accelerator, prepared)
    expected = accelerator.get_state_dict(prepared[0])
    gate = Gate(monkeypatch)
    accelerator.save_state(str(tmp_path / "state"))
    step(accelerator, prepared)
    assert latest_tag(tmp_path / "state/patrickstar") is None
    threading.Timer(0.2, gate.opened.set).start()
    accelerator.load_state(str(tmp_path / "state"))
    assert_same_bits(accelerator.get_state_dict(prepared[0]), expected)
    step(accelerator, prepared)
    gate.opened.clear()
    accelerator.save_state(str(tmp_path / "state"))  # over a state: this thread writes
    with Checkpoint.find(tmp_path / "state/patrickstar", None) as checkpoint:
        checkpoint.verify()


def test_the_end_of_training_waits(tmp_path, monkeypatch, accelerator_of):
    accelerator, prepared = accelerator_of()
    step(accelerator, prepared)
    gate = Gate(monkeypatch)
    accelerator.save_state(str(tmp_path / "state"))
    threading.Timer(0.2, gate.opened.set).start()
    accelerator.end_training()
    assert latest_tag(tmp_path / "state/patrickstar") is not None


def test_accelerate_keeps_a_complete_state_when_a_save_fails(tmp_path, monkeypatch, accelerator_of):
    accelerator, prepared = accelerator_of(automatic_checkpoint_naming=True, total_limit=2)
    for iteration in range(3):
        step(accelerator, prepared)
        accelerator.project_configuration.iteration = iteration
        accelerator.save_state()
    accelerator.engine.wait_for_save()
    assert states(tmp_path) == {"checkpoint_1": True, "checkpoint_2": True}
    with monkeypatch.context() as patched:
        gate = Gate(patched, FULL)
        gate.opened.set()
        accelerator.project_configuration.iteration = 3
        accelerator.save_state()
        with pytest.raises(CheckpointError, match="no space"):
            accelerator.save_state()
    assert states(tmp_path) == {"checkpoint_2": True, "checkpoint_3": False}
    step(accelerator, prepared)
    accelerator.project_configuration.iteration = 4
    accelerator.save_state()  # waits: else the only complete state would be removed before
    assert states(tmp_path) == {"checkpoint_3": False, "checkpoint_4": True}
    accelerator.load_state()


def test_accelerate_with_one_state_has_always_one(tmp_path, monkeypatch, accelerator_of):
    accelerator, prepared = accelerator_of(automatic_checkpoint_naming=True, total_limit=1)
    for iteration in range(2):
        step(accelerator, prepared)
        accelerator.project_configuration.iteration = iteration
        accelerator.save_state()
        if iteration == 0:
            accelerator.engine.wait_for_save()  # nothing is removed for the first one, so it goes on
        assert states(tmp_path) == {f"checkpoint_{iteration}": True}
    accelerator.project_configuration.iteration = 2
    with monkeypatch.context() as patched:
        patched.setattr("patrickstar.checkpoint.disk.Disk.write", failing)
        with pytest.raises(CheckpointError, match="no space"):
            accelerator.save_state()
    assert states(tmp_path) == {"checkpoint_1": True, "checkpoint_2": False}
    accelerator.load_state()


def test_the_trainer_keeps_a_complete_checkpoint_when_a_save_fails(tmp_path, monkeypatch):
    """The second save fails after its step; the third, after which two folders stay, is waited for."""
    saves = []
    save_checkpoint = Engine.save_checkpoint

    def watched(engine, folder, **options):
        saves.append(options["wait"])
        with monkeypatch.context() as patched:
            if len(saves) == 2:
                gate = Gate(patched, FULL)
                gate.opened.set()
            path = save_checkpoint(engine, folder, **options)
            if len(saves) == 2:
                with pytest.raises(CheckpointError, match="no space"):
                    engine.wait_for_save()
        return path

    monkeypatch.setattr(Engine, "save_checkpoint", watched)
    options = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    trainer = make_hf_trainer(PatrickStarTrainer, tmp_path, **options)
    trainer.train()
    trainer.close()
    assert saves[:4] == [False, False, True, False]
    assert not any(map(is_incomplete, tmp_path.glob("checkpoint-*")))


def failing(*_):
    raise FULL


class Watch(pl.Callback):
    """Holds each epoch's save until the next epoch's first batch, and looks at the folders there."""

    def __init__(self, folder, gate):
        self.folder, self.gate, self.seen = folder, gate, []

    def on_train_epoch_end(self, *_):
        self.gate.opened.clear()

    def on_train_batch_start(self, trainer, module, batch, index):
        if index == 0 and trainer.current_epoch > 0:
            self.seen.append({path.name: latest_tag(path) is not None for path in sorted(self.folder.iterdir())})
            self.on_train_end()
            trainer.strategy.engine._session.saves._thread.join()

    def on_train_end(self, *_):
        self.gate.opened.set()


def fit(watch):
    keep = pl.callbacks.ModelCheckpoint(watch.folder, save_top_k=1, filename="{epoch}", save_on_train_epoch_end=True)
    strategy = PatrickStarStrategy(CONFIG, checkpoint_format="folder")
    trainer = make_trainer(strategy, callbacks=[watch, keep], enable_checkpointing=True, max_epochs=3)
    trainer.fit(make_module(), loader())


def test_lightning_removes_a_checkpoint_when_the_newer_one_is_complete(tmp_path, monkeypatch):
    watch = Watch(tmp_path, Gate(monkeypatch))
    fit(watch)
    assert watch.seen == [{"epoch=0.ckpt": False}, {"epoch=0.ckpt": True, "epoch=1.ckpt": False}]
    assert [(path.name, latest_tag(path)) for path in tmp_path.iterdir()] == [("epoch=2.ckpt", "global_step12")]


class Failing(Watch):
    """The second epoch's save fails."""

    def on_train_epoch_end(self, trainer, *_):
        super().on_train_epoch_end()
        self.gate.failure = FULL if trainer.current_epoch == 1 else None


def test_lightning_keeps_a_complete_checkpoint_when_a_save_fails(tmp_path, monkeypatch):
    watch = Failing(tmp_path, Gate(monkeypatch))
    with pytest.raises(CheckpointError, match="no space"):
        fit(watch)
    assert watch.seen[-1] == {"epoch=0.ckpt": True, "epoch=1.ckpt": False}
    with Checkpoint.find(tmp_path / "epoch=0.ckpt", None) as checkpoint:
        checkpoint.verify()
