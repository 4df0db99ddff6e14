import contextlib

import pytest
import torch

from patrickstar import MemoryBudgetError, StateError
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.models import MODELS
from tests.training import assert_same, least_device_memory, make_config, make_host_config, train, train_once

CASE = MODELS["gpt2"]
STEPS = 6


def on_device(engine):
    return engine.report()["device_chunk_buffer_bytes"]


def lend_every_second(keep, seen):
    def before_step(engine, step):
        if step % 2 == 1:
            before = on_device(engine), engine.report()["num_device_state_chunks"]
            with engine.lend(keep):
                inside = on_device(engine)
            seen.append((*before, inside, engine.report()["num_device_state_chunks"]))

    return before_step


@pytest.mark.parametrize(("precision", "room"), [("fp32", 200_000), ("bf16", 0), ("bf16", None), ("fp16", 200_000)])
def test_no_number_changes(precision, room):
    config = make_config(precision, default_chunk_size=16 * 1024)
    least = least_device_memory(CASE, config)
    budget = {} if room is None else {"device_memory": least + room}
    seen = []
    run = train(CASE, {**config, **budget}, steps=STEPS, before_step=lend_every_second(0, seen))
    assert_same(run, train_once(CASE, make_host_config(precision, default_chunk_size=16 * 1024), steps=STEPS))
    assert any(before > 0 for before, *_ in seen) == (room != 0)  # without room, steps end with an empty device
    for _, states_before, inside, states_after in seen:
        assert inside == 0
        assert states_after == states_before


def test_memory_of_others_is_no_peak():
    def lend(engine, step):
        if step >= 2:
            with engine.lend():
                torch.empty(2**30, dtype=torch.uint8)

    config = make_config("bf16", default_chunk_size=16 * 1024)
    config["device_memory"] = least_device_memory(CASE, config) + 200_000
    lent, plain = train(CASE, config, steps=STEPS, before_step=lend), train(CASE, config, steps=STEPS)
    assert plain.report["num_device_state_chunks"] > 0
    assert lent.report["num_device_state_chunks"] == plain.report["num_device_state_chunks"]
    assert lent.report["device_peak_bytes"] <= plain.report["device_peak_bytes"]


def test_what_is_kept_stays():
    seen = []
    config = make_config("bf16", default_chunk_size=4096)
    run = train(CASE, config, steps=4, before_step=lend_every_second("64KiB", seen))
    assert run.report["num_pressure_evictions"] == 0
    assert any(inside > 0 for _, _, inside, _ in seen)
    assert all(inside <= 64 * 1024 for _, _, inside, _ in seen)


def pending_gradients(lends):
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(CASE.build, 0, make_config("bf16", default_chunk_size=16 * 1024))
    generator = torch.Generator().manual_seed(1)
    with engine:
        engine.train()
        for _ in range(3):
            for _ in range(2):
                engine.backward(engine(**CASE.batch(generator)).loss / 2)
                with engine.lend() if lends else contextlib.nullcontext():
                    pass
            optimizer.step()
            optimizer.zero_grad()
        return engine.state_dict()


def test_gradients_wait():
    assert_same_bits(pending_gradients(True), pending_gradients(False))


def test_calls_within_a_loan(tmp_path):
    engine, optimizer = initialize_engine(CASE.build, 0, make_config())
    batch = CASE.batch(torch.Generator().manual_seed(1))
    with engine:
        engine.backward(engine(**batch).loss)
        lent = "device memory is lent; leave the block of engine.lend"
        with engine.lend():
            for call in (
                lambda: engine(**batch),
                lambda: engine.backward(torch.zeros((), requires_grad=True)),
                optimizer.step,
                optimizer.zero_grad,
                engine.grad_norm,
                lambda: engine.lend().__enter__(),
                lambda: engine.resize(2),
            ):
                with pytest.raises(StateError, match=lent):
                    call()
            with torch.no_grad(), pytest.raises(StateError, match=lent):
                engine(**batch)
            before = engine.state_dict()
            engine.export_weights(str(tmp_path / "exported"))
        optimizer.step()
        engine.save_checkpoint(str(tmp_path / "saved"))
        assert not torch.equal(before["transformer.wte.weight"], engine.state_dict()["transformer.wte.weight"])
    for keep in (-1, "much"):
        engine, _ = initialize_engine(CASE.build, 0, make_config())
        with engine, pytest.raises(ValueError, match=f"lend: keep is {keep!r}; give bytes"):
            engine.lend(keep).__enter__()


def test_the_loans_error_is_the_callers():
    engine, optimizer = initialize_engine(CASE.build, 0, make_config())
    batch = CASE.batch(torch.Generator().manual_seed(1))
    with engine:
        with pytest.raises(ZeroDivisionError), engine.lend():
            1 / 0  # noqa: B018
        engine.backward(engine(**batch).loss)
        optimizer.step()


def test_host_memory_without_room():
    config = make_config(default_chunk_size=16 * 1024)
    ample = train(CASE, config, steps=2).report
    states = 12 * ample["num_chunk_elements"]
    tight = {**config, "device_memory": ample["device_peak_bytes"] + states, "host_memory": states // 2}

    def lend(engine, step):
        if step == 2:
            with pytest.raises(MemoryBudgetError, match="must stay on the device") as raised, engine.lend():
                pass
            kept = int(str(raised.value).rpartition("keep=")[2])
            assert 0 < kept < states
            with engine.lend(kept):
                assert on_device(engine) <= kept

    run = train(CASE, tight, steps=4, before_step=lend)
    assert_same(run, train_once(CASE, config, steps=4))
