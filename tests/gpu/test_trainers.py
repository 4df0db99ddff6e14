import pytest
import torch
from transformers import Trainer, TrainingArguments

import patrickstar
from patrickstar.integrations.transformers import PatrickStarTrainer
from tests.bits import assert_same_bits
from tests.integrations.trainer_runs import Tokens, gpt2, make_trainer, train

pytestmark = pytest.mark.gpu

LENIENT = {"rel": 2e-4}  # kernels of a GPU round in another order


@pytest.fixture(autouse=True)
def _one_gpu(monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda _: 1))


def on_gpu(cls, folder, **options):
    config = {"device_memory": "512MiB"}
    own = {"config": config} if issubclass(cls, PatrickStarTrainer) else {}
    return make_trainer(cls, folder, use_cpu=False, **own, **options)


def test_hugging_face(tmp_path, deterministic):
    plain = train(on_gpu(Trainer, tmp_path / "plain", eval_strategy="epoch"))
    run = train(on_gpu(PatrickStarTrainer, tmp_path / "own", eval_strategy="epoch"), evaluate_first=True)
    assert run.losses == pytest.approx(plain.losses, **LENIENT)
    assert run.norms == pytest.approx(plain.norms, **LENIENT)
    assert run.evals[1:] == pytest.approx(plain.evals[1:], **LENIENT)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_hugging_face_resumes_with_the_same_bits(tmp_path, deterministic, precision):
    options = {"save_strategy": "steps", "save_steps": 4, "dropout": 0.1, precision: True}
    whole = train(on_gpu(PatrickStarTrainer, tmp_path, **options))
    resumed = train(on_gpu(PatrickStarTrainer, tmp_path, **options), resume=str(tmp_path / "checkpoint-4"))
    assert resumed.losses == whole.losses[-len(resumed.losses) :]
    assert_same_bits(resumed.state, whole.state)


def test_lightning(deterministic):
    from patrickstar.integrations.lightning import PatrickStarStrategy
    from tests.integrations import lightning_runs

    options = {"accelerator": "gpu", "max_epochs": 2}
    plain = lightning_runs.fit("auto", **options)
    own = lightning_runs.fit(PatrickStarStrategy({"device_memory": "512MiB"}), **options)
    assert lightning_runs.relative_error(own.losses, plain.losses) < 2e-4
    assert lightning_runs.relative_error(own.norms, plain.norms) < 2e-4
    assert lightning_runs.relative_error(own.evaluated, plain.evaluated) < 2e-4


def test_from_pretrained_to_generate(tmp_path, deterministic):
    gpt2().save_pretrained(tmp_path)
    config = {"train_micro_batch_size_per_gpu": 2, "device_memory": "512MiB", "gradient_accumulation_steps": 2}
    engine, *_ = patrickstar.initialize(
        model=lambda: patrickstar.from_pretrained(tmp_path), training_data=Tokens(8, seed=1), config=config
    )
    for batch in engine.training_dataloader:
        engine.backward(engine(**batch).loss)
        engine.step()
    assert engine.global_steps == 2
    weight = engine.module.transformer.wte.weight
    access = patrickstar.utils.safe_get_full_optimizer_state(weight, "exp_avg")
    assert float(access.abs().sum()) > 0
    engine.eval()
    prompt = Tokens(2, seed=3).rows[:, :3].cuda()
    generated = engine.module.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    state = engine.module.state_dict()
    engine.close()
    plain = gpt2().cuda().eval()
    plain.load_state_dict(state)
    assert torch.equal(generated, plain.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0))
