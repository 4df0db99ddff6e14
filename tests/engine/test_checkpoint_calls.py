import contextlib
import functools
import itertools

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from patrickstar.activations.activation_rules import Saved
from patrickstar.activations.call_measurement import CallMeasurement, clock_of
from patrickstar.activations.checkpoint_calls import CheckpointCalls
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.models import VOCAB, Case, gpt2, llama, lm_loss, token_batch
from tests.ranks import mixed_models
from tests.training import assert_same, make_config, relative_error, train, train_plain

NOTHING, PRODUCTS, ON_HOST, EVERYTHING = Saved
EVERY_PAIR = [
    (one, other, list(Saved)[(i + j) % 4]) for (i, one), (j, other) in itertools.product(enumerate(Saved), repeat=2)
]
"""Saved tensors of three layers: any two layers have all pairs."""


def dropping():
    model = gpt2(layers=3, dropout=0.1)
    model.config.use_cache = False  # as with checkpoints; attention over a cache rounds otherwise
    return model


DROPPING = Case(dropping, token_batch)
SCARCE = {"device_memory": "4MB"}  # a 4,096th of which a tensor takes that may leave
THREE_LLAMAS = functools.partial(llama, layers=3, use_cache=False)


def choose(engine, *saved):
    engine._session.checkpoint_calls.choose(saved)


def each_in_turn(engine, step):
    choose(engine, *EVERY_PAIR[step % len(EVERY_PAIR)])


class Plain(nn.Module):
    """Checkpoints its blocks with PyTorch's function."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))
            for _ in range(3)
        )
        self.head = nn.Linear(32, VOCAB)

    def gradient_checkpointing_enable(self, _):
        """Checkpoints its blocks in any case."""

    def forward(self, input_ids, labels):
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
        return {"loss": lm_loss(self.head(hidden), labels)}


MIXTURE = mixed_models.build("Qwen3Moe", "grouped_mm", num_hidden_layers=3, use_cache=False)
ASSIGNED = {
    "gpt2": DROPPING,
    "llama": Case(THREE_LLAMAS, token_batch),
    "qwen3-moe": Case(MIXTURE, token_batch),
    "plain": Case(Plain, token_batch),
}


@pytest.mark.parametrize(
    ("name", "precision", "scarce"),
    [
        ("gpt2", "fp32", "700KiB"),
        ("gpt2", "bf16", "450KiB"),
        ("llama", "bf16", "300KiB"),
        ("qwen3-moe", "bf16", "300KiB"),
        ("plain", "fp32", "200KiB"),
    ],
)
def test_any_assignment_has_the_same_bits(name, precision, scarce):
    """Device memory is without limit, or so scarce that chunks come and go."""
    case, steps = ASSIGNED[name], len(EVERY_PAIR)
    expected = train(case, make_config(precision), steps)
    for memory in ({}, {"device_memory": scarce}):
        config = make_config(precision, **memory)
        assert_same(train(case, config, steps, checkpointing=False), expected)
        chosen = train(case, config, steps, checkpointing=False, before_step=each_in_turn)
        assert_same(chosen, expected)
        assert (chosen.report["num_evictions"] > 0) == bool(memory)
        offloaded = [report["offloaded_bytes"] for report in chosen.chunk_reports]
        has_left = [after > before for before, after in zip([0, *offloaded], offloaded, strict=False)]
        assert any(has_left) == bool(memory)
        assert not memory or all(left for left, saved in zip(has_left, EVERY_PAIR, strict=True) if ON_HOST in saved)
    if precision == "fp32":
        plain = train_plain(case, steps=steps)
        assert expected.losses[0] == plain.losses[0]
        assert relative_error(expected, plain) <= 1e-6


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


@pytest.mark.parametrize(
    "build", [functools.partial(gpt2, layers=3), THREE_LLAMAS, MIXTURE], ids=("gpt2", "llama", "qwen3-moe")
)
def test_memory_is_free_between_forward_and_backward(opened, build):
    engine, _ = opened(build)
    layers = engine.module.transformer.h if hasattr(engine.module, "transformer") else engine.module.model.layers
    batch, activation_levels = token_batch(torch.Generator().manual_seed(0)), {}
    for saved in [
        (NOTHING, NOTHING, NOTHING),
        (EVERYTHING, EVERYTHING, EVERYTHING),
        (NOTHING, EVERYTHING, ON_HOST),
        (PRODUCTS, NOTHING, PRODUCTS),
    ]:
        choose(engine, *saved)
        made = Made(layers)
        with made:
            loss = engine(**batch)["loss"]
        alive, activation_levels[saved] = made.alive_bytes(), engine._session.runtime.activation_bytes()
        print([kept.name for kept in saved], alive, activation_levels[saved])
        hidden_bytes = batch["input_ids"].numel() * 32 * 4
        for kept, num_bytes in zip(saved, alive, strict=True):
            if kept is NOTHING:
                assert num_bytes == 0
            elif kept is PRODUCTS:
                assert 5 * hidden_bytes < num_bytes < 12 * hidden_bytes
            elif kept is ON_HOST:
                assert num_bytes < 4 * hidden_bytes  # parts of one product (queries, keys, values) stay
            else:
                assert num_bytes > 10 * hidden_bytes
        engine.backward(loss)
        del loss
        assert made.alive_bytes() == [0, 0, 0]
    nothing, everything, *mixed = activation_levels.values()
    assert nothing < min(mixed) < max(mixed) < everything


def test_memory_of_compiled_layers_is_free_between_forward_and_backward(opened):
    """Compiled layers save everything or nothing. A compiled forward gives the layer's output, then what it saves."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    calls = []

    def address(value):
        return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None

    def forward_of(graph, _):
        def run(*args):
            output, *saved = given = graph(*args)
            others = {None, *map(address, (*args, output))}
            made = {address(value): value.untyped_storage() for value in saved if address(value) not in others}
            calls.append([(StorageWeakRef(storage), storage.nbytes()) for storage in made.values()])
            return given

        return make_boxed_func(run)

    def alive_bytes():
        return [sum(size for ref, size in made if not ref.expired()) for made in calls]

    engine, _ = opened(THREE_LLAMAS)
    engine.compile(backend=aot_autograd(fw_compiler=forward_of, bw_compiler=lambda graph, _: make_boxed_func(graph)))
    batch = token_batch(torch.Generator().manual_seed(0))
    hidden_bytes = batch["input_ids"].numel() * 32 * 4
    for saved in [
        (NOTHING, NOTHING, NOTHING),
        (EVERYTHING, EVERYTHING, EVERYTHING),
        (NOTHING, EVERYTHING, ON_HOST),
        (EVERYTHING, PRODUCTS, NOTHING),
    ]:
        choose(engine, *saved)
        calls.clear()
        loss = engine(**batch)["loss"]
        *alive, _ = alive_bytes()  # the last graph is the final norm
        print([kept.name for kept in saved], alive)
        for kept, num_bytes in zip(saved, alive, strict=True):
            assert num_bytes > 10 * hidden_bytes if kept is EVERYTHING else num_bytes == 0
        engine.backward(loss)
        del loss
        assert len(calls) == 4 + sum(kept is not EVERYTHING for kept in saved)
        assert not any(alive_bytes())


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
    for chosen in (
        [()],
        [
            (EVERYTHING, ON_HOST),
            (ON_HOST, EVERYTHING),
            (EVERYTHING, EVERYTHING),
            (NOTHING, EVERYTHING),
            (ON_HOST, NOTHING),
        ],
    ):
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
    run = train(
        DROPPING,
        make_config(**never),
        3,
        checkpointing=False,
        before_step=lambda e, _: choose(e, EVERYTHING, EVERYTHING),
    )
    assert_same(run, train(DROPPING, make_config(**never), 3, checkpointing=False))
    with pytest.raises(ValueError, match="products cannot be saved on the host: nothing may leave.*auto"):
        choose(opened(**never)[0], ON_HOST)


def with_statistics():
    model = gpt2()
    model.transformer.h[0].norm = nn.BatchNorm1d(4)
    return model


def test_models_whose_checkpoints_stay_are_refused(opened):
    engine, _ = opened(with_statistics)
    with pytest.raises(ValueError, match="cannot save activations: .*running statistics"):
        choose(engine, EVERYTHING)


def test_a_pytorch_that_does_not_tell_its_hooks_keeps_its_checkpoints(opened, monkeypatch):
    expected = train(DROPPING, make_config("fp32", **SCARCE), 2)
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks")  # PyTorch 2.6
    assert_same(train(DROPPING, make_config("fp32", **SCARCE), 2), expected)
    with pytest.raises(ValueError, match="cannot save activations: .*does not tell its hooks"):
        choose(opened()[0], EVERYTHING)


@pytest.mark.parametrize(
    "options",
    [{"preserve_rng_state": False}, {"context_fn": lambda: (contextlib.nullcontext(), contextlib.nullcontext())}],
)
def test_calls_with_options_of_the_user_save_nothing(opened, options):
    engine, _ = opened(functools.partial(gpt2, layers=3), checkpoint=options)
    batch = token_batch(torch.Generator().manual_seed(0))
    choose(engine, EVERYTHING, EVERYTHING, EVERYTHING)
    made = Made(engine.module.transformer.h)
    with made:
        engine(**batch)["loss"]
    assert made.alive_bytes() == [0, 0, 0]


@pytest.mark.parametrize("late", ["compiled", "reentrant", "none"])
def test_layers_change_after_the_choice(late):
    def change(engine, step, chooses=False):
        if step == 1:
            if chooses:
                choose(engine, EVERYTHING, ON_HOST)
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


def test_within_a_checkpoint_of_the_user():
    config, around = make_config(**SCARCE), Case(Around, token_batch)
    run = train(
        around, config, 3, checkpointing=False, before_step=lambda engine, _: choose(engine, EVERYTHING, ON_HOST)
    )
    assert_same(run, train(around, config, 3, checkpointing=False))


def test_a_measured_step_tells_which_products_are_needed():
    class Feeding(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

        def forward(self, hidden):
            return checkpoint(lambda x: x + self.down(self.up(x).relu()), hidden, use_reentrant=False)

    measurement = CallMeasurement(lambda: 0, clock_of(torch.device("cpu")), torch.device("cpu"), lambda _: False, None)
    module = Feeding()
    calls = CheckpointCalls(module)
    calls.observe(measurement)
    with calls.running():
        loss = module(torch.randn(4, 64, requires_grad=True)).sum()
    loss.backward()
    assert [call.num_products for call in measurement.finish()] == [1]
