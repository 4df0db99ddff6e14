"""TRL's GRPO: generation and training take turns in one engine."""

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from patrickstar.integrations.transformers import PatrickStarTrainerMixin
from tests.integrations import trl_runs
from tests.integrations.trainer_runs import train
from tests.training import relative_error


class PatrickStarGRPOTrainer(PatrickStarTrainerMixin, GRPOTrainer):
    pass


def reward(completions, **_kwargs):
    return [completion.count("w1") - 0.01 * len(completion) for completion in completions]


def run(cls, folder, **own):
    without_evaluation = ("eval_strategy", "eval_steps", "per_device_eval_batch_size")
    options = {name: value for name, value in trl_runs.options(folder).items() if name not in without_evaluation}
    trainer = cls(
        trl_runs.llama(),
        reward_funcs=reward,
        args=GRPOConfig(**options, num_generations=4, max_completion_length=8),
        train_dataset=Dataset.from_dict({"prompt": trl_runs.prompts(16, 9, 1)}),
        processing_class=trl_runs.tokenizer(),
        **own,
    )
    torch.manual_seed(1)
    return train(trainer)


def test_rewards_and_steps_are_those_of_plain_trl(tmp_path):
    plain = run(GRPOTrainer, tmp_path / "plain")
    tight = run(
        PatrickStarGRPOTrainer,
        tmp_path / "own",
        patrickstar_config={"device_memory": "5MiB", "default_chunk_size": 8192},
    )
    names = ("reward", "loss", "grad_norm", "entropy", "completions/mean_length")
    ours, theirs = (
        [[entry[name] for name in names] for entry in each.history if "reward" in entry] for each in (tight, plain)
    )
    assert len(theirs) == 3
    for values, expected in zip(ours, theirs, strict=True):
        assert values == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert relative_error(tight, plain) < 1e-6
