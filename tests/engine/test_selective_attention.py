import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from patrickstar.activations.selective_recomputation import _DROPOUT_AT
from tests.engine.test_offloaded_activations import DEEP, HIDDEN, LAYERS, deep_llama, long_batch, offloading
from tests.models import Case
from tests.training import Run, assert_same, least_device_memory, train


class CountedKernels(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in _DROPOUT_AT
        return func(*args, **(kwargs or {}))


def keeping(kept, **config):
    result = offloading(config.pop("offload", "auto"), **config)
    result["activations"]["keep_attention"] = kept
    return result


def counted(config, steps, case=DEEP, **options) -> tuple[Run, int]:
    kernels = CountedKernels()
    with kernels:
        run = train(case, config, steps=steps, checkpointing=options.pop("checkpointing", False), **options)
    return run, kernels.count


@functools.cache
def reference(precision: str) -> Run:
    run, count = counted(keeping("never", offload="never", precision=precision), 3)
    assert count == 3 * 2 * LAYERS
    return run


@functools.cache
def least() -> int:
    return least_device_memory(DEEP, keeping("never"), steps=2, checkpointing=False)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_kernels_are_not_called_again(precision):
    run, count = counted(keeping("always", precision=precision, device_memory=least()), 3)
    print(f"{count} calls, {run.report['offloaded_bytes']} bytes left the device")
    assert count == (2 + 1 + 1) * LAYERS
    assert run.report["offloaded_bytes"] > 0
    assert_same(run, reference(precision))


@pytest.mark.parametrize("least_shares", [2, 0.5])
def test_an_ample_device_keeps_all_of_them(least_shares):
    device_memory = int(4096 / least_shares) * long_batch(torch.Generator())["input_ids"].numel() * HIDDEN * 2
    run, count = counted(keeping("always", precision="bf16", device_memory=device_memory), 3)
    assert count == (2 + 1 + 1) * LAYERS
    assert_same(run, reference("bf16"))


@pytest.mark.slow
def test_as_many_as_there_is_room_for():
    counts = set()
    states = 16 * sum(param.numel() for param in deep_llama().parameters())
    for room in (0, 1 << 19, 1 << 22):
        config = keeping("always", device_memory=least() + (1 << 17), host_memory=states + (1 << 20) + room)
        run, count = counted(config, 3)
        counts.add(count)
        assert_same(run, reference("fp32"))
    print(sorted(counts))
    assert len(counts) > 1 and min(counts) == (2 + 1 + 1) * LAYERS


@pytest.mark.slow
def test_default_leaves_short_sequences_alone():
    assert counted(keeping("auto", device_memory=least()), 2)[1] == 2 * 2 * LAYERS


@pytest.mark.slow
def test_without_a_limit_of_the_device():
    run, count = counted(keeping("always"), 3)
    assert run.report["offloaded_bytes"] == 0
    assert count == (2 + 1 + 1) * LAYERS
    assert_same(run, reference("fp32"))


@pytest.mark.slow
def test_reentrant_checkpoints_compute_again():
    run, count = counted(keeping("always", device_memory=least() + (1 << 17)), 2, checkpointing=True)
    assert count == 2 * 2 * LAYERS
    assert_same(run, train(DEEP, offloading("never"), steps=2, checkpointing=True))


def test_dropout_computes_again():
    def dropping():
        model = deep_llama()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.25
        return model

    case = Case(dropping, long_batch)
    run = train(case, keeping("always", device_memory=4 * least()), steps=2, checkpointing=False)
    assert_same(run, train(case, keeping("never", offload="never"), steps=2, checkpointing=False))


@pytest.mark.slow
def test_a_graph_that_is_used_twice():
    import patrickstar

    grads = []
    for kept in ("never", "always"):
        torch.manual_seed(0)
        model = deep_llama()
        model.activation_checkpointing_enable()
        engine, optimizer = patrickstar.initialize_engine(
            lambda model=model: model, 0, keeping(kept, device_memory=2 * least())
        )
        with engine:
            engine.train()
            for seed in range(2):
                batch = long_batch(torch.Generator().manual_seed(seed))
                loss = engine(**batch).loss
                engine.backward(loss, retain_graph=True)
                engine.backward(loss)
                optimizer.step()
            grads.append(engine.state_dict())
    for name, value in grads[0].items():
        assert torch.equal(value, grads[1][name]), name
