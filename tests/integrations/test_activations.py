import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

import patrickstar
from patrickstar import initialize_engine
from patrickstar.integrations.lightning import PatrickStarStrategy
from patrickstar.integrations.lightning.package import pl
from patrickstar.integrations.transformers import PatrickStarTrainer
from patrickstar.module.tiled_modules import is_tiled, tile_modules
from tests.bits import assert_same_bits
from tests.integrations.lightning_runs import make_trainer as make_lightning
from tests.integrations.trainer_runs import Tokens, gpt2, make_trainer
from tests.integrations.trainer_runs import train as train_trainer
from tests.models import Case, llama, lora, t5
from tests.training import make_config, relative_error, train

BOTH = {"loss": "fused", "tile_tokens": 9}


def tokens(generator):
    ids = torch.randint(1, 97, (3, 16), generator=generator)
    return {"input_ids": ids, "labels": ids}


def case(model):
    return Case(model, tokens, lambda output: output.loss)


def changed(model):
    return [name for name, module in model.named_modules() if {"forward", "_loss_function"} & set(vars(module))]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["kept", "checkpointed", "reentrant"])
def test_budgets_change_no_bit(precision, checkpointing):
    options = {"steps": 6, "accumulate": 2, "checkpointing": checkpointing}
    config = {"default_chunk_size": 2048, "gradient_clipping": 0.5}
    plain = train(case(llama), make_config(precision, **config), **options)
    ample = train(case(llama), make_config(precision, activations=BOTH, **config), **options)
    budget = int(0.7 * ample.report["device_peak_bytes"])
    scarce = train(case(llama), make_config(precision, activations=BOTH, device_memory=budget, **config), **options)
    assert scarce.report["num_evictions"] > 0 and scarce.report["num_replayed_accesses"] > 0
    assert scarce.losses == ample.losses and scarce.grad_norms == ample.grad_norms
    assert_same_bits(scarce.state, ample.state)
    tolerance = 1e-6 if precision == "fp32" else 5e-3
    assert ample.losses == pytest.approx(plain.losses, rel=tolerance)
    assert ample.grad_norms == pytest.approx(plain.grad_norms, rel=10 * tolerance)


def test_the_activation_memory_is_lower(monkeypatch):
    monkeypatch.setattr(patrickstar.sequence.losses, "_TILE_LOGITS", 2048 * 64)
    length, intermediate, vocabulary = 1024, 256, 2048

    def wide():
        sizes = {"hidden_size": 32, "intermediate_size": intermediate, "num_hidden_layers": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, num_attention_heads=4, **sizes))

    def batch(generator):
        ids = torch.randint(1, vocabulary, (1, length), generator=generator)
        return {"input_ids": ids, "labels": ids}

    peaks = []
    for section in ({}, {"loss": "fused"}, {"loss": "fused", "tile_tokens": 64}):
        config = make_config(activations=section, default_chunk_size=8192)
        run = train(Case(wide, batch, lambda output: output.loss), config, steps=2, checkpointing=False)
        peaks.append(run.report["device_peak_bytes"])
    print(peaks)
    assert peaks[0] - peaks[1] > 2 * 4 * length * vocabulary
    assert peaks[1] - peaks[2] > 0.5 * 4 * 6 * length * intermediate


def test_adapters():
    config = {"default_chunk_size": 2048}
    plain = train(case(lora), make_config(**config), steps=5)
    tiled = train(case(lora), make_config(activations=BOTH, **config), steps=5)
    assert tiled.losses == pytest.approx(plain.losses, rel=1e-6)
    scarce = train(
        case(lora),
        make_config(activations=BOTH, device_memory=int(0.7 * tiled.report["device_peak_bytes"]), **config),
        steps=5,
    )
    assert scarce.losses == tiled.losses
    assert_same_bits(scarce.state, tiled.state)


def test_compiled_blocks():
    plain = train(case(llama), make_config(), steps=3)

    def compile_blocks(engine, step):
        if step == 0:
            engine.module.compile(backend="eager")

    tiled = train(case(llama), make_config(activations=BOTH), steps=3, before_step=compile_blocks)
    assert tiled.losses == pytest.approx(plain.losses, rel=1e-6)


def test_the_model_is_as_it_was():
    model = llama()
    engine, optimizer = initialize_engine(lambda: model, config=make_config(activations=BOTH))
    with engine:
        assert len(changed(model)) == 9  # itself, its output layer, three in each layer, the last norm
        assert sum(map(is_tiled, model.modules())) == 7
        loss = engine(**tokens(torch.Generator())).loss
        engine.backward(loss)
        optimizer.step()
    assert changed(model) == [] and not model._forward_pre_hooks and not model._forward_hooks
    ids = tokens(torch.Generator())
    assert model(**ids).logits.shape == (3, 16, 97)
    with initialize_engine(lambda: model, config=make_config(activations=BOTH))[0]:
        assert len(changed(model)) == 9


def test_what_cannot_be_changed_is_refused():
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    tiled = llama()
    tile_modules(tiled, 4)
    names = changed(tiled)
    for model, section, message in (
        (plain, {"loss": "fused"}, 'activations.loss is "fused", but Sequential is no model of Hugging Face'),
        (plain, {"tile_tokens": 4}, "Sequential has no layers with MLPs or norms .* activations.tile_tokens to 0"),
        (t5(), BOTH, "T5ForConditionalGeneration has a loss of its own|no linear output layer"),
        (tiled, {"tile_tokens": 4}, "is computed in tiles already"),
    ):
        before = changed(model)
        with pytest.raises(ValueError, match=message):
            initialize_engine(lambda model=model: model, config=make_config(activations=section))
        assert changed(model) == before
        assert all(type(param) is nn.Parameter for param in model.parameters())
    with pytest.raises(ValueError, match="activations.tile_tokens"):
        initialize_engine(llama, config=make_config(activations={"tile_tokens": -1}))
    with pytest.raises(ValueError, match="activations.loss"):
        initialize_engine(llama, config=make_config(activations={"loss": "fuse"}))
    with initialize_engine(lambda: tiled, config=make_config())[0]:  # tiled by hand
        assert changed(tiled) == names


def test_a_script_of_deepspeeds():
    losses = []
    for section in ({}, BOTH):
        torch.manual_seed(0)
        config = {"train_batch_size": 3, "optimizer": {"type": "AdamW"}, "steps_per_print": 0, "activations": section}
        engine, *_ = patrickstar.initialize(model=llama(), config=config)
        generator = torch.Generator().manual_seed(1)
        losses.append([])
        for _ in range(3):
            loss = engine(**tokens(generator)).loss
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
        assert sum(map(is_tiled, engine.module.modules())) == (7 if section else 0)
        engine.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_a_trainer(tmp_path):
    plain = train_trainer(make_trainer(Trainer, tmp_path / "plain", eval_strategy="epoch"))
    section = {"loss": "fused", "tile_tokens": 3}
    trainer = make_trainer(
        PatrickStarTrainer,
        tmp_path / "own",
        config={"activations": section, "device_memory": 600_000},
        eval_strategy="epoch",
    )
    run = train_trainer(trainer)
    assert run.losses == pytest.approx(plain.losses, rel=1e-6)
    assert run.evals == pytest.approx(plain.evals, rel=1e-6)
    assert relative_error(run, plain) < 1e-5
    assert changed(trainer.model) == []


class LanguageModel(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = gpt2()
        self.losses, self.num_tiled = [], 0

    def training_step(self, batch, _):
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        self.num_tiled = sum(map(is_tiled, self.modules()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_lightning():
    losses = []
    for section in ({}, {"loss": "fused", "tile_tokens": 3}):
        module = LanguageModel()
        strategy = PatrickStarStrategy({"default_chunk_size": 8192, "activations": section})
        loader = torch.utils.data.DataLoader(Tokens(8, seed=1), batch_size=2)
        make_lightning(strategy, max_epochs=1).fit(module, loader)
        losses.append(module.losses)
        assert module.num_tiled == (2 if section else 0) and changed(module) == []
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
