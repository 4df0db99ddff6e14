import itertools
import json

import pytest
import torch

from patrickstar import _C
from tests.distributed import run_python
from tests.models import LENGTH, MODELS, VARIED, VOCAB, Case, gpt2
from tests.training import assert_same, least_device_memory, make_config, relative_error, train, train_plain

PRECISIONS = ["fp32", "bf16", "fp16"]


def wide_gpt2():
    return gpt2(hidden=128, layers=4)


def short_batch(generator):
    tokens = torch.randint(1, VOCAB, (1, LENGTH // 2), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


WIDE = Case(wide_gpt2, short_batch)
NARROW = Case(lambda: gpt2(hidden=64, layers=4), short_batch)


@pytest.mark.parametrize(
    "precision", ["bf16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp32", "fp16"))]
)
def test_budgets(precision):
    unlimited = train(WIDE, make_config(precision), steps=8)
    model_data = unlimited.report["num_parameters"] * (16 if precision == "fp32" else 14)
    least = least_device_memory(WIDE, make_config(precision))
    print(
        f"{precision}: model data {model_data}, unlimited peak {unlimited.report['device_peak_bytes']}, least {least}"
    )
    assert least < model_data // 8
    for budget in (model_data // 4, model_data // 8, least):
        run = train(WIDE, make_config(precision, device_memory=budget), steps=8)
        print(
            f"  budget {budget}: peak {run.report['device_peak_bytes']}, uploaded {run.report['uploaded_bytes']}, "
            f"evictions {run.report['num_evictions']}, on demand {run.report['num_on_demand_fetches']}"
        )
        assert run.report["device_peak_bytes"] <= budget
        assert run.report["uploaded_bytes"] > 0
        assert_same(run, unlimited)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_chunk_sizes(precision):
    runs = [
        train(WIDE, make_config(precision, default_chunk_size=numel, gradient_clipping=0.1), steps=5)
        for numel in (64 * 1024, 1024 * 1024, 64 * 1024 * 1024)
    ]
    assert len({run.report["num_chunks"] for run in runs}) > 1
    for run in runs[1:]:
        assert_same(run, runs[0])
        assert run.grad_norms == runs[0].grad_norms


@pytest.mark.parametrize("precision", PRECISIONS)
def test_planned_and_on_demand(precision):
    budget = make_config(precision, device_memory=least_device_memory(WIDE, make_config(precision)) * 5 // 4)
    planned = train(WIDE, budget, steps=5)
    on_demand = train(WIDE, budget, steps=5, before_step=lambda engine, step: engine._session.runtime.forget_plan())
    assert planned.report["num_replayed_accesses"] > 0
    assert planned.report["num_prefetch_hits"] > 0
    assert on_demand.report["num_replayed_accesses"] == 0
    assert on_demand.report["num_prefetch_hits"] == 0
    assert_same(planned, on_demand)


@pytest.mark.parametrize("use_hybrid_adam", [True, False])
def test_where_adam_runs(use_hybrid_adam):
    config = make_config("bf16", gradient_clipping=1.0)
    config["optimizer"]["params"]["use_hybrid_adam"] = use_hybrid_adam
    run = train(WIDE, config, steps=8)
    assert (run.report["num_device_state_chunks"] > 0) == use_hybrid_adam
    assert_same(run, train(WIDE, make_config("bf16", gradient_clipping=1.0), steps=8))


_ISA_SCRIPT = """
import hashlib, json, sys, torch
torch.set_num_threads(2)
from tests.engine.test_equality import WIDE
from tests.training import make_config, train
digests = {}
for precision in ("fp32", "bf16", "fp16"):
    run = train(WIDE, make_config(precision, gradient_clipping=0.1), steps=6)
    digest = hashlib.sha256(json.dumps(run.losses).encode())
    for name in sorted(run.state):
        digest.update(run.state[name].contiguous().numpy().tobytes())
    digests[precision] = [run.report["isa"], digest.hexdigest()]
print(json.dumps(digests))
"""


@pytest.mark.slow
def test_instruction_sets():
    results = {}
    for isa in _C.optim.supported_isas():
        done = run_python("-c", _ISA_SCRIPT, environment={"PATRICKSTAR_ISA": isa})
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout.splitlines()[-1])
        assert all(used == isa for used, _ in result.values())
        results[isa] = {precision: digest for precision, (_, digest) in result.items()}
    print(f"compared {', '.join(results)}")
    assert len({json.dumps(result) for result in results.values()}) == 1


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [*((name, "AdamW") for name in MODELS), *(pytest.param(name, "Adam", marks=pytest.mark.slow) for name in VARIED)],
)
def test_against_pytorch(name, optimizer):
    reference = train_plain(MODELS[name], optimizer)
    run = train(MODELS[name], make_config(optimizer=optimizer))
    error = relative_error(run, reference)
    loss_error = max(abs(a - b) / abs(b) for a, b in zip(run.losses, reference.losses, strict=True))
    print(f"{name} {optimizer}: parameters {error:.1e}, losses {loss_error:.1e}")
    assert error <= 1e-6
    assert loss_error <= 1e-5
    assert run.losses[0] == reference.losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"), [*itertools.product(MODELS, ["fp32", "bf16"]), *((name, "fp16") for name in VARIED)]
)
def test_models_in_their_least_budget(name, precision):
    config = make_config(precision, gradient_clipping=1.0)
    unlimited = train(MODELS[name], config, steps=6)
    least = least_device_memory(MODELS[name], config, steps=2)  # in "unused" the second step uses more than the first
    run = train(MODELS[name], {**config, "device_memory": least}, steps=6)
    print(
        f"{name} {precision}: unlimited peak {unlimited.report['device_peak_bytes']}, least {least}, peak "
        f"{run.report['device_peak_bytes']}"
    )
    assert run.report["device_peak_bytes"] <= least < unlimited.report["device_peak_bytes"]
    assert_same(run, unlimited)


@pytest.mark.parametrize(
    ("name", "use_reentrant"), [("gpt2", True), ("gpt2", False), ("bert", False), ("t5", True), ("llama", False)]
)
def test_activation_checkpointing(name, use_reentrant):
    config = make_config("bf16")
    plain = least_device_memory(MODELS[name], config)
    unlimited = train(MODELS[name], config, steps=5, checkpointing=use_reentrant)
    least = least_device_memory(MODELS[name], config, checkpointing=use_reentrant)
    print(f"{name}: least budget {plain} without, {least} with checkpointing")
    assert least < plain
    run = train(MODELS[name], {**config, "device_memory": least}, steps=5, checkpointing=use_reentrant)
    assert run.report["device_peak_bytes"] <= least
    assert_same(run, unlimited)


@pytest.mark.parametrize(
    "precision", ["fp32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bf16", "fp16"))]
)
def test_accumulation(precision):
    config = make_config(precision, gradient_clipping=1.0)
    unlimited = train(NARROW, config, steps=6, accumulate=3)
    least = least_device_memory(NARROW, config, accumulate=3)
    for other in ({"device_memory": least}, {"device_memory": least * 2}, {"default_chunk_size": 1024 * 1024}):
        assert_same(train(NARROW, {**config, **other}, steps=6, accumulate=3), unlimited)
    if precision == "fp32":
        assert relative_error(unlimited, train_plain(NARROW, steps=6, accumulate=3, clipping=1.0)) <= 1e-6
