import pytest

from patrickstar.checkpoint import CheckpointError
from patrickstar.integrations.transformers import PatrickStarTrainer
from tests.bits import assert_same_bits
from tests.integrations.trainer_runs import make_trainer, train

OPTIONS = {"save_strategy": "steps", "save_steps": 2}


def test_a_save_that_was_interrupted_is_passed_over(tmp_path):
    """A killed process leaves the engine's folder without a complete checkpoint, and the Trainer's files beside it."""
    whole = train(make_trainer(PatrickStarTrainer, tmp_path, **OPTIONS))
    last = max(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.removeprefix("checkpoint-")))
    (saved,) = (path for path in (last / "patrickstar").iterdir() if path.is_dir())
    (last / "patrickstar" / "latest").unlink()
    saved.rename(saved.with_name(f".saving-{saved.name}-0"))
    with pytest.raises(CheckpointError, match="its save was interrupted; resume from the checkpoint before it"):
        make_trainer(PatrickStarTrainer, tmp_path, **OPTIONS).train(resume_from_checkpoint=str(last))
    trainer = make_trainer(PatrickStarTrainer, tmp_path, **OPTIONS)
    trainer.train(resume_from_checkpoint=True)
    assert_same_bits(trainer.model.state_dict(), whole.state)
    trainer.close()
