import functools
import os

import pytest
import torch

from patrickstar.activations.activation_rules import Saved
from patrickstar.runtime import initialize_engine
from tests.distributed import run_ranks
from tests.models import VOCAB, gpt2, llama
from tests.ranks import mixed_models
from tests.recomputing import ALONE, choose_by_fixed_times, out_of_memory_once, update_slower_beside_steps
from tests.training import Run, assert_same, make_config

LAYERS = 4
SIZES = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": LAYERS}
MODELS = {
    "gpt2": functools.partial(gpt2, hidden=64, layers=LAYERS, length=64),
    "llama": functools.partial(llama, hidden=64, layers=LAYERS, length=64),
    "qwen3-moe": mixed_models.build("Qwen3Moe", "grouped_mm", **SIZES),
}


def train(recompute, sizes, options, levels=(), model="llama"):
    """The run, what calls saved in each step, and what the first step predicts. ``sizes``: rows and tokens by step and
    rank. ``levels``: what calls are told to save, each another, in turn.
    """
    choose_by_fixed_times()
    if "delays" in options:
        update_slower_beside_steps(rate_alone=(ALONE, 2 * ALONE)[int(os.environ["RANK"])])
    torch.manual_seed(0)
    config = make_config("bf16", default_chunk_size=2**14, activations={"recompute": recompute}, **options)
    engine, optimizer = initialize_engine(MODELS[model], 0, config)
    with engine:
        engine.train()
        engine.module.gradient_checkpointing_enable({"use_reentrant": False})
        rank = torch.distributed.get_rank()
        generator = torch.Generator().manual_seed(0 if PARALLEL & options.keys() else rank)
        losses, saved, predicted = [], [], []
        for index, by_rank in enumerate(sizes):
            if levels:
                engine._session.checkpoint_calls.choose(
                    [levels[(index + number) % len(levels)] for number in range(LAYERS)]
                )
            tokens = torch.randint(0, VOCAB, by_rank[rank], generator=generator)
            loss = engine(input_ids=tokens, labels=tokens)["loss"]
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            saved.append([kept.value for kept in engine._session.checkpoint_calls.saved])
            predicted.append(engine.report()["predicted_step_seconds"])
        return Run(losses, engine.state_dict(), engine.report()), saved, predicted[0]


def assert_same_runs(some, others):
    for (one, *_), (other, *_) in zip(some, others, strict=True):
        assert_same(one, other)


def test_ranks_with_uneven_batches_choose_alike():
    sizes = [((2, 32), (1, 64)), ((2, 32), (2, 32)), ((1, 16), (2, 32)), ((2, 32), (4, 64)), ((2, 32), (2, 32))]
    always, auto = (run_ranks(2, train, recompute, sizes, {}) for recompute in ("always", "auto"))
    assert_same_runs(auto, always)
    saved = auto[0][1]
    assert auto[1][1] == saved
    assert saved[0] == saved[1] == saved[2]
    assert Saved.NOTHING.value not in saved[0]
    assert saved[3] == saved[4] != saved[2]  # one rank's forward is twice as large as any before
    forced = run_ranks(2, train, "always", sizes, {}, tuple(Saved))
    assert_same_runs(forced, always)
    assert all(set(saved) == {kept.value for kept in Saved} for _, by_step, _ in forced for saved in by_step)


@pytest.mark.parametrize(("model", "num_ranks"), [("qwen3-moe", 2), ("llama", 3)])
def test_forced_levels_within_a_budget_have_the_bits_of_ample_memory(model, num_ranks):
    even, uneven = ((2, 32),) * num_ranks, ((1, 64), (2, 48), (1, 32))[:num_ranks]
    sizes = [even, uneven] * 2
    always = run_ranks(num_ranks, train, "always", sizes, {}, (), model)
    forced = run_ranks(num_ranks, train, "always", sizes, {"device_memory": "2MiB"}, tuple(Saved), model)
    assert_same_runs(forced, always)
    for run, saved, _ in forced:
        assert run.report["num_evictions"] > 0 and run.report["offloaded_bytes"] > 0
        assert all(set(by_call) == {kept.value for kept in Saved} for by_call in saved)


SHARED = {
    "sequences": ("gpt2", {"sequence_parallel": {"size": 2, "mode": "ring"}}),  # a mask as a positional argument
    "matrices": ("llama", {"tensor_parallel": {"rows": 1, "columns": 2}}),
}
PARALLEL = {key for _, options in SHARED.values() for key in options}


@pytest.mark.parametrize("name", SHARED)
def test_ranks_that_share_calls_choose_alike(name):
    sizes, (model, options) = [((2, 32), (2, 32))] * 3, SHARED[name]
    always, auto = (run_ranks(2, train, recompute, sizes, options, (), model) for recompute in ("always", "auto"))
    assert_same_runs(auto, always)
    assert auto[0][1] == auto[1][1]
    assert Saved.NOTHING.value not in auto[0][1][2]


def test_ranks_choose_again_alike():
    sizes = [((2, 32), (2, 32))] * 8
    options = {"delays": {"link_gbps": 1e4}, "device_memory": "2MiB"}
    always, auto = (run_ranks(2, train, recompute, sizes, options) for recompute in ("always", "auto"))
    assert_same_runs(auto, always)
    saved = auto[0][1]
    assert auto[1][1] == saved
    assert auto[0][2] == auto[1][2] > 0  # by the slowest rank's times
    assert saved[-1].count(Saved.NOTHING.value) > saved[1].count(Saved.NOTHING.value)


def train_out_of_memory(failing):
    """Losses, and what calls saved in each step, if the first forward runs out of memory on the ranks ``failing``.
    None: it does not, and layers are checkpointed.
    """
    choose_by_fixed_times()
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(MODELS["llama"], 0, make_config("bf16", default_chunk_size=2**14))
    with engine:
        engine.train()
        rank = torch.distributed.get_rank()
        layers = engine.module.model.layers
        if failing is None:
            engine.module.gradient_checkpointing_enable({"use_reentrant": False})
        elif rank in failing:
            out_of_memory_once(layers[1])
        generator = torch.Generator().manual_seed(rank)
        losses, saved = [], []
        for _ in range(5):
            tokens = torch.randint(0, VOCAB, (2, 32), generator=generator)
            loss = engine(input_ids=tokens, labels=tokens)["loss"]
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            assert all(layer.gradient_checkpointing for layer in layers)
            saved.append([kept.value for kept in engine._session.checkpoint_calls.saved])
        return losses, saved


def test_all_ranks_get_checkpoints_if_memory_runs_out_on_some():
    of_ranks = {failing: run_ranks(2, train_out_of_memory, failing) for failing in (None, (0,), (0, 1))}
    expected = of_ranks.pop(None)
    for failing, found in of_ranks.items():
        assert [losses for losses, _ in found] == [losses for losses, _ in expected], failing
        assert found[0][1] == found[1][1]
        assert found[0][1][-1] != []  # the choice itself follows measured rates of copies
        assert Saved.NOTHING.value not in found[0][1][-1]
