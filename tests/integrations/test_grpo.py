"""TRL's GRPO: generation and training take turns, in one engine or with a generator to which the device is lent."""

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from patrickstar.integrations.transformers import PatrickStarTrainerMixin
from tests.bits import assert_same_bits
from tests.integrations import stand_in_vllm, trl_runs
from tests.integrations.trainer_runs import train
from tests.training import relative_error

TIGHT = {"device_memory": "5MiB", "default_chunk_size": 8192}


class PatrickStarGRPOTrainer(PatrickStarTrainerMixin, GRPOTrainer):
    pass


class PatrickStarRLOOTrainer(PatrickStarTrainerMixin, RLOOTrainer):
    pass


def reward(completions, **_kwargs):
    return [completion.count("w1") - 0.01 * len(completion) for completion in completions]


def make_trainer(cls, folder, *, generation=None, **own):
    trl_runs.llama().save_pretrained(folder / "policy")
    without_evaluation = ("eval_strategy", "eval_steps", "per_device_eval_batch_size")
    options = {name: value for name, value in trl_runs.options(folder).items() if name not in without_evaluation}
    options |= {"num_generations": 4, "max_completion_length": 8, "model_init_kwargs": {"dtype": "float32"}}
    trainer = cls(
        str(folder / "policy"),
        reward_funcs=reward,
        args=(RLOOConfig if issubclass(cls, RLOOTrainer) else GRPOConfig)(**options, **(generation or {})),
        train_dataset=Dataset.from_dict({"prompt": trl_runs.prompts(16, 9, 1)}),
        processing_class=trl_runs.tokenizer(),
        **own,
    )
    torch.manual_seed(1)
    return trainer


def assert_same_rewards_and_steps(run, plain):
    names = ("reward", "loss", "grad_norm", "entropy", "completions/mean_length")
    ours, theirs = (
        [[entry[name] for name in names] for entry in each.history if "reward" in entry] for each in (run, plain)
    )
    assert len(theirs) == 3
    for values, expected in zip(ours, theirs, strict=True):
        assert values == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert relative_error(run, plain) < 1e-6


def test_rewards_and_steps_are_those_of_plain_trl(tmp_path):
    plain = train(make_trainer(GRPOTrainer, tmp_path))
    own = train(make_trainer(PatrickStarGRPOTrainer, tmp_path, patrickstar_config=TIGHT))
    assert_same_rewards_and_steps(own, plain)


def by_vllm(**options):
    """Without the correction, which depends on the last bits of the generator's own products."""
    return {"use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_correction": False, **options}


def run_with_generator(folder, **options):
    """Returns the run, the stand-in for vLLM, and the bytes of chunks on the device at each generation."""
    own = {"generation": by_vllm(**options), "patrickstar_config": TIGHT}
    trainer = make_trainer(PatrickStarGRPOTrainer, folder, **own)
    llm, on_device = trainer.vllm_generation.llm, []
    llm.while_awake = lambda: on_device.append(trainer.engine.report()["device_chunk_buffer_bytes"])
    return train(trainer), llm, on_device


@pytest.fixture
def vllm(monkeypatch):
    with stand_in_vllm.installed(monkeypatch):
        yield


@pytest.mark.usefixtures("vllm")
def test_a_sleeping_generator_is_lent_the_device(tmp_path):
    lent, llm, on_device = run_with_generator(tmp_path, vllm_enable_sleep_mode=True)
    assert on_device == [0] * 3
    assert llm.awake == set()
    awake, llm, on_device = run_with_generator(tmp_path)
    assert min(on_device[1:]) > 0  # since the first step; nothing is lent
    assert llm.model.buckets == [len(awake.state)] * 3
    assert_same_bits(lent.state, awake.state)
    plain = make_trainer(GRPOTrainer, tmp_path, generation=by_vllm(vllm_enable_sleep_mode=True))
    assert_same_rewards_and_steps(lent, train(plain))


@pytest.mark.slow
@pytest.mark.usefixtures("vllm")
def test_rloo_lends_too(tmp_path):
    generation = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
    own = make_trainer(PatrickStarRLOOTrainer, tmp_path, generation=generation, patrickstar_config=TIGHT)
    plain = make_trainer(RLOOTrainer, tmp_path, generation=generation)
    assert_same_rewards_and_steps(train(own), train(plain))
