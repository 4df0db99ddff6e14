import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from patrickstar import _C
from patrickstar.activations.activation_rules import Saved
from patrickstar.planning.step_plan import Plan
from patrickstar.runtime import initialize_engine
from patrickstar.session import recompute_choice, step_measurement
from tests.bits import assert_same_bits
from tests.models import VOCAB, Case, gpt2, llama, token_batch
from tests.ranks import mixed_models
from tests.recomputing import choose_by_fixed_times, out_of_memory_once
from tests.training import assert_same, make_config, train

LAYERS = 4
NOTHING, PRODUCTS, ON_HOST, EVERYTHING = Saved


def build():
    model = gpt2(hidden=64, layers=LAYERS, dropout=0.1, length=64)
    model.config.use_cache = False
    return model


def batch(generator, rows=4, length=64):
    tokens = torch.randint(1, VOCAB, (rows, length), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


CASE = Case(build, batch)


@pytest.fixture
def choosing(monkeypatch):
    choose_by_fixed_times(monkeypatch.setattr)


def opened(build=build, **config):
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(build, 0, make_config(default_chunk_size=2**14, **config))
    engine.train()
    engine.module.gradient_checkpointing_enable({"use_reentrant": False})
    return engine, optimizer


def step(engine, optimizer, inputs):
    loss = engine(**inputs)["loss"]
    engine.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def saved_of(engine):
    return engine._session.checkpoint_calls.saved


def test_with_room_nothing_is_recomputed_and_no_number_changes(choosing, caplog):
    config = make_config("bf16", default_chunk_size=2**14)
    always = train(CASE, config | {"activations": {"recompute": "always"}}, 5, checkpointing=False)
    found = []
    with caplog.at_level("INFO", "patrickstar"):
        auto = train(CASE, config, 5, checkpointing=False, before_step=lambda engine, _: found.append(saved_of(engine)))
    assert found[0] == ()
    assert found[1] == found[4] == (EVERYTHING,) * LAYERS
    assert "recomputing 0 of 4 checkpointed layers" in caplog.text
    assert_same(auto, always)


def first_choice(is_clipped):
    engine, optimizer = opened(device_memory="8MiB")
    inputs = batch(torch.Generator().manual_seed(0))
    with engine:
        engine.backward(engine(**inputs)["loss"])
        if is_clipped:
            engine.clip_grad_norm_(1e9)
        optimizer.step()
        return saved_of(engine), engine.report()["num_device_state_chunks"]


def test_clipping_before_the_step_does_not_change_the_choice(choosing):
    """States are placed after the choice, and leave the room that saved activations need."""
    saved, num_states = first_choice(is_clipped=True)
    assert (saved, num_states) == first_choice(is_clipped=False)
    assert saved.count(NOTHING) < LAYERS


@pytest.mark.parametrize("is_frozen", [False, True])
def test_layers_of_a_tower_that_backward_does_not_reach(choosing, is_frozen):
    """LLaVA 1.5 reads the vision tower's last layer but one, with all layers checkpointed."""

    def build_llava():
        model = mixed_models.build("Llava", vision_feature_layer=-2)()
        model.model.vision_tower.requires_grad_(not is_frozen)
        return model

    inputs = mixed_models.batch("Llava", 0, True, True) | {"use_cache": False}
    case = Case(build_llava, lambda _: inputs)
    config, found = make_config(default_chunk_size=2**14), []
    always = train(case, config | {"activations": {"recompute": "always"}}, 3, checkpointing=False)
    auto = train(case, config, 3, checkpointing=False, before_step=lambda engine, _: found.append(saved_of(engine)))
    assert found[2] == (EVERYTHING,) * 4  # two layers of the tower, two of the decoder
    assert_same(auto, always)


def test_a_saved_plan_starts_with_its_choice(choosing, tmp_path):
    inputs = batch(torch.Generator().manual_seed(0))
    engine, optimizer = opened()
    losses = [step(engine, optimizer, inputs) for _ in range(4)]
    plan = engine.plan()
    assert plan.saved_calls.saved == ("everything",) * LAYERS
    assert plan.saved_calls.is_quadratic
    engine.discard()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").saved_calls == plan.saved_calls
    engine, optimizer = opened(plan=str(tmp_path / "plan.json"))
    assert saved_of(engine) == (EVERYTHING,) * LAYERS
    assert [step(engine, optimizer, inputs) for _ in range(4)] == losses
    engine.discard()


def test_gradients_dropped_before_the_first_step_do_not_count(choosing):
    engine, optimizer = opened()
    generator = torch.Generator().manual_seed(0)
    engine.backward(engine(**batch(generator, rows=2))["loss"])
    optimizer.zero_grad()
    engine(**batch(generator, rows=1))["loss"]
    step(engine, optimizer, batch(generator))
    assert saved_of(engine) == (EVERYTHING,) * LAYERS
    assert engine.plan().saved_calls.size == 2 * 4 * 64 * 64
    engine.discard()


@pytest.mark.parametrize("loss", ["whole", "fused"])
def test_the_expected_timeline_is_that_of_the_next_step(choosing, monkeypatch, loss):
    expected, placed = [], recompute_choice._placed

    def noting(chosen):
        found = placed(chosen)
        expected.append(found.timed)
        return found

    monkeypatch.setattr(recompute_choice, "_placed", noting)
    engine, optimizer = opened(
        functools.partial(llama, hidden=64, layers=LAYERS, length=64), activations={"loss": loss}
    )
    inputs = batch(torch.Generator().manual_seed(0))
    for _ in range(2):
        step(engine, optimizer, inputs)
    assert saved_of(engine) == (EVERYTHING,) * LAYERS
    actual = engine._session.runtime.timeline()
    engine.discard()

    def needed(accesses):
        """Without gradients that leave the device, whose chunks may have got their states there."""
        return [[use for use in access["uses"] if use[2] != _C.ArrayUseMode.FINALISE] for access in accesses]

    assert needed(actual) == needed(expected[-1].accesses)


class WithoutProducts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(LAYERS))

    def gradient_checkpointing_enable(self, _):
        """Checkpoints its norms in any case."""

    def forward(self, values):
        hidden = self.first(values)
        for norm in self.norms:
            hidden = hidden + checkpoint(norm, hidden, use_reentrant=False)
        return {"loss": self.last(hidden).square().mean()}


def test_calls_without_products_save_everything_or_nothing(choosing):
    losses = []
    for recompute in ("always", "auto"):
        engine, optimizer = opened(WithoutProducts, activations={"recompute": recompute})
        values = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
        losses.append([step(engine, optimizer, {"values": values}) for _ in range(3)])
        saved = saved_of(engine)
        engine.discard()
    assert saved == (EVERYTHING,) * LAYERS
    assert losses[0] == losses[1]


@pytest.mark.parametrize("loss", ["whole", "fused"])
def test_compiled_layers_save_everything_or_nothing(choosing, loss):
    """The engine that makes no choice recomputes all, then its calls get each level in turn."""
    losses, states = [], []
    for recompute in ("always", "auto"):
        engine, optimizer = opened(
            functools.partial(llama, hidden=64, layers=LAYERS, length=64),
            activations={"loss": loss, "recompute": recompute},
        )
        engine.compile(backend="aot_eager")
        inputs = batch(torch.Generator().manual_seed(0))
        losses.append([step(engine, optimizer, inputs) for _ in range(3)])
        saved = saved_of(engine)
        for first in range(len(Saved)):
            if recompute == "always":
                engine._session.checkpoint_calls.choose([*Saved, *Saved][first : first + LAYERS])
            losses[-1].append(step(engine, optimizer, inputs))
        assert all(layer.gradient_checkpointing for layer in engine.module.model.layers)
        states.append(engine.state_dict())
        engine.discard()
    assert saved == (EVERYTHING,) * LAYERS
    assert losses[0] == losses[1]
    assert_same_bits(*states)


def test_without_checkpoints_nothing_is_measured(choosing, monkeypatch):
    monkeypatch.setattr(step_measurement, "measure_host_adam_gparams", lambda numel: 1 / 0)
    run = train(CASE, make_config("bf16"), 3, checkpointing=None)
    assert len(run.losses) == 3
    with pytest.raises(ZeroDivisionError):
        train(CASE, make_config("bf16"), 3, checkpointing=False)


def test_after_lack_of_memory_nothing_is_saved(choosing, caplog):
    engine, optimizer = opened()
    generator = torch.Generator().manual_seed(0)
    step(engine, optimizer, batch(generator))
    assert saved_of(engine) != ()
    out_of_memory_once(engine.module.transformer.h[2])
    step(engine, optimizer, batch(generator))
    assert all(kept is NOTHING for kept in saved_of(engine))
    assert "save nothing from now on" in caplog.text
    step(engine, optimizer, batch(generator))
    engine.discard()


def test_a_model_without_checkpoints_gets_them_when_memory_runs_out(choosing, caplog):
    def run(checkpointing):
        torch.manual_seed(0)
        engine, optimizer = initialize_engine(build, 0, make_config())
        engine.train()
        if checkpointing:
            engine.module.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            out_of_memory_once(engine.module.transformer.h[1])
        generator = torch.Generator().manual_seed(0)
        losses = [step(engine, optimizer, batch(generator)) for _ in range(3)]
        assert saved_of(engine) == (EVERYTHING,) * LAYERS
        engine.discard()
        return losses

    assert run(checkpointing=False) == run(checkpointing=True)
    assert "gradient_checkpointing_enable() of GPT2LMHeadModel is called" in caplog.text


class Own(nn.Module):
    """Checkpoints functions, one within another, and parts with options of its own."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 32)
        self.inner = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, VOCAB)
        self.fails = False

    def _two(self, hidden, first):
        hidden = checkpoint(lambda x: F.dropout(self.inner[first](x).relu_(), 0.1), hidden, use_reentrant=False)
        return self.inner[first + 1](hidden).sin()

    def forward(self, input_ids, labels):
        hidden = self.embedding(input_ids)
        for first in (0, 2):
            hidden = checkpoint(self._two, hidden, first, use_reentrant=False)
        if self.fails:
            raise RuntimeError("the user's own error")
        logits = checkpoint(self.head, hidden, use_reentrant=False, preserve_rng_state=False)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def test_checkpoints_of_the_users_own_module():
    own = Case(Own, token_batch)
    expected = train(own, make_config(), 4)
    for saved in [(EVERYTHING,) * 3, (PRODUCTS,) * 3, (ON_HOST, EVERYTHING, PRODUCTS)]:
        chosen = train(
            own, make_config(), 4, before_step=lambda engine, _, s=saved: engine._session.checkpoint_calls.choose(s)
        )
        assert_same(chosen, expected)


def test_an_error_within_a_call_leaves_nothing_behind():
    top = torch._C._autograd._top_saved_tensors_default_hooks
    with initialize_engine(Own, 0, make_config())[0] as engine:
        engine._session.checkpoint_calls.choose((EVERYTHING, EVERYTHING))
        inputs = token_batch(torch.Generator().manual_seed(0))
        before = top(True)
        engine.module.fails = True
        with pytest.raises(RuntimeError, match="the user's own error"):
            engine(**inputs)
        engine.module.inner[1].weight.requires_grad  # noqa: B018
        handle = engine.module.inner[3].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine(**inputs)
        handle.remove()
        assert top(True) == before
        engine.module.fails = False
        engine.backward(engine(**inputs)["loss"])


class Attending(nn.Module):
    """Flex attention, a higher-order operator, within checkpoints."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 32)
        self.mlps = nn.ModuleList(nn.Linear(32, 32) for _ in range(LAYERS))
        self.head = nn.Linear(32, VOCAB)

    @staticmethod
    def _layer(hidden, mlp):
        heads = hidden.detach().unflatten(-1, (2, 16)).transpose(1, 2)  # it has no backward on the CPU
        return mlp(hidden + flex_attention(heads, heads, heads).transpose(1, 2).flatten(-2)).sin()

    def forward(self, input_ids, labels):
        hidden = self.embedding(input_ids)
        for mlp in self.mlps:
            hidden = checkpoint(self._layer, hidden, mlp, use_reentrant=False)
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize("saved", [PRODUCTS, EVERYTHING, None])
def test_higher_order_operators_pass(choosing, saved):
    def choose(engine, step):
        if saved is not None:
            engine._session.checkpoint_calls.choose((saved,) * LAYERS)

    case = Case(Attending, token_batch)
    always = train(case, make_config(activations={"recompute": "always"}), 3)
    auto = train(
        case, make_config(activations={"recompute": "auto" if saved is None else "always"}), 3, before_step=choose
    )
    assert_same(auto, always)


def test_choices_of_several_micro_batches(choosing):
    case = dataclasses.replace(CASE, build=functools.partial(llama, hidden=64, layers=LAYERS, length=64))
    config = make_config("bf16", default_chunk_size=2**14)
    always = train(case, config | {"activations": {"recompute": "always"}}, 3, accumulate=2, checkpointing=False)
    found = []
    auto = train(case, config, 3, accumulate=2, checkpointing=False, before_step=lambda e, _: found.append(saved_of(e)))
    assert found[1] == (EVERYTHING,) * LAYERS
    assert_same(auto, always)
