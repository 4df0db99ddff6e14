"""Products of checkpointed calls that wait in host memory."""

import gc

import pytest
import torch

from patrickstar.activations.activation_rules import Saved
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.models import VOCAB, Case, gpt2
from tests.recomputing import choose_by_fixed_times, update_slower_beside_steps
from tests.training import assert_same, make_config, make_host_config, train

LAYERS = 9
NOTHING, PRODUCTS, ON_HOST, EVERYTHING = Saved
TIGHT = {"device_memory": "6MiB", "default_chunk_size": 2**14}


def build():
    model = gpt2(hidden=64, layers=LAYERS, dropout=0.1, length=64)
    model.config.use_cache = False
    return model


def batch(generator, rows=4):
    tokens = torch.randint(1, VOCAB, (rows, 64), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


@pytest.fixture
def opened():
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(build, 0, make_config(**TIGHT, host_memory="64MiB"))
    with engine:
        engine.train()
        engine.module.gradient_checkpointing_enable({"use_reentrant": False})
        yield engine, optimizer


CASE = Case(build, batch)


def saved_of(engine):
    return engine._session.checkpoint_calls.saved


def test_an_engine_sends_them_where_products_do_not_fit(monkeypatch, caplog, tmp_path):
    choose_by_fixed_times(monkeypatch.setattr)
    found = []
    always = train(CASE, make_config(**TIGHT, activations={"recompute": "always"}), 5, checkpointing=False)
    with caplog.at_level("INFO", "patrickstar"):
        auto = train(
            CASE, make_config(**TIGHT), 5, checkpointing=False,
            before_step=lambda engine, _: found.append((saved_of(engine), engine.report()["offloaded_bytes"])),
        )  # fmt: skip
    assert found[1][0] == (ON_HOST,) * (LAYERS - 1) + (PRODUCTS,)
    assert "products of 8 on the host" in caplog.text
    sent = [after - before for (_, before), (_, after) in zip(found[1:], found[2:], strict=False)]
    assert min(sent) == max(sent) > 0
    assert_same(auto, always)
    never = make_config(**TIGHT, activations={"offload": "never"})
    staying = train(
        CASE, never, 3, checkpointing=False, before_step=lambda engine, _: found.append((saved_of(engine), 0))
    )
    assert ON_HOST not in found[-1][0]
    assert staying.losses == always.losses[:3]


def test_nothing_is_sent_any_more_where_updates_bound_the_step(monkeypatch):
    choose_by_fixed_times(monkeypatch.setattr)
    config, found = make_host_config("fp32", **TIGHT, delays={"link_gbps": 1e4}), []
    always = train(CASE, config | {"activations": {"recompute": "always"}}, 8, checkpointing=False)
    update_slower_beside_steps(monkeypatch.setattr)
    auto = train(CASE, config, 8, checkpointing=False, before_step=lambda engine, _: found.append(saved_of(engine)))
    assert found[1].count(ON_HOST) == LAYERS - 1
    assert ON_HOST not in found[-1]
    assert_same(auto, always)


ALL_BUT_ONE = (ON_HOST,) * (LAYERS - 1) + (PRODUCTS,)


def test_host_memory_is_free_again_after_a_backward_or_without_one(opened):
    engine, optimizer = opened
    inputs = batch(torch.Generator().manual_seed(0))
    room = engine._session.runtime.host_room_of_activations
    engine._session.checkpoint_calls.choose(ALL_BUT_ONE)
    rooms, sent = [], []
    for _ in range(3):
        loss = engine(**inputs)["loss"]
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        del loss
        rooms.append(room())
        sent.append(engine.report()["offloaded_bytes"])
    assert rooms[0] == rooms[1] == rooms[2]
    assert 0 < sent[0] < sent[1] < sent[2]
    engine(**inputs)["loss"]  # dropped
    gc.collect()
    assert room() == rooms[0]


def test_two_forwards_before_their_backwards(opened):
    engine, optimizer = opened
    generator = torch.Generator().manual_seed(0)
    inputs = [batch(generator, rows=1) for _ in range(2)]
    grads = []
    for saved in ((), (ON_HOST, NOTHING, ON_HOST, ON_HOST, PRODUCTS, ON_HOST, ON_HOST, NOTHING, ON_HOST)):
        engine._session.checkpoint_calls.choose(saved)
        torch.manual_seed(1)
        engine.backward(sum(engine(**each)["loss"] for each in inputs))
        grads.append({name: param.grad.clone() for name, param in engine.module.named_parameters()})
        optimizer.zero_grad()
    assert_same_bits(*grads)


def test_a_host_without_room_leaves_products_on_the_device(opened):
    engine, optimizer = opened
    inputs, runtime = batch(torch.Generator().manual_seed(0), rows=1), engine._session.runtime
    losses, held = [], torch.empty(2**12)
    for saved in ((), (ON_HOST,) * LAYERS):
        engine._session.checkpoint_calls.choose(saved)
        while runtime.offload_activation(held.data_ptr(), held.nbytes) >= 0:
            pass
        before = engine.report()["offloaded_bytes"]
        torch.manual_seed(1)
        loss = engine(**inputs)["loss"]
        engine.backward(loss)
        assert engine.report()["offloaded_bytes"] == before
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == losses[1]
