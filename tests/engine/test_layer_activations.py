import contextlib
import functools
import itertools

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from patrickstar.activations.activation_rules import ActivationTier
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.models import Case, gpt2, token_batch
from tests.training import assert_same, make_config, relative_error, train, train_plain

KEEP, OFFLOAD, RECOMPUTE = ActivationTier
EVERY = list(itertools.product(ActivationTier, repeat=3))


def dropping():
    model = gpt2(layers=3, dropout=0.1)
    model.config.use_cache = False  # as with checkpoints; attention over a cache rounds otherwise
    return model


DROPPING = Case(dropping, token_batch)
SCARCE = {"device_memory": "4MB"}  # a 4,096th of which a tensor takes that may leave


def choose(engine, *tiers):
    names = [name for name, child in engine.module.named_modules() if hasattr(child, "ln_1")]
    engine._session.layer_activations.choose(dict(zip(names, tiers, strict=False)))


def each_in_turn(engine, step):
    choose(engine, *EVERY[step % len(EVERY)])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_assignment_has_the_same_bits(precision):
    config = make_config(precision, **SCARCE)
    chosen = train(DROPPING, config, len(EVERY), checkpointing=False, before_step=each_in_turn)
    assert_same(chosen, train(DROPPING, config, len(EVERY), checkpointing=False))
    assert_same(chosen, train(DROPPING, config, len(EVERY)))
    offloaded = [report["offloaded_bytes"] for report in chosen.chunk_reports]
    has_left = [after > before for before, after in zip([0, *offloaded], offloaded, strict=False)]
    assert has_left == [OFFLOAD in tiers for tiers in EVERY]
    if precision == "fp32":
        plain = train_plain(DROPPING, steps=len(EVERY))
        assert chosen.losses[0] == plain.losses[0]
        assert relative_error(chosen, plain) <= 1e-6


class Made(TorchDispatchMode):
    def __init__(self, layers):
        super().__init__()
        self.layer = None
        self.storages: list[dict] = [{} for _ in layers]
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, index=index: setattr(self, "layer", index))
            layer.register_forward_hook(self._leave)

    def _leave(self, layer, args, output):
        self.storages[self.layer].pop(output.untyped_storage()._cdata, None)  # the next layer's input
        self.layer = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = func(*args, **(kwargs or {}))
        before = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, torch.Tensor)}
        for value in given if isinstance(given, (tuple, list)) else (given,):
            if isinstance(value, torch.Tensor) and self.layer is not None:
                storage = value.untyped_storage()
                if storage._cdata not in before:
                    self.storages[self.layer][storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return given

    def alive_bytes(self):
        return [sum(size for ref, size in made.values() if not ref.expired()) for made in self.storages]


@pytest.fixture
def opened():
    with contextlib.ExitStack() as stack:

        def open_engine(build=DROPPING.build, checkpoint=None, **config):
            torch.manual_seed(0)
            engine, optimizer = initialize_engine(build, 0, make_config(**SCARCE | config))
            stack.enter_context(engine).train()
            engine.module.gradient_checkpointing_enable({"use_reentrant": False, **(checkpoint or {})})
            return engine, optimizer

        yield open_engine


def test_memory_is_free_between_forward_and_backward(opened):
    engine, _ = opened(functools.partial(gpt2, layers=3))
    batch, activation_levels = token_batch(torch.Generator().manual_seed(0)), {}
    for tiers in [(RECOMPUTE, RECOMPUTE, RECOMPUTE), (KEEP, KEEP, KEEP), (RECOMPUTE, KEEP, OFFLOAD)]:
        choose(engine, *tiers)
        made = Made(engine.module.transformer.h)
        with made:
            loss = engine(**batch)["loss"]
        alive, activation_levels[tiers] = made.alive_bytes(), engine._session.runtime.activation_bytes()
        print([tier.name for tier in tiers], alive, activation_levels[tiers])
        hidden_bytes = batch["input_ids"].numel() * 32 * 4
        for tier, num_bytes in zip(tiers, alive, strict=True):
            if tier is RECOMPUTE:
                assert num_bytes == 0
            elif tier is OFFLOAD:
                assert num_bytes < 4 * hidden_bytes  # parts of one product (queries, keys, values) stay
            else:
                assert num_bytes > 10 * hidden_bytes
        engine.backward(loss)
        del loss
        assert made.alive_bytes() == [0, 0, 0]
    nothing, everything, mixed = activation_levels.values()
    assert nothing < mixed < everything


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = gpt2(dropout=0.1)
        layers = self.model.transformer.h
        layers.append(layers[0])
        for name, param in layers[1].named_parameters():
            param.requires_grad_("ln" in name)
        self.gradient_checkpointing_enable = self.model.gradient_checkpointing_enable

    def forward(self, **batch):
        return self.model(**batch)


def test_layers_that_are_called_twice_or_frozen(opened):
    losses, states = [], []
    for chosen in ([()], [(KEEP, OFFLOAD), (OFFLOAD, KEEP), (KEEP, KEEP), (RECOMPUTE, KEEP), (OFFLOAD, RECOMPUTE)]):
        engine, optimizer = opened(Twice)
        generator = torch.Generator().manual_seed(1)
        losses.append([])
        for step in range(5):
            choose(engine, *chosen[step % len(chosen)])
            batch = token_batch(generator)
            with torch.no_grad():
                losses[-1].append(engine(**batch)["loss"].item())
            loss = engine(**batch)["loss"]
            engine.backward(loss)
            losses[-1].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        states.append(engine.state_dict())
    assert losses[0] == losses[1]
    assert_same_bits(*states)


def test_without_a_offload_store(opened):
    never = {"activations": {"offload": "never"}}
    run = train(DROPPING, make_config(**never), 3, checkpointing=False, before_step=lambda e, _: choose(e, KEEP, KEEP))
    assert_same(run, train(DROPPING, make_config(**never), 3, checkpointing=False))
    with pytest.raises(ValueError, match=r"layer 'transformer.h.0' cannot rest on the host: nothing may leave.*auto"):
        choose(opened(**never)[0], OFFLOAD)


def with_statistics():
    model = gpt2()
    model.transformer.h[0].norm = nn.BatchNorm1d(4)
    return model


def test_layers_that_cannot_choose_are_named(opened):
    engine, _ = opened(checkpoint={"preserve_rng_state": False})
    layers = engine._session.layer_activations
    with pytest.raises(ValueError, match=r"'transformer.h.0' cannot rest on the device: it does not checkpoint"):
        choose(engine, KEEP)
    engine.module.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match=r"'transformer.h.1' cannot rest on the host: .*use_reentrant"):
        choose(engine, RECOMPUTE, OFFLOAD)
    engine.module.gradient_checkpointing_enable({"use_reentrant": False})
    for name in ("transformer.h", "transformer.h.9", ""):
        with pytest.raises(ValueError, match=f"layer '{name}' .*no GradientCheckpointingLayer of that name"):
            layers.choose({name: KEEP})
    with pytest.raises(ValueError, match="running statistics"):
        choose(opened(with_statistics)[0], KEEP)
    engine.compile(backend="eager")
    with pytest.raises(ValueError, match="compiled"):
        choose(engine, KEEP)


@pytest.mark.parametrize("late", ["compiled", "reentrant", "none"])
def test_a_layer_that_can_no_longer_choose_runs_without_a_tier(late):
    def change(engine, step, chooses=False):
        if step == 1:
            if chooses:
                choose(engine, KEEP, OFFLOAD)
            if late == "compiled":
                engine.compile(backend="eager")
            elif late == "reentrant":
                engine.module.gradient_checkpointing_enable({"use_reentrant": True})
            else:
                engine.module.gradient_checkpointing_disable()

    runs = [
        train(DROPPING, make_config(**SCARCE), 3, checkpointing=False, before_step=before_step)
        for before_step in (change, functools.partial(change, chooses=True))
    ]
    assert runs[1].report["offloaded_bytes"] == 0
    assert_same(*runs)


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = dropping()
        self.gradient_checkpointing_enable = self.model.gradient_checkpointing_enable

    def forward(self, **batch):
        return {"loss": checkpoint(lambda: self.model(**batch)["loss"], use_reentrant=False)}


def test_within_a_checkpoint_of_the_user_layers_run_without_a_tier():
    config, around = make_config(**SCARCE), Case(Around, token_batch)
    run = train(around, config, 3, checkpointing=False, before_step=lambda engine, _: choose(engine, KEEP, OFFLOAD))
    assert_same(run, train(around, config, 3, checkpointing=False))
