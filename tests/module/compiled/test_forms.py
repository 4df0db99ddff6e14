import pytest
import torch
from torch._dynamo.utils import counters

from patrickstar.runtime import initialize_engine
from tests.models import MODELS, Case
from tests.module.compiled.forms import (
    AFTER,
    BACKEND,
    BEFORE,
    TOWER,
    case_of,
    train_after,
    train_compiled_plain,
    without_wrappers,
)
from tests.training import Run, assert_same, least_device_memory, make_config, relative_error, train, train_plain

SMALL = {"fp32": 400_000, "bf16": 200_000}
"""Device bytes; without a limit the tower takes 1.4 and 1.1 MB."""
ROOM_BYTES = 64 * 1024
"""Beyond the least budget: the compiler's garbage counts as activations until it is collected."""


def assert_close(run: Run, reference: Run, tolerance: float) -> None:
    assert run.losses == pytest.approx(reference.losses, rel=tolerance)
    state = Run([], without_wrappers(run.state), {})
    assert relative_error(state, Run([], without_wrappers(reference.state), {})) <= tolerance


@pytest.mark.parametrize(("form", "precision"), [*((form, "fp32") for form in BEFORE), ("whole", "bf16")])
def test_compiled_before(form, precision):
    config = make_config(precision, gradient_clipping=1.0, default_chunk_size=8192)
    unlimited = train(case_of(form), config, steps=4)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]
    budget = SMALL[precision] if form != "one_graph" else least_device_memory(case_of(form), config) + ROOM_BYTES
    small = train(case_of(form), {**config, "device_memory": budget}, steps=4)
    print(f"{form} {precision}: {unlimited.report['device_peak_bytes']}, {budget}: {small.report['num_evictions']}")
    assert small.report["num_evictions"] > 0
    assert small.report["device_peak_bytes"] <= budget
    assert_same(small, unlimited)
    if precision == "fp32":
        plain = train_compiled_plain(form)
        assert list(unlimited.state) == list(plain.state)
        assert_close(unlimited, plain, 1e-6)
    else:
        assert_close(unlimited, train(TOWER, config, steps=4), 1e-2)


@pytest.mark.parametrize("form", AFTER)
def test_compiled_after(form):
    unlimited = train_after(form, default_chunk_size=8192)
    assert counters["stats"]["unique_graphs"] > 0
    small = train_after(form, default_chunk_size=8192, device_memory=SMALL["fp32"])
    assert small.report["num_evictions"] > 0
    assert_same(small, unlimited)
    assert_close(unlimited, train_plain(TOWER, steps=4, clipping=1.0), 1e-6)


def test_a_block_replaced_by_a_compiled_one_runs():
    def replace(engine, step):
        if step == 1:
            engine.module.blocks[2] = torch.compile(engine.module.blocks[2], backend=BACKEND)

    config = make_config(default_chunk_size=8192, device_memory=SMALL["fp32"])
    assert train(TOWER, config, steps=4, before_step=replace).losses == train(TOWER, config, steps=4).losses


@pytest.mark.parametrize("dialect", ["plain", "deepspeed"])
def test_a_whole_step_in_a_compiled_function(dialect):
    import patrickstar

    config = make_config(gradient_clipping=1.0, default_chunk_size=8192, device_memory=SMALL["fp32"])
    torch.manual_seed(0)
    if dialect == "plain":
        engine, optimizer = initialize_engine(TOWER.build, 0, config)
    else:
        config["train_micro_batch_size_per_gpu"] = 2
        engine, optimizer, _, _ = patrickstar.initialize(model=TOWER.build(), config=config)

    @torch.compile(backend=BACKEND)
    def plain_step(batch):
        loss = engine(**batch)["loss"]
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    @torch.compile(backend=BACKEND)
    def deepspeed_step(batch):
        loss = engine(**batch)["loss"]
        engine.backward(loss)
        engine.step()
        return loss

    step = plain_step if dialect == "plain" else deepspeed_step
    with engine:
        engine.train()
        generator = torch.Generator().manual_seed(1)
        losses = [step(TOWER.batch(generator)).item() for _ in range(3)]
        assert engine.is_compiled
    assert losses == pytest.approx(train_plain(TOWER, steps=3, clipping=1.0).losses, rel=1e-6)


@pytest.mark.parametrize("form", ["one_graph", "in_place"])
def test_a_compiled_function_calls_a_compiled_model(form):
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(case_of(form).build, 0, make_config(gradient_clipping=1.0))
    generator, losses = torch.Generator().manual_seed(1), []
    with engine:
        forward = torch.compile(engine, backend=BACKEND)
        for _ in range(3):
            loss = forward(**TOWER.batch(generator))["loss"]
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    assert losses == pytest.approx(train_plain(TOWER, steps=3, clipping=1.0).losses, rel=1e-6)


def compiled(name: str) -> Case:
    case = MODELS[name]
    return Case(lambda: torch.compile(case.build(), backend=BACKEND), case.batch, case.loss)


@pytest.mark.parametrize("name", ["lora", "mixture_of_experts", "lstm"])
def test_models(name):
    config = make_config(gradient_clipping=1.0)
    unlimited = train(compiled(name), config, steps=4)
    budget = least_device_memory(compiled(name), config, steps=2) + ROOM_BYTES // 4
    small = train(compiled(name), {**config, "device_memory": budget}, steps=4)
    print(f"{name}: {small.report['num_evictions']} evictions within {budget} bytes")
    assert small.report["num_evictions"] > 0
    assert_same(small, unlimited)
    assert_close(unlimited, train_plain(MODELS[name], steps=4, clipping=1.0), 1e-6)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant):
    config = make_config("bf16")
    unlimited = train(compiled("gpt2"), config, steps=4, checkpointing=use_reentrant)
    least = least_device_memory(compiled("gpt2"), config, checkpointing=use_reentrant)
    small = train(compiled("gpt2"), {**config, "device_memory": least + 8192}, steps=4, checkpointing=use_reentrant)
    assert_same(small, unlimited)
    eager = train(MODELS["gpt2"], config, steps=4, checkpointing=use_reentrant)
    assert unlimited.losses == pytest.approx(eager.losses, rel=1e-2)


def test_accumulation():
    config = make_config(gradient_clipping=1.0, default_chunk_size=8192)
    unlimited = train(case_of("whole"), config, steps=4, accumulate=3)
    small = train(case_of("whole"), {**config, "device_memory": SMALL["fp32"]}, steps=4, accumulate=3)
    assert small.report["num_evictions"] > 0
    assert_same(small, unlimited)
    assert_close(unlimited, train_plain(TOWER, steps=4, accumulate=3, clipping=1.0), 1e-6)


@pytest.mark.slow
def test_inductor():
    config = make_config("bf16", gradient_clipping=1.0, default_chunk_size=8192)
    case = Case(lambda: torch.compile(TOWER.build()), TOWER.batch)
    unlimited = train(case, config, steps=3)
    small = train(case, {**config, "device_memory": SMALL["bf16"]}, steps=3)
    assert small.report["num_evictions"] > 0
    assert_same(small, unlimited)
    assert_close(unlimited, train(TOWER, config, steps=3), 1e-2)
