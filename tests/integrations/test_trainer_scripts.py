"""Scripts that read and change a Trainer's parts between its calls."""

import logging

import pytest
import torch
from transformers import Trainer, TrainerCallback

from patrickstar.integrations.transformers import PatrickStarTrainer
from tests.bits import assert_same_bits
from tests.integrations.trainer_runs import Tokens, arguments, engine_config, gpt2, make_trainer, train

BOTH = (Trainer, PatrickStarTrainer)


class GradientNorms(TrainerCallback):
    """Norms of all gradients just before each step."""

    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.norms.append(torch.stack([param.grad.norm() for param in model.parameters()]).norm().item())


@pytest.mark.parametrize("max_grad_norm", [0.5, 0.0, float("inf")])
def test_a_callback_reads_the_gradients_that_the_step_uses(tmp_path, max_grad_norm):
    runs, norms = [], []
    for cls in BOTH:
        trainer = make_trainer(cls, tmp_path, max_steps=3, max_grad_norm=max_grad_norm)
        callback = GradientNorms()
        trainer.add_callback(callback)
        runs.append(train(trainer))
        norms.append(callback.norms)
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert runs[1].norms == pytest.approx(runs[0].norms, rel=1e-5)
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-6)


@pytest.mark.parametrize("gives_optimizer", [False, True])
def test_a_closed_trainer_trains_and_evaluates_again(tmp_path, gives_optimizer):
    losses = []
    for cls in BOTH:
        model, own = gpt2(), {"patrickstar_config": engine_config()} if cls is PatrickStarTrainer else {}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if gives_optimizer else None
        trainer = cls(model, arguments(tmp_path, max_steps=2), train_dataset=Tokens(10, 1), eval_dataset=Tokens(4, 2),
                      optimizers=(optimizer, None), **own)  # fmt: skip
        trainer.train()
        if own:
            trainer.close()
        elif gives_optimizer:
            optimizer.state.clear()
        else:
            trainer.optimizer = None
        evaluated = trainer.evaluate()["eval_loss"]
        trainer.train()
        losses.append([evaluated, trainer.evaluate()["eval_loss"]])
        if own:
            trainer.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


class Weighted(Trainer):
    """Computes the loss from logits, with float32 weights of classes."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        weights = torch.linspace(1, 2, outputs.logits.shape[-1], device=outputs.logits.device)
        loss = torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten(), weight=weights
        )
        return (loss, outputs) if return_outputs else loss


class PatrickStarWeighted(PatrickStarTrainer, Weighted):
    pass


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_loss_from_logits_in_sixteen_bit(tmp_path, precision):
    plain = train(make_trainer(Weighted, tmp_path, max_steps=3))
    run = train(make_trainer(PatrickStarWeighted, tmp_path, max_steps=3, **{precision: True}))
    assert run.losses == pytest.approx(plain.losses, rel=1e-2)
    whole = torch.tensor(run.losses).bfloat16().tolist()
    assert run.losses != whole  # a loss in 16 bits has few digits


class Unfreezing(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **_):
        model.transformer.h[0].requires_grad_(state.global_step % 2 == 1)


def test_parameters_that_no_group_has_are_named_once(tmp_path, caplog):
    frozen = gpt2()
    frozen.transformer.h[0].requires_grad_(False)
    trainer = make_trainer(PatrickStarTrainer, tmp_path, model=frozen, max_steps=4)
    trainer.add_callback(Unfreezing())
    before = {name: value.clone() for name, value in frozen.transformer.h[0].state_dict().items()}
    trainer.train()
    trainer.close()
    assert_same_bits(frozen.transformer.h[0].state_dict(), before)
    (message,) = [line for line in caplog.messages if "in no group" in line]
    assert message.startswith("12 parameters require grad by now but are in no group of the optimizer (transformer.h.")


def test_a_sixteen_bit_model_that_trains_in_float32_is_warned_of(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "patrickstar")
    for options, is_warned in (({}, True), ({"bf16": True}, False)):
        caplog.clear()
        trainer = make_trainer(PatrickStarTrainer, tmp_path, model=gpt2().bfloat16(), max_steps=1, **options)
        trainer.train()
        dtype = trainer.model.dtype
        trainer.close()
        assert (dtype == torch.float32) == is_warned
        warned = [text for text in caplog.messages if "bfloat16 parameters, and training computes in float32" in text]
        assert len(warned) == is_warned
