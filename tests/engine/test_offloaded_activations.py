import functools

import pytest
import torch
from torch import nn

from patrickstar import _C
from patrickstar.profiling.chrome import chrome_trace
from patrickstar.runtime import initialize_engine
from tests.models import MODELS, VOCAB, Case, llama
from tests.profiling.traces import traced
from tests.training import ADAM, Run, assert_same, least_device_memory, make_config, train

LENGTH, HIDDEN, LAYERS = 256, 32, 10
HIDDEN_BYTES = 2 * LENGTH * HIDDEN * 4


def deep_llama(vocab=VOCAB, length=LENGTH):
    sizes = {"hidden": HIDDEN, "layers": LAYERS, "heads": 2, "kv_heads": 1, "intermediate": 48}
    return llama(**sizes, vocab=vocab, length=length, attention="sdpa")


def long_batch(generator, length=LENGTH):
    tokens = torch.randint(1, VOCAB, (2, length), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


DEEP = Case(deep_llama, long_batch)
WIDE = Case(functools.partial(deep_llama, 2048), long_batch)  # its logits take 6 times the bytes of its layers' inputs


def offloading(offload, precision="fp32", **config):
    result = make_config(precision, activations={"offload": offload}, default_chunk_size=8192, **config)
    result["optimizer"]["params"]["use_hybrid_adam"] = False
    return result


@functools.cache
def reference(precision: str) -> Run:
    run = train(DEEP, offloading("never", precision), steps=3, checkpointing=False)
    assert run.report["offloaded_bytes"] == 0
    return run


@functools.cache
def least(offload: str, reentrant: bool = False) -> int:
    return least_device_memory(DEEP, offloading(offload), steps=2, checkpointing=reentrant)


def test_less_memory_is_enough():
    saved = least("never") - least("auto")
    print(f"{saved} bytes less than {least('never')}; inputs of layers take {LAYERS * HIDDEN_BYTES}")
    assert saved > LAYERS * HIDDEN_BYTES / 3


def offloaded_by_step(run: Run) -> list[int]:
    counts = [report["offloaded_bytes"] for report in run.chunk_reports]
    return [after - before for before, after in zip([0, *counts], counts, strict=False)]


@functools.cache
def wide_reference() -> tuple[Run, int]:
    activation_levels = []

    def look(engine, step):
        activation_levels.append(engine.plan().activation_peak_bytes if step > 0 else 0)

    run = train(WIDE, offloading("never", device_memory=2**40), steps=4, checkpointing=False, before_step=look)
    return run, max(activation_levels)


@pytest.mark.parametrize("ratio", [1.25, 1.5])
def test_the_one_access_of_the_logits_makes_nothing_leave(ratio):
    roomy, activation_memory = wide_reference()
    activation_levels = []

    def look(engine, step):
        if step > 0:
            activation_levels.append(engine.plan().activation_peak_bytes)

    config = offloading("auto", device_memory=int(ratio * activation_memory))
    run = train(WIDE, config, steps=4, checkpointing=False, before_step=look)
    print(offloaded_by_step(run), activation_levels, activation_memory)
    first, *later = offloaded_by_step(run)
    assert later == [0, 0, 0]
    assert (first > 0) == (ratio < 1.5)
    assert activation_memory <= activation_levels[0] <= 1.02 * activation_memory and activation_levels[1:] == [
        activation_memory,
        activation_memory,
    ]
    assert [report["num_pressure_evictions"] for report in run.chunk_reports] == [0] * 4
    assert_same(run, roomy)


def test_what_does_not_fit_leaves_in_every_step():
    roomy, activation_memory = wide_reference()
    inputs = LAYERS * HIDDEN_BYTES
    some = train(WIDE, offloading("auto", device_memory=int(1.17 * activation_memory)), steps=4, checkpointing=False)
    print(offloaded_by_step(some), inputs)
    assert all(0 < num_bytes < inputs for num_bytes in offloaded_by_step(some)[1:])
    assert_same(some, roomy)
    budget = least_device_memory(WIDE, offloading("auto"), steps=4, checkpointing=False)
    assert budget < activation_memory
    every = train(WIDE, offloading("auto", device_memory=budget), steps=4, checkpointing=False)
    assert all(num_bytes >= inputs for num_bytes in offloaded_by_step(every))
    assert_same(every, roomy)


def test_a_long_sequence_leaves_in_every_step():
    run = train(DEEP, offloading("auto", device_memory=least("auto")), steps=4, checkpointing=False)
    print(offloaded_by_step(run))
    assert all(num_bytes > LAYERS * HIDDEN_BYTES / 3 for num_bytes in offloaded_by_step(run))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_bits_do_not_depend_on_it(precision, reentrant):
    config = offloading("auto", precision, device_memory=least("auto", reentrant))
    run = train(DEEP, config, steps=3, checkpointing=reentrant)
    print(f"{run.report['offloaded_bytes']} bytes left the device")
    assert run.report["offloaded_bytes"] > 0
    assert_same(run, reference(precision))


@pytest.mark.parametrize("offload, vocab", [("auto", VOCAB), ("auto", 2048), ("always", 512)])
def test_sequences_that_get_longer(offload, vocab):
    checkpointing = False if offload == "auto" else None

    def growing():
        lengths = iter([LENGTH // 4, LENGTH // 4, LENGTH, LENGTH])
        return Case(functools.partial(deep_llama, vocab), lambda generator: long_batch(generator, next(lengths)))

    case = Case(functools.partial(deep_llama, vocab), long_batch)
    budget = least_device_memory(case, offloading(offload), steps=2, checkpointing=checkpointing)
    run = train(growing(), offloading(offload, device_memory=budget), steps=4, checkpointing=checkpointing)
    print(offloaded_by_step(run))
    assert offloaded_by_step(run)[2] > 0
    assert_same(run, train(growing(), offloading("never"), steps=4, checkpointing=checkpointing))


def test_the_least_budget_does_not_depend_on_how_fast_copies_are():
    measured = {
        least_device_memory(MODELS["bert"], make_config("bf16", **delays), checkpointing=True)
        for delays in ({}, {"delays": {"link_latency_us": 3000}})
    }
    assert len(measured) == 1


def test_transfers_are_traced():
    result = traced(DEEP, offloading("auto", device_memory=least("auto")), step=1, checkpointing=False)
    names = [event["name"] for event in chrome_trace(result.trace, 1, result.layers)["traceEvents"]]
    offloaded = [span for span in result.trace["spans"] if span["num_bytes"] > 0 and span["chunk"] < 0]
    assert len(offloaded) == names.count("activation") > 0
    down = [span["num_bytes"] for span in offloaded if span["track"] == _C.Track.DOWNLOAD]
    assert sum(down) == result.after["offloaded_bytes"] - result.before["offloaded_bytes"]


def test_models_that_checkpoint_nothing():
    roomy = train(DEEP, offloading("never"), steps=2)
    budget = 3 * (roomy.report["device_peak_bytes"] // 4)
    run = train(DEEP, offloading("always", device_memory=budget), steps=2)
    assert run.report["offloaded_bytes"] > 0
    assert_same(run, roomy)
    assert train(DEEP, offloading("auto", device_memory=2 * budget), steps=1).report["offloaded_bytes"] == 0


def test_host_memory_without_room():
    config = offloading("auto")
    states = 16 * sum(param.numel() for param in deep_llama().parameters())
    config |= {"host_memory": states + (1 << 20), "device_memory": least("never")}
    assert_same(train(DEEP, config, steps=3, checkpointing=False), reference("fp32"))


class Doubling(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x, spoil):
        hidden = self.linear(x)
        result = hidden * hidden
        if spoil:
            hidden.add_(1)
        return result.sum()


def test_changes_in_place_are_errors_still():
    config = {"optimizer": {"type": "AdamW", "params": dict(ADAM)}, "activations": {"offload": "always"}}
    engine, _ = initialize_engine(Doubling, 0, {**config, "device_memory": "4MB"})
    with engine:
        engine.backward(engine(torch.randn(512, 64), False))
        loss = engine(torch.randn(512, 64), True)
        with pytest.raises(RuntimeError, match="modified.*in.?place"):
            engine.backward(loss)


def test_a_graph_that_is_used_twice():
    config = {"optimizer": {"type": "AdamW", "params": dict(ADAM)}, "activations": {"offload": "always"}}
    grads = []
    for offload, memory in (("never", "64MB"), ("always", "4MB")):
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU())))
        engine, optimizer = initialize_engine(
            lambda model=model: model, 0, {**config, "activations": {"offload": offload}, "device_memory": memory}
        )
        with engine:
            x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0))
            loss = engine(x).square().mean()
            engine.backward(loss, retain_graph=True)
            engine.backward(loss)
            optimizer.step()
            assert (engine.report()["offloaded_bytes"] > 0) == (offload == "always")
            grads.append(engine.state_dict())
    for name, value in grads[0].items():
        assert torch.equal(value, grads[1][name]), name
