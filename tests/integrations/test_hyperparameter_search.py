import pytest
from transformers import Trainer
from transformers.trainer_utils import HPSearchBackend

from patrickstar.integrations.transformers import PatrickStarTrainer
from tests.integrations.trainer_runs import Tokens, arguments, engine_config, gpt2

SPACE = (
    {"learning_rate": 1e-3, "max_grad_norm": 0.1, "gradient_accumulation_steps": 1, "weight_decay": 0.0},
    {"learning_rate": 5e-3, "max_grad_norm": 1.0, "gradient_accumulation_steps": 2, "weight_decay": 0.3},
)


class Trial(dict):
    """The part of ``optuna.Trial`` that a Trainer reads."""

    def __init__(self, number):
        super().__init__(SPACE[number])
        self.number, self.params = number, SPACE[number]


def searched(trainer):
    """Losses and norms of the trials, trained as ``hyperparameter_search`` does."""
    trainer.hp_search_backend, trainer.hp_name, trainer.hp_space = HPSearchBackend.OPTUNA, None, dict
    found = []
    for number in range(len(SPACE)):
        trainer.train(trial=Trial(number))
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        found += [value for entry in logs for value in (entry["loss"], float(entry["grad_norm"]))]
    return found


@pytest.mark.parametrize("optim", ["adamw_torch", "paged_adamw_32bit"])
def test_trials_obey_their_arguments(tmp_path, optim):
    options = {"model_init": lambda trial=None: gpt2(), "train_dataset": Tokens(6, 1)}
    plain = searched(Trainer(args=arguments(tmp_path / "plain"), **options))
    args = arguments(tmp_path / "own", optim=optim)
    trainer = PatrickStarTrainer(args=args, patrickstar_config=engine_config(), **options)
    run = searched(trainer)
    trainer.close()
    assert len(plain) == 2 * (12 + 6)
    assert run == pytest.approx(plain, rel=1e-5)
