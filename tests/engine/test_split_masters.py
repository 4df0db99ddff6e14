import functools

import pytest
import torch

from patrickstar import _C, MemoryBudgetError
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.models import MODELS, Case, gpt2, token_batch
from tests.training import assert_same, go_on, least_device_memory, make_config, num_committed, train

GPT2 = Case(lambda: gpt2(hidden=64, layers=4), token_batch)
STEPS = 3


def config_of(speculation, *, on_device=True, **more):
    config = make_config("bf16", default_chunk_size=4096, **more)
    config["optimizer"]["speculation"] = speculation
    config["optimizer"]["params"]["use_hybrid_adam"] = on_device
    return config


def is_split(engine):
    layout = engine._session.layout
    return all(layout.chunk(i)["states"].master == _C.StateType.LOWER_HALF for i in range(layout.num_chunks))


@pytest.mark.parametrize("name", ["gpt2", "lora", "shared", "mixture_of_experts"])
def test_no_number_changes(name):
    case = MODELS[name]
    expected = train(case, config_of("never"), steps=3)
    least = least_device_memory(case, config_of("commit", on_device=False), steps=3)
    budgets = [(None, True), (None, False), (least, True), (least * 2, True)]
    for device_bytes, on_device in budgets:
        run = train(case, config_of("commit", on_device=on_device, device_memory=device_bytes), steps=3)
        assert_same(run, expected)
        assert num_committed(run.report) >= 3


@functools.cache
def expected_run():
    return train(GPT2, config_of("never"), steps=STEPS)


@functools.cache
def least_device():
    return least_device_memory(GPT2, config_of("commit", on_device=False), steps=2)


def budgets_of(host_bytes_per_param, more_device_bytes=0):
    count = expected_run().report["num_chunk_elements"]
    return {"host_memory": int(host_bytes_per_param * count), "device_memory": least_device() + int(more_device_bytes)}


def test_twelve_bytes_per_parameter():
    """12.5 bytes per parameter with gradients on their way, instead of 14."""
    run = train(GPT2, config_of("commit", **budgets_of(12.5)), steps=STEPS)
    assert_same(run, expected_run())
    print(f"{run.report['host_peak_bytes'] / run.report['num_chunk_elements']:.2f} bytes per parameter")
    assert num_committed(run.report) == STEPS * run.report["num_chunks"]
    for speculation in ("never", "always"):
        with pytest.raises(MemoryBudgetError):
            train(GPT2, config_of(speculation, **budgets_of(12.5)), steps=STEPS)


@pytest.mark.parametrize("host_share", [11.0, 7.0, 3.0])
def test_states_on_both_sides(host_share):
    count = expected_run().report["num_chunk_elements"]
    budgets = budgets_of(host_share, (12.6 - host_share) * count)
    delays = {"max_random_us": 500, "seed": int(host_share)}
    run = train(GPT2, config_of("commit", delays=delays, **budgets), steps=STEPS)
    assert_same(run, expected_run())
    assert 0 < run.report["num_device_state_chunks"] < run.report["num_chunks"]


@pytest.mark.parametrize(("before", "after"), [("never", "commit"), ("commit", "never")])
@pytest.mark.parametrize("on_device", [True, False])
def test_a_checkpoint_of_one_form_goes_on_in_the_other(before, after, on_device, tmp_path):
    case = MODELS["gpt2"]

    def part(speculation, steps, *, load, save=False):
        def look(engine):
            assert is_split(engine) == (speculation == "commit")

        config = config_of(speculation, on_device=on_device)
        return go_on(case, config, steps, tmp_path, load=load, save=save, look=look)

    torch.manual_seed(0)
    saved = part(before, 3, load=False, save=True)
    torch.manual_seed(1)
    assert_same_bits(part(after, 0, load=True), saved)
    assert_same_bits(part(after, 4, load=True), part(before, 4, load=True))


def test_values_halfway_between_two_compute_values():
    """Weights of a float16 checkpoint: one in sixteen is a tie, which 16 bits alone cannot tell apart."""
    torch.manual_seed(0)
    weights = {name: value.half().float() for name, value in gpt2().state_dict().items()}
    for on_device in (True, False):
        config = config_of("commit", on_device=on_device)
        engine, optimizer = initialize_engine(gpt2, 0, config)
        with engine:
            engine.load_state_dict(weights)
            assert_same_bits(engine.state_dict(), weights)
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            engine.backward(engine(**token_batch(torch.Generator().manual_seed(0)))["loss"])
            optimizer.step()
            assert_same_bits(engine.state_dict(), weights)
            assert all((state["exp_avg_sq"] >= 0).all() for state in optimizer.state_dict()["state"].values())


def test_the_form_is_for_committed_bfloat16():
    for config, expected in ((config_of("commit"), True), (config_of("never"), False), (make_config("fp32"), False)):
        engine, _ = initialize_engine(gpt2, 0, config)
        with engine:
            assert is_split(engine) == expected
